"""``report.html`` of a run directory: what happened, in one page that opens without a network."""

from __future__ import annotations

import html
import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from lbpar.calibrate.machine import machine_of
from lbpar.config.run_file import AUTO, RunConfig
from lbpar.cost.kernel_time import item_bytes
from lbpar.cost.moves import busiest
from lbpar.cost.price import item_of, owner
from lbpar.errors import ConfigError, Unsupported
from lbpar.json_text import write_text
from lbpar.papers.chen import least_elements
from lbpar.plan.explain import layer_rows, step_numbers
from lbpar.plan.picture import picture
from lbpar.plan.priced import PricedPlan, Settings
from lbpar.plan.resolve import optimizer_name, resolve_plan
from lbpar.program.steps import Compute
from lbpar.study import run_figures as draw
from lbpar.study.measure import imbalance, parts_of
from lbpar.study.page import figures, page, table
from lbpar.study.table import predicted_parts
from lbpar.tables import short
from lbpar.text import human_bytes, human_seconds
from lbpar.train.directory import run_config
from lbpar.train.metrics import read_metrics
from lbpar.train.setup import build_graph

log = logging.getLogger(__name__)
PAGE = "report.html"
Facts = Mapping[str, Any]


def after_run(out: Path) -> None:
    """Write the page of a run that has just ended, where matplotlib is installed. A failure is a warning."""
    if find_spec("matplotlib") is None:
        return
    try:
        write_report(out, allow_code=True)  # it has run already
    except Exception as error:  # noqa: BLE001  the run is whole, whatever goes wrong here
        log.warning("%s: not written: %s: %s", out / PAGE, type(error).__name__, error)


def write_report(out: Path, machine: str | None = None, allow_code: bool = False) -> Path:
    """Write the page of a run directory; returns its path.

    Parameters
    ----------
    out : Path
        The run directory.
    machine : str, optional
        What to predict the step for: a name, a machine file, or ``auto`` (measured now, by this process). Default: the machine that the
        plan was chosen for or the run file names; without one nothing is predicted.
    allow_code : bool
        Whether the run file's Python function may be run.

    Raises
    ------
    LbparError
        The directory holds no finished run, or matplotlib is missing.
    """
    facts = _read(out / "report.json")
    if facts is None or "ranks" not in facts:
        raise ConfigError(f"study report: {out} holds no report.json of a finished run.")
    if find_spec("matplotlib") is None:
        raise Unsupported("study report: matplotlib is not installed; `pip install 'lbpar[plot]'` brings it.")
    config = run_config(out, facts["procs"], allow_code=allow_code)
    settings, priced, known = _expected(out, config, facts["procs"], machine)
    traced = _read(out / "step.json") or {"traceEvents": [], "otherData": {}}
    records = read_metrics(out / "metrics.jsonl")
    parts = _parts(out, config, facts, records, settings, priced, known, traced)
    write_text(
        out / PAGE, page(f"{settings.graph.name}: a run on {facts['procs']} rank{'s' * (facts['procs'] > 1)}", parts)
    )
    return out / PAGE


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _expected(out: Path, config: RunConfig, procs: int, machine: str | None) -> tuple[Settings, PricedPlan, bool]:
    """The run's plan as the cost model sees it, and whether its times are those of a known machine."""
    measured = out / "machine.yaml"
    given = machine or (config.machine if config.machine != AUTO else str(measured) if measured.is_file() else None)
    graph = build_graph(config)
    plan = resolve_plan(config.parallel, graph, config.train.batch, procs)
    optimizer = optimizer_name(config.train.optimizer)
    # Bytes are the same on any machine, but half types take fewer on GPUs.
    on = machine_of(given or ("h100-nvl8" if config.engine.name == "cupy" else "laptop"), config.engine)
    settings = Settings(
        graph,
        config.train.batch,
        on,
        config.engine.arithmetic,
        optimizer,
        config.data.prefetch,
        **config.engine.planned,
    )
    return settings, settings.priced("its plan", plan), given is not None


def _parts(
    out: Path,
    config: RunConfig,
    facts: Facts,
    records: Sequence[Facts],
    settings: Settings,
    priced: PricedPlan,
    known: bool,
    traced: Facts,
) -> Iterator[str]:
    yield table(("", ""), _summary(facts))
    yield from figures(_drawn("Loss and accuracy", draw.curves, records))
    rows = layer_rows(priced, settings, {})
    explained = {
        "network": settings.graph.name,
        "batch": settings.batch,
        "procs": facts["procs"],
        "machine": {"name": settings.machine.name},
        "strategy": "predicted" if known else "predicted for another machine",
        "step": {"seconds": priced.seconds},
        "layers": rows,
    }
    yield from figures({"The plan": _svg(picture(explained))})

    steps = max(1, facts.get("batches", facts["updates"] * config.train.accumulate))
    own = ("total", "input")
    each = [{k: s / steps for k, s in r["seconds"].items() if k not in own} for r in facts["ranks"]]
    waited, whole = ([r["seconds"].get(name, 0.0) / steps for r in facts["ranks"]] for name in ("input", "total"))
    measured = parts_of(each, waited, whole)
    predicted = predicted_parts(step_numbers(priced, settings.batch)) if known else {}
    yield from figures(_drawn("Where a step's time went", draw.parts, measured, predicted))
    kinds = dict.fromkeys((*measured, *predicted))
    yield table(
        ("part of a step", "measured", "predicted"),
        [[k, *(human_seconds(v[k]) if k in v else "" for v in (measured, predicted))] for k in kinds],
    )
    if known:
        ratio = priced.seconds / (sum(whole) / len(whole)) if any(whole) else 0.0
        yield f"<p>Predicted step on {html.escape(settings.machine.name)}: {human_seconds(priced.seconds)}, {ratio:.2f} of the measured.</p>"
    else:
        yield (
            "<p>Nothing is predicted: the run file names no machine, and none was measured for this run. "
            "<code>lbpar study report DIR --machine auto|NAME|FILE</code> adds it.</p>"
        )
    yield f"<p>Imbalance: the slowest rank computes {100 * imbalance(each):.1f} % longer than the mean of {facts['procs']}.</p>"
    if traced["traceEvents"]:
        yield from _one_step(traced, rows if known else [], priced.plan.places)
    yield from _least(priced, settings, traced["otherData"].get("bytes", ()))
    yield "<h2>Environment</h2>"
    yield table(("", ""), _environment(facts))
    yield f"<h2>Run file</h2><pre>{html.escape((out / 'run.yaml').read_text(encoding='utf-8'))}</pre>"


def _summary(facts: Facts) -> list[tuple[str, str]]:
    shown = ("epoch", "step", "loss", "accuracy", "test_loss", "test_accuracy", "images_per_s")
    rows = [(k, short(facts[k])) for k in shown if facts.get(k) is not None]
    rows += [
        ("time", human_seconds(facts["total_seconds"])),
        ("of which start-up", human_seconds(facts["startup_seconds"])),
    ]
    return [*rows, ("state per rank", human_bytes(facts["state_bytes"])), ("parameters", f"{facts['parameters']:,}")]


def _environment(facts: Facts) -> Iterator[tuple[str, str]]:
    for key in ("command", "job", "commit", "started", "ended", "engine", "dtype", "threads"):
        yield key, str(facts[key] or "")
    for host, ranks in facts["hosts"].items():
        yield f"host {host}", "ranks " + ", ".join(map(str, ranks))
    yield from facts["versions"].items()


def _one_step(traced: Facts, rows: Sequence[Facts], places: Sequence[int]) -> Iterator[str]:
    """What is known of the traced step: its timeline, bytes, and each layer's computation."""
    events, facts = traced["traceEvents"], traced["otherData"]
    yield from figures(_drawn(f"Timeline of step {facts['step']}", draw.timeline, events, size=(11.0, 5.0)))
    if len(places) > 1:
        title = f"Stages and micro-batches of step {facts['step']}"
        yield from figures(_drawn(title, draw.stages, events, places, size=(11.0, 1.2 + 0.4 * len(places))))
    counted, differs = bytes_rows(facts["bytes"])
    yield f"<h2>Bytes sent in step {facts['step']}</h2>"
    yield table(("kind", "counted, all ranks", "the model's", "ranks that differ"), counted, differs)
    predicted = {r["layer"]: r["compute_seconds"] for r in rows}
    yield from figures(_drawn("Computation per layer", draw.layers, layer_seconds(events), predicted, size=(11.0, 4.2)))


def bytes_rows(ranks: Sequence[Facts]) -> tuple[list[list[str]], list[bool]]:
    """A row per kind of move: bytes that the transports counted, bytes that the program says; and which rows differ on some rank.

    What no move of the program sent (norms of gradients, say) has a row under its own name.
    """
    kinds = list(dict.fromkeys(k for r in ranks for side in ("model", "counted") for k in r[side]))
    rows, marks = [], []
    for kind in kinds:
        pairs = [(r["counted"].get(kind, 0), r["model"].get(kind, 0)) for r in ranks]
        in_program = any(kind in r["model"] for r in ranks)
        odd = [str(i) for i, (a, b) in enumerate(pairs) if a != b and in_program]
        model = f"{sum(b for _, b in pairs):,}" if in_program else "not part of the program"
        rows.append([kind, f"{sum(a for a, _ in pairs):,}", model, ", ".join(odd) or "none"])
        marks.append(bool(odd))
    return rows, marks


def _least(priced: PricedPlan, settings: Settings, ranks: Sequence[Facts]) -> Iterator[str]:
    """Bytes of convolutions beside the least that any even split of them sends."""
    rows = bound_rows(priced, settings)
    if priced.plan.grid.size == 1 or not rows:
        return
    sent, least = sum(r[1] for r in rows), sum(r[2] for r in rows)
    counted = max((sum(r["counted"].values()) for r in ranks), default=0)
    yield "<h2>Bytes of convolutions beside the least possible</h2>"
    yield (
        "<p>The lower bound holds for one of a layer's three products, on processes that share work and arrays evenly (Chen et al., PASC 2022); "
        "a step has all three, and sums of weight gradients besides.</p>"
    )
    each = [[name, f"{a:,}", f"{b:,}", f"{a / b:.1f}" if b else ""] for name, a, b in rows]
    total = ["all", f"{sent:,}", f"{least:,}", f"{sent / least:.1f}" if least else ""]
    yield table(("layer", "sent by the busiest rank", "lower bound", "ratio"), [*each, total])
    if counted:
        yield f"<p>In the traced step the busiest rank sent {human_bytes(counted)} for all layers together, as counted.</p>"


def bound_rows(priced: PricedPlan, settings: Settings) -> list[tuple[str, int, int]]:
    """Of every convolution: bytes that the busiest rank of each of its moves sends in a step, and the lower bound."""
    program, procs, halves, out = priced.program, priced.plan.grid.size, settings.machine.half_arrays, []
    sent: dict[str, int] = {}
    for s in program.moves:
        size = busiest(s.move).elements * item_of(program, s.src, settings.dtype, halves)
        sent[s.node] = sent.get(s.node, 0) + (0 if s.move.kind == "slice" else size)
    for step in program.steps:
        windows = dict(step.kernel.attrs).get("windows") if isinstance(step, Compute) else None
        if isinstance(step, Compute) and step.kernel.product == "forward" and windows:
            operands = (*step.kernel.reads[:2], step.kernel.writes[-1])
            arrays = [prod(i.extent for i in o.dims) for o in operands]
            updates = step.kernel.flops / 2
            least = least_elements(updates, arrays, [w.kernel for w in windows], [w.stride for w in windows], procs)
            layer = owner(step, program)
            out.append((layer, sent.get(layer, 0), round(least * item_bytes(None, settings.dtype, halves))))
    return out


def layer_seconds(events: Sequence[Facts]) -> dict[str, float]:
    """Seconds of each layer's kernels in a traced step, of the rank where they took longest; per batch."""
    each: dict[str, dict[int, float]] = {}
    batches = 0
    for e in events:
        batches += e.get("cat") == "step" and e["pid"] == 0
        layer = e["name"].rpartition(" ")[0]
        if e.get("cat") in ("forward", "backward") and e["tid"] == 0 and layer:
            times = each.setdefault(layer, {})
            times[e["pid"]] = times.get(e["pid"], 0.0) + e["dur"] / 1e6
    return {layer: max(times.values()) / max(1, batches) for layer, times in each.items()}


def _drawn(title: str, make: Callable[..., bool], *data: Any, size: tuple[float, float] = (8.0, 3.6)) -> dict[str, str]:
    """A figure under its title; nothing where there is nothing to draw."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return {title: _svg(figure)} if make(figure, *data) else {}


def _svg(figure: Any) -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "lbpar", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
