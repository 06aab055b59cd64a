"""The figures of a run's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lbpar.cost.simulate import Span, merged
from lbpar.plan.pipeline_picture import draw_pipeline
from lbpar.study.figures import PARTS

#: Colours of what a rank does in a step, besides `PARTS`.
KINDS = {**PARTS, "forward": "#4477aa", "backward": "#66aadd", "update": "#332288"}
#: More events than this are drawn as a picture inside the figure: a browser would be slow with so many shapes.
MANY = 4000


def curves(figure: Any, records: Sequence[Mapping[str, Any]]) -> bool:
    """Loss and accuracy over epochs, of training and of test data."""
    kinds = [k for k in ("loss", "accuracy") if any(k in r or f"test_{k}" in r for r in records)]
    for axis, kind in zip(figure.subplots(1, max(1, len(kinds)), squeeze=False)[0], kinds, strict=False):
        for name, words, colour in ((kind, "training", "#1f5fa8"), (f"test_{kind}", "test", "#cc6677")):
            there = [(r["epoch"], r[name]) for r in records if r.get(name) is not None]
            if there:
                axis.plot(*zip(*there, strict=True), marker="o", markersize=3, color=colour, label=words)
        axis.set_xlabel("epoch")
        axis.set_ylabel(kind)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=7)
    return bool(kinds)


def parts(figure: Any, measured: Mapping[str, float], predicted: Mapping[str, float]) -> bool:
    """A step in parts: measured, and predicted below it."""
    axis = figure.subplots()
    for y, values in enumerate((measured, predicted)):
        left = 0.0
        for kind, seconds in values.items():
            known = kind in axis.get_legend_handles_labels()[1]
            colour, label = PARTS.get(kind, "#bbbbbb"), None if known else kind
            axis.barh(-y, 1e3 * seconds, 0.7, left, color=colour, label=label, edgecolor="white", linewidth=0.3)
            left += 1e3 * seconds
    axis.set_yticks([0, -1], ["measured", "predicted"])
    axis.set_ylim(-1.6, 0.6)
    axis.set_xlabel("ms a step")
    if measured or predicted:
        axis.legend(fontsize=7, ncols=4, loc="lower right")
    return bool(measured)


def layers(figure: Any, measured: Mapping[str, float], predicted: Mapping[str, float]) -> bool:
    """Computation of each layer in the traced step, and as predicted."""
    axis = figure.subplots()
    names = list(dict.fromkeys((*predicted, *measured)))
    for shift, values, words, colour in (
        (-0.2, measured, "measured", "#4477aa"),
        (0.2, predicted, "predicted", "#ddaa33"),
    ):
        if values:
            at = [i + shift for i in range(len(names))]
            axis.bar(at, [1e3 * values.get(n, 0.0) for n in names], 0.4, color=colour, label=words)
    step = 1 + len(names) // 100
    axis.set_xticks(range(0, len(names), step), names[::step], rotation=90, fontsize=6)
    axis.set_ylabel("computation [ms a step]")
    if names:
        axis.legend(fontsize=7)
    return bool(measured)


def stages(figure: Any, events: Sequence[Mapping[str, Any]], places: Sequence[int]) -> bool:
    """Which rank worked on which micro-batch; ``places``: the ranks to show, one of each stage."""
    kernels = [e for e in events if e["ph"] == "X" and e["tid"] == 0 and e["pid"] in places]
    began = min((e["ts"] for e in kernels), default=0.0)
    pieces = []
    for e in kernels:
        micro = e.get("args", {}).get("micro", -1)
        kind = "U" if micro < 0 else "F" if e["cat"] == "forward" else "B"
        if micro >= 0 or e["cat"] == "update":
            times = ((t - began) / 1e6 for t in (e["ts"], e["ts"] + e["dur"]))
            pieces.append(Span(list(places).index(e["pid"]), kind, micro, *times))
    if not any(p.micro >= 0 for p in pieces):
        return False
    draw_pipeline(figure.subplots(), merged(pieces), [f"rank {r}" for r in places])
    return True


def timeline(figure: Any, events: Sequence[Mapping[str, Any]]) -> bool:
    """What each rank did in one step: kernels and waits, and in a thin line above them the moves under way."""
    spans = [e for e in events if e["ph"] == "X" and e["cat"] != "step"]
    if not spans:
        return False
    axis = figure.subplots()
    began = min(e["ts"] for e in spans)
    ranks = sorted({e["pid"] for e in spans})
    for kind in dict.fromkeys(e["cat"] for e in spans):
        colour, label = KINDS.get(kind, "#bbbbbb"), kind
        for place, rank in enumerate(ranks):
            for row, (low, height) in enumerate(((-0.4, 0.6), (0.22, 0.16))):
                mine = [e for e in spans if (e["cat"], e["pid"], min(e["tid"], 1)) == (kind, rank, row)]
                if mine:
                    times = [((e["ts"] - began) / 1e3, e["dur"] / 1e3) for e in mine]
                    axis.broken_barh(
                        times,
                        (low - place, height),
                        color=colour,
                        linewidth=0,
                        label=label,
                        rasterized=len(spans) > MANY,
                    )
                    label = None
    axis.set_yticks([-i for i in range(len(ranks))], [f"rank {r}" for r in ranks], fontsize=7)
    axis.set_xlabel("ms")
    axis.legend(fontsize=7, ncols=8, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    return True
