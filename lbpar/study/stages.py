"""`python -m lbpar.study stages --out DIR`: where stages beat the best plan without, as the cost model sees it.

For each machine and number of processes the best plan without stages, and for each number of stages the best schedule of those that keep the
weights exact, with cuts and grids chosen together.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lbpar.config.output import make_directory, write_output
from lbpar.config.paths import path_option
from lbpar.config.section import parse_bytes
from lbpar.cost.machine import find_machine
from lbpar.cost.price import SLOTS
from lbpar.errors import ConfigError, Unsupported
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.models.registry import build_model
from lbpar.plan.compare_stages import best_without, compare_stages, refused, unpriced
from lbpar.plan.priced import Settings
from lbpar.plan.stage_words import whether_stages_pay
from lbpar.text import count

FILE = "stages.json"


def numbers(text: str) -> list[int]:
    """As in 2,4,8."""
    if not all(part.isdecimal() and 0 < int(part) < 2**31 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected whole numbers of at least 1, as in 2,4,8")
    return [int(n) for n in text.split(",")]


def add_options(p: argparse.ArgumentParser) -> None:
    """Options of the command."""
    p.add_argument("--model", default="vgg16", help="name of a network (default: %(default)s)")
    p.add_argument("--input", type=numbers, metavar="H,W,C", help="shape of one sample, channels last")
    p.add_argument("--classes", type=int, help="number of classes")
    p.add_argument("--loss", choices=sorted(LOSSES), default="cross_entropy", help="default: %(default)s")
    p.add_argument("--optimizer", choices=sorted(SLOTS), default="momentum", help="default: %(default)s")
    p.add_argument("--batch", type=int, default=256, help="samples per step (default: %(default)s)")
    p.add_argument("--machines", default="azure-nc24v3,pase-1080ti,lassen,perlmutter-a100", help="default: %(default)s")
    p.add_argument("--procs", type=numbers, default=[16, 64, 256, 1024], help="default: 16,64,256,1024")
    p.add_argument("--stages", type=numbers, default=[2, 4, 8], help="default: 2,4,8")
    p.add_argument("--micro-batches", type=int, help="parts of each batch (default: 4 per stage)")
    p.add_argument("--memory", help="what one process may use, as in 16GB, or machine: what the machine has")
    p.add_argument(
        "--out", type=path_option, required=True, metavar="DIR", help=f"where {FILE}, a table and a figure go"
    )


def settings_of(args: argparse.Namespace, machine: str) -> Settings:
    """What is planned on one machine."""
    options = {k: v for k, v in (("input", args.input), ("classes", args.classes)) if v is not None}
    graph = build_model(args.model, **options).with_loss(LOSSES[args.loss]())
    return Settings(graph, args.batch, find_machine(machine), "float32", args.optimizer)


def limit_of(text: str | None, settings: Settings) -> int | None:
    """Bytes that one process may use."""
    if text is None or text == "machine":
        return settings.machine.memory if text else None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--memory: got {text!r}, {error}, or machine.") from None


def missing_of(graph: Graph, batch: int, procs: int, counts: list[int], micro_batches: int | None) -> dict[str, str]:
    """Numbers of stages that have no figure on so many processes, and why."""
    out = {}
    for k in counts:
        why = refused(graph, procs, k) or next(
            (w for s, w in unpriced(graph, batch, procs, k, micro_batches) if s is None), ""
        )
        if why:
            out[str(k)] = why
    return out


def point(settings: Settings, procs: int, counts: list[int], micro_batches: int | None, limit: int | None) -> dict:
    """One row: the best plan without stages and with each number of them, and in words what decides."""
    missing = missing_of(settings.graph, settings.batch, procs, counts, micro_batches)
    none = best_without(settings, procs, limit)
    staged = [
        compare_stages(settings, procs, [k], micro_batches, limit=limit)[0] for k in counts if str(k) not in missing
    ]
    rows = {str(r.places): r.as_dict(settings.batch) for r in (none, *staged)}
    return {"plans": rows, "words": whether_stages_pay([none, *staged], settings, limit), "missing": missing}


def run(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """The command: a table, a figure, and numbers, which are kept point by point; the same command goes on where it was cut off."""
    if find_spec("matplotlib") is None:
        raise Unsupported("study stages: it draws a figure with matplotlib; pip install 'lbpar[plot]'")
    out = Path(args.out)
    make_directory(out, "study stages")
    args.stages, args.procs, machines = (
        list(dict.fromkeys(given)) for given in (args.stages, args.procs, args.machines.split(","))
    )
    _check(args, machines)
    asked = {k: v for k, v in vars(args).items() if k not in ("command", "out", "machines", "procs")}
    rows = _known(out / FILE, asked)
    wanted = [(m, procs) for m in machines for procs in args.procs]
    for machine, procs in wanted:
        if not any((r["machine"], r["procs"]) == (machine, procs) for r in rows):
            settings = settings_of(args, machine)
            found = point(
                settings, procs, [k for k in args.stages if k > 1], args.micro_batches, limit_of(args.memory, settings)
            )
            rows.append({"machine": machine, "procs": procs, **found})
            write_output(str(out / FILE), json.dumps({"asked": asked, "rows": rows}, indent=1) + "\n", "the study")
        row = _of(rows, machine, procs)
        say(f"{machine}, {count(procs, 'process')}: {' '.join([*row['words'], *_missing(row)])}")
    shown = [_of(rows, *w) for w in wanted]
    title = f"{args.model}, batch {args.batch}" + (f", memory {args.memory}" if args.memory else "")
    (out / "stages.md").write_text("\n".join(markdown(title, shown)) + "\n")
    _draw(title, shown, out)
    say(f"-> {out / 'stages.md'}")
    return 0


def _check(args: argparse.Namespace, machines: list[str]) -> None:
    """Refuse a study without a single figure of stages."""
    settings, counts = settings_of(args, machines[0]), [k for k in args.stages if k > 1]
    missing = {p: missing_of(settings.graph, args.batch, p, counts, args.micro_batches) for p in args.procs}
    if all(len(m) == len(counts) for m in missing.values()):
        why = " ".join(f"{k} stages on {count(p, 'process')}: {w}" for p, m in missing.items() for k, w in m.items())
        raise ConfigError(f"study stages: nothing is left to compare. {why or '--stages: give numbers of at least 2.'}")


def _missing(row: dict) -> list[str]:
    return [f"No figure with {k} stages: {why}" for k, why in row.get("missing", {}).items()]


def _of(rows: list[dict], machine: str, procs: int) -> dict:
    return next(r for r in rows if (r["machine"], r["procs"]) == (machine, procs))


def _known(path: Path, asked: dict[str, Any]) -> list[dict]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    if found.get("asked") != asked:
        raise ConfigError(f"study stages: {path} is of another study; give another --out, or remove it.")
    return list(found["rows"])


def best_of(row: dict) -> tuple[dict, dict | None]:
    """The plan without stages, and the best with stages, what fits in memory first."""
    staged = [p for k, p in row["plans"].items() if k != "1"]
    return row["plans"]["1"], min(staged, key=lambda p: (not p["fits"], p["seconds"]), default=None)


def markdown(title: str, rows: list[dict]) -> Iterator[str]:
    """The table."""
    counts = sorted({int(k) for r in rows for k in r["plans"]} - {1})
    yield f"{title}: milliseconds a step (modelled; *: does not fit in memory)"
    yield ""
    heads = ["machine", "processes", "no stages", *(f"{k} stages" for k in counts), "best with stages"]
    yield "| " + " | ".join(heads) + " |"
    yield "| --- |" + " ---: |" * (len(heads) - 1)
    for r in rows:
        none, best = best_of(r)
        cells = [_cell(r["plans"].get(str(k))) for k in (1, *counts)]
        if best is None:
            ratio = ""
        elif not none["fits"] and not best["fits"]:
            ratio = "none fits in memory"
        elif none["fits"] != best["fits"]:
            ratio = "only stages fit" if best["fits"] else "stages do not fit"
        else:
            ratio = f"{none['seconds'] / best['seconds']:.2f} times as fast ({best['stages']}, {best['schedule']})"
        yield "| " + " | ".join([r["machine"], f"{r['procs']:,}", *cells, ratio]) + " |"

    for r in rows:
        for line in _missing(r):
            yield ""
            yield f"{r['machine']}, {count(r['procs'], 'process')}: {line}"


def _cell(plan: dict | None) -> str:
    return "" if plan is None else f"{1e3 * plan['seconds']:,.3g}".rstrip(".") + ("" if plan["fits"] else "*")


def _draw(title: str, rows: list[dict], out: Path) -> None:
    from matplotlib.figure import Figure

    machines = list(dict.fromkeys(r["machine"] for r in rows))
    figure = Figure(figsize=(3.4 * len(machines) + 0.6, 3.4), layout="constrained")
    for axis, machine in zip(figure.subplots(1, len(machines), squeeze=False)[0], machines, strict=True):
        mine = [r for r in rows if r["machine"] == machine]
        for k in sorted({int(k) for r in mine for k in r["plans"]}):
            there = [(r["procs"], 1e3 * r["plans"][str(k)]["seconds"]) for r in mine if str(k) in r["plans"]]
            axis.plot(*zip(*there, strict=True), marker="o", label="no stages" if k == 1 else f"{k} stages")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("processes")
        axis.set_title(machine, fontsize=9)
        axis.legend(fontsize=7)
    figure.axes[0].set_ylabel("ms a step")
    figure.suptitle(title, fontsize=9)
    for suffix in ("png", "svg"):
        figure.savefig(out / f"stages.{suffix}", dpi=110)
