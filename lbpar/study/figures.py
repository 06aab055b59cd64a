"""The figures of a scaling study, as matplotlib draws them without a screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lbpar.errors import Unsupported
from lbpar.json_text import unwritable
from lbpar.study.points import STRONG
from lbpar.whole_file import beside

#: Colours of plans, and of the parts of a step.
LINES = ("#1f5fa8", "#cc6677", "#117733", "#ddaa33", "#aa4499", "#44aa99", "#332288")
PARTS = {
    "compute": "#4477aa",
    "update": "#88bbdd",
    "allreduce": "#cc6677",
    "reduce_scatter": "#dd99aa",
    "allgather": "#aa4499",
    "alltoall": "#882255",
    "halo": "#117733",
    "accumulate": "#99cc66",
    "p2p": "#44aa77",
    "idle": "#cccccc",
    "input": "#ddaa33",
    "other": "#888888",
}
Row = Mapping[str, Any]


def draw_all(out: Path, kind: str, rows: Sequence[Row]) -> dict[str, str]:
    """Draw the study's figures as PNG and SVG into a folder; the SVG texts by title, for the page.

    Raises
    ------
    Unsupported
        matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise Unsupported("study: matplotlib is not installed; `pip install 'lbpar[plot]'` brings it.") from None
    drawn = {}
    with matplotlib.rc_context({"svg.hashsalt": "lbpar", "font.size": 9}):
        for name, title, draw in (
            ("speedup", "Speed-up" if kind == STRONG else "Scaled speed-up", speedup),
            ("efficiency", "Efficiency", efficiency),
            ("time", "Time of a step", time),
            ("breakdown", "Where a step's time goes", breakdown),
            ("ranks", "Memory, bytes sent and imbalance of ranks", ranks),
        ):
            figure = Figure(figsize=(7.5, 4.2), layout="constrained")
            if not draw(figure, rows):
                continue
            for path, options in (
                (out / f"{name}.png", {"dpi": 130}),
                (out / f"{name}.svg", {"metadata": {"Date": None}}),
            ):
                with beside(path, partial(unwritable, path, option="--out")) as part:
                    figure.savefig(part, format=path.suffix[1:], **options)
            drawn[title] = (out / f"{name}.svg").read_text(encoding="utf-8")
    return drawn


def plans(rows: Sequence[Row], column: str) -> Iterator[tuple[str, list[int], list[float], str]]:
    """Each plan with the numbers of processes and values of a column, where there are any, and its colour."""
    for name, colour in zip(dict.fromkeys(r["plan"] for r in rows), LINES * len(rows), strict=False):
        there = [r for r in rows if r["plan"] == name and r[column] is not None]
        if there:
            yield Path(name).stem, [r["procs"] for r in there], [r[column] for r in there], colour


def _lines(axis: Any, rows: Sequence[Row], measured: str | None, predicted: str | None) -> bool:
    """Measured values as solid lines, predicted ones dashed."""
    drawn = False
    for column, style, mark, words in ((measured, "-", "o", ""), (predicted, "--", "x", ", predicted")):
        for name, procs, values, colour in plans(rows, column) if column else ():
            axis.plot(procs, values, style, marker=mark, markersize=4, color=colour, label=f"{name}{words}")
            drawn = True
    axis.set_xscale("log", base=2)
    counts = sorted({r["procs"] for r in rows})
    axis.set_xticks(counts, list(map(str, counts)), rotation=45 if len(counts) > 8 else 0)
    axis.minorticks_off()
    axis.set_xlabel("processes")
    axis.grid(alpha=0.3)
    return drawn


def speedup(figure: Any, rows: Sequence[Row]) -> bool:
    """Speed-up over processes, with the ideal line."""
    axis = figure.subplots()
    if not _lines(axis, rows, "speedup", "predicted_speedup"):
        return False
    counts = sorted({r["procs"] for r in rows})
    axis.plot(counts, counts, ":", color="#555555", label="ideal")
    axis.set_yscale("log", base=2)
    axis.set_yticks(counts, list(map(str, counts)))
    axis.minorticks_off()
    axis.set_ylabel("times one process")
    axis.legend(fontsize=7, loc="upper left")
    return True


def efficiency(figure: Any, rows: Sequence[Row]) -> bool:
    """Speed-up divided by processes."""
    axis = figure.subplots()
    shares = [{**r, "e": r["speedup"] and r["speedup"] / r["procs"]} for r in rows]
    shares = [{**r, "p": r["predicted_speedup"] and r["predicted_speedup"] / r["procs"]} for r in shares]
    if not _lines(axis, shares, "e", "p"):
        return False
    axis.axhline(1.0, linestyle=":", color="#555555")
    axis.set_ylim(0, None)
    axis.set_ylabel("efficiency")
    axis.legend(fontsize=7, loc="lower left")
    return True


def time(figure: Any, rows: Sequence[Row]) -> bool:
    """Seconds of a step, with the spread of its repeats."""
    axis = figure.subplots()
    if not _lines(axis, rows, "seconds", "predicted_seconds"):
        return False
    for name, procs, _, colour in plans(rows, "seconds"):
        spread = [r["repeats"] for r in rows if Path(r["plan"]).stem == name and r["seconds"]]
        axis.vlines(procs, [min(s) for s in spread], [max(s) for s in spread], color=colour, alpha=0.5, linewidth=4)
    axis.set_yscale("log")
    axis.set_ylabel("seconds")
    axis.legend(fontsize=7, loc="upper right")
    return True


def breakdown(figure: Any, rows: Sequence[Row]) -> bool:
    """A bar per point: parts of the measured step, and beside it of the predicted one."""
    shown = [r for r in rows if r["parts"] or r["predicted_parts"]]
    if not shown:
        return False
    axis = figure.subplots()
    kinds = list(dict.fromkeys((*PARTS, *(k for r in shown for k in (*r["parts"], *r["predicted_parts"])))))
    both = any(r["parts"] for r in shown)
    for column, shift, hatch in (
        ("parts", -0.2, None),
        ("predicted_parts", 0.2 if both else 0.0, "//" if both else None),
    ):
        base = [0.0] * len(shown)
        for kind in kinds:
            heights = [1e3 * r[column].get(kind, 0.0) for r in shown]
            if any(heights):
                at = [i + shift for i in range(len(shown))]
                colour = PARTS.get(kind, "#bbbbbb")
                bars = axis.bar(
                    at, heights, 0.38, bottom=base, color=colour, hatch=hatch, edgecolor="white", linewidth=0.3
                )
                if kind not in axis.get_legend_handles_labels()[1]:
                    bars.set_label(kind)
            base = [b + h for b, h in zip(base, heights, strict=True)]
    labels = [f"{Path(r['plan']).stem}\n{r['procs']}{'*' if r['oversubscribed'] else ''}" for r in shown]
    axis.set_xticks(range(len(shown)), labels, fontsize=7, rotation=45 if len(shown) > 10 else 0)
    axis.set_ylabel("ms a step" + (" (left measured, right predicted)" if both else " (predicted)"))
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))  # where it hides no bar
    return True


def ranks(figure: Any, rows: Sequence[Row]) -> bool:
    """Memory and bytes sent per rank, and how unequal the ranks compute."""
    axes = figure.subplots(1, 3)
    drawn = False
    for axis, column, predicted, words, unit in zip(
        axes,
        ("memory", "bytes", "imbalance"),
        ("predicted_memory", "predicted_bytes", None),
        ("peak memory of a rank [MB]", "sent by a rank per step [MB]", "imbalance of computation [%]"),
        (1e-6, 1e-6, 100.0),
        strict=True,
    ):
        scaled = [{**r, **{c: r[c] * unit for c in (column, predicted) if c and r[c] is not None}} for r in rows]
        drawn |= _lines(axis, scaled, column, predicted)
        axis.set_title(words, fontsize=8)
        axis.set_ylim(0, None)
    if drawn:
        axes[0].legend(fontsize=6, loc="lower left")
    return drawn
