"""Strong and weak scaling studies: run or predict the points, then write ``study.csv``, ``.json``, ``.html`` and the figures."""

from __future__ import annotations

import argparse
import gc
import html
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from lbpar.config.arguments import given_run
from lbpar.config.parallel import STRATEGIES
from lbpar.config.run_file import RunConfig, dump
from lbpar.config.yaml_text import parse_yaml
from lbpar.cost.machine import Machine, find_machine
from lbpar.errors import ConfigError, LbparError
from lbpar.json_text import dumps, write_text
from lbpar.provenance import provenance
from lbpar.runtime.room import node_memory
from lbpar.study.figures import draw_all
from lbpar.study.launch import FOUND, JOB, default_launcher, outcome, prepare, run_all, run_point, submit
from lbpar.study.measure import step_options
from lbpar.study.page import figures, page, table
from lbpar.study.points import STRONG, Point, make_points, parse_plans, parse_procs
from lbpar.study.predict import predict
from lbpar.study.table import make_rows, to_csv
from lbpar.tables import print_table
from lbpar.text import flatten, human_bytes, human_seconds
from lbpar.threads import cores
from lbpar.train.lock import run_lock
from lbpar.train.setup import build_graph

Say = Callable[[str], None]
_asked: list[
    tuple[RunConfig, int, Machine]
] = []  # forked processes find it there: not all networks can be sent to them
PLANNER = 2 << 30
"""Bytes that planning may take: DenseNet-121 on 65,536 processes takes 1.7 GB."""
#: Columns of the printed table and of the page's.
HEADS = (
    "plan",
    "processes",
    "batch",
    "sample",
    "step",
    "spread",
    "speed-up",
    "efficiency",
    "predicted",
    "pred./meas.",
    "memory",
    "remarks",
)


def run_study(args: argparse.Namespace, say: Say = print) -> int:
    """The commands ``strong`` and ``weak``; 0, or 1 if a point failed.

    Raises
    ------
    LbparError
        What the command line asks for is impossible; then no point was run.
    """
    config, kind = given_run(args), args.command
    points = make_points(
        config, kind, parse_procs(args.procs), parse_plans(args.plans), args.grow if kind != STRONG else ""
    )
    run_files = [p.run_file(config) for p in points]
    build_graph(run_files[0])  # a network that cannot be built is refused before anything is run
    out, found = Path(args.out), list[dict[str, Any] | None]()
    if args.predict:
        if any((out / p.folder / FOUND).is_file() for p in points):
            raise ConfigError(
                f"--out: {out} holds measured points, whose tables a prediction would replace; choose another --out."
            )
        if args.machine is None and config.machine == "auto":
            raise ConfigError(
                "--predict: name a machine with --machine (lbpar plan --help lists them), or a machine file."
            )
        found += _predict(points, run_files, find_machine(args.machine or config.machine), say)
    else:
        found += _measure(args, out, points, run_files, say)
    asked = {
        "kind": kind,
        "grow": args.grow if kind != STRONG else None,
        "predicted": args.predict,
        "run": dump(config),
    }
    write_study(out, asked, points, found)
    rows = make_rows(kind, points, found)
    print_table([cells(r) for r in rows], HEADS)
    for r in rows:
        if r["error"]:
            say(f"{Path(r['plan']).stem} on {r['procs']}: {r['error']}")
    say(f"-> {out / 'study.html'}")
    return 1 if any(r["error"] for r in rows) else 0


def _predict(points: Sequence[Point], runs: Sequence[RunConfig], machine: Machine, say: Say) -> list[dict[str, Any]]:
    """Predict all points, as many at once as there are cores, and memory for (a planner may take `PLANNER`)."""
    found: list[dict[str, Any]] = []
    _asked[:] = [(config, point.procs, machine) for point, config in zip(points, runs, strict=True)]
    workers = max(1, min(cores(), len(points), node_memory() // PLANNER))
    quick = gc.disable  # as `lbpar plan`: planning leaves no cycles behind
    with ProcessPoolExecutor(workers, get_context("fork"), initializer=quick) as pool:
        for point, made in zip(points, pool.map(_predicted, range(len(points))), strict=True):
            found.append(made)
            step = made.get("predicted", {}).get("seconds")
            say(f"{len(found)}/{len(points)}  {point.folder}  {human_seconds(step) if step else 'no plan'}")
    return found


def _predicted(i: int) -> dict[str, Any]:
    return predict(*_asked[i])


def _measure(
    args: argparse.Namespace, out: Path, points: Sequence[Point], runs: Sequence[RunConfig], say: Say
) -> list[dict[str, Any] | None]:
    """Run what is still to be run; what every folder then holds."""
    if args.machine is not None:
        runs = [r.model_copy(update={"machine": args.machine}) for r in runs]
    for point, config in zip(points, runs, strict=True):
        prepare(out / point.folder, config)
    with run_lock(out, "--out"):  # points that two studies measure at a time disturb each other
        return _left(args, out, points, say)


def _left(args: argparse.Namespace, out: Path, points: Sequence[Point], say: Say) -> list[dict[str, Any] | None]:
    before = [outcome(out / p.folder) for p in points]
    left = [p for p, f in zip(points, before, strict=True) if f is None or ("error" in f and args.retry)]
    if len(left) < len(points):
        say(f"{len(points) - len(left)} of {len(points)} points are there already")
    for options in dict.fromkeys(tuple((f or {}).get("options", ())) for f in before):
        if options and list(options) != step_options(args):
            say(f"some of them were measured with {' '.join(options)}, and stay so; other steps need another --out")
    launcher, job = args.launcher or default_launcher(), out / JOB
    if left and args.slurm is None and job.is_file():
        raise ConfigError(
            f"--out: job array {job.read_text(encoding='utf-8').strip()} of this study may still be under way; give --slurm again, which "
            f"waits for it, or delete {job} if it is certainly gone."
        )
    if left and args.slurm is not None:
        submit(out, left, launcher, step_options(args), args.slurm, say)
    else:
        run_all(out, left, launcher, step_options(args), say)
    return [outcome(out / p.folder) for p in points]


def measure_one(args: argparse.Namespace) -> int:
    """The command ``point``, which a task of a job array runs: measure one prepared folder."""
    run_point(Path(args.folder), args.procs, args.launcher or default_launcher(), step_options(args))
    return 1 if "error" in (outcome(Path(args.folder)) or {"error": ""}) else 0


def write_study(
    out: Path, asked: Mapping[str, Any], points: Sequence[Point], found: Sequence[Mapping[str, Any] | None]
) -> None:
    """Write ``study.csv``, ``study.json``, ``study.html`` and the figures.

    Raises
    ------
    LbparError
        The directory cannot be written, or matplotlib is missing.
    """
    rows = make_rows(asked["kind"], points, found)
    write_text(out / "study.csv", to_csv(rows), "--out")
    content = {
        **asked,
        "environment": {**provenance(), "host": platform.node(), "cores": os.cpu_count()},
        "rows": rows,
        "points": [f or {} for f in found],
    }
    write_text(out / "study.json", dumps(content, indent=1) + "\n", "--out")
    drawn = draw_all(out, asked["kind"], rows)
    write_text(out / "study.html", page(f"{asked['kind'].capitalize()} scaling", _parts(content, rows, drawn)), "--out")


def _parts(content: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], drawn: Mapping[str, str]) -> Iterable[str]:
    e = content["environment"]
    machines = ", ".join(dict.fromkeys(f["machine"] for f in content["points"] if "machine" in f))
    how = (
        "Predicted by the cost model; nothing was run."
        if content["predicted"]
        else "Measured, with the prediction beside."
    )
    grow = f" {content['grow']} grows with the processes." if content["grow"] else ""
    yield f"<p>{how}{grow} lbpar {e['versions']['lbpar']} on {html.escape(e['host'])} ({e['cores']} cores); machine: {html.escape(machines)}.</p>"
    yield table(HEADS, map(cells, rows), [bool(r["error"]) for r in rows])
    if any(r["oversubscribed"] for r in rows):
        yield "<p>* more ranks than cores: these times say little about a machine that has a core for each.</p>"
    for r in rows:
        if r["error"]:
            yield f"<p>{html.escape(Path(r['plan']).stem)} on {r['procs']} failed:</p><pre>{html.escape(r['error'])}</pre>"
    yield from figures(drawn)
    yield f"<h2>Run file</h2><pre>{html.escape(content['run'])}</pre>"


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the table for people."""
    measured, predicted = row["seconds"], row["predicted_seconds"]
    gained, ratio = row["speedup"] or row["predicted_speedup"], row["predicted / measured"]
    memory = row["memory"] or row["predicted_memory"]
    remarks = ["* more ranks than cores"] if row["oversubscribed"] else []
    if row["doubts"]:
        remarks.append("predicted for a machine that was busy when it was measured")
    if row["idle_ranks"]:
        remarks.append(f"{row['idle_ranks']} processes without a sample")
    if (row["used_ranks"] or row["procs"]) < row["procs"]:
        remarks.append(f"no layer splits over more than {row['used_ranks']}")
    if row["error"]:
        remarks.append("failed")
    return [
        Path(row["plan"]).stem if row["plan"] not in STRATEGIES else row["plan"],
        str(row["procs"]),
        str(row["batch"]),
        row["input"] or "",
        human_seconds(measured) if measured else "",
        f"{100 * row['spread']:.0f} %" if row["spread"] is not None else "",
        f"{gained:.2f}" if gained else "",
        f"{100 * row['efficiency']:.0f} %" if row["efficiency"] else "",
        human_seconds(predicted) if predicted else "",
        f"{ratio:.2f}" if ratio else "",
        human_bytes(memory) if memory else "",
        "; ".join(remarks),
    ]


def compare(first: Path, second: Path) -> list[tuple[str, int, str, str, str]]:
    """Points that two studies share: plan, processes, the time of a step in both (``~`` where it is predicted), second over first.

    Raises
    ------
    ConfigError
        A folder holds no study, or they have no point in common.
    """
    a, b = (_points(path) for path in (first, second))
    shared = [k for k in a if k in b]
    if not shared:
        raise ConfigError(f"study compare: {first} and {second} have no point (plan and processes) in common.")
    rows = []
    for plan, procs in shared:
        pair = [s[plan, procs] for s in (a, b)]
        times = [r["seconds"] or r["predicted_seconds"] for r in pair]
        one, two = (
            f"{'' if r['seconds'] else '~'}{human_seconds(t)}" if t else "" for r, t in zip(pair, times, strict=True)
        )
        rows.append((plan, procs, one, two, f"{times[1] / times[0]:.2f}" if all(times) else ""))
    return rows


def differences(first: Path, second: Path) -> list[str]:
    """What two studies were asked for that is not the same: the field of the run file, or an option, and both values."""
    a, b = (_load(folder, _wanted) for folder in (first, second))
    return [f"{name}: {a.get(name)} | {b.get(name)}" for name in {**a, **b} if a.get(name) != b.get(name)]


def _points(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    times = "seconds", "predicted_seconds"
    return _load(folder, lambda s: {(Path(r["plan"]).stem, r["procs"]): {k: r[k] for k in times} for r in s["rows"]})


def _wanted(study: Mapping[str, Any]) -> dict[str, Any]:
    run = flatten(parse_yaml(study["run"], "the study's run file"), ".")
    return {"kind": study["kind"], "grow": study["grow"], **{k: v for k, v in run.items() if k != "run.out"}}


def _load(folder: Path, part: Callable[[dict[str, Any]], dict[Any, Any]]) -> dict[Any, Any]:
    """Of a study's file, what ``part`` takes."""
    try:
        return part(json.loads((folder / "study.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, LbparError):
        raise ConfigError(f"study compare: {folder} holds no study.json of a finished study.") from None
