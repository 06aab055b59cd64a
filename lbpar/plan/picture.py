"""A picture of a plan: one column per layer, coloured by what its grid splits, and the time below."""

from __future__ import annotations

from math import log2
from pathlib import Path
from typing import Any

from lbpar.cost.simulate import Span
from lbpar.errors import ConfigError
from lbpar.plan.pipeline_picture import draw_pipeline
from lbpar.program.words import WORDS

COLOURS = {
    "N": "#4477aa",
    "D": "#117733",
    "H": "#44aa77",
    "W": "#99cc66",
    "F": "#cc6677",
    "C": "#ddaa33",
    "G": "#aa4499",
    "": "#dddddd",
}


def draw(report: dict[str, Any], path: str | Path) -> None:
    """Draw an explained plan into a file; the ending decides the format (png, svg, pdf).

    Raises
    ------
    ConfigError
        matplotlib is missing, or the file cannot be written.
    """
    figure = picture(report)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error}.") from None


def picture(report: dict[str, Any]) -> Any:
    """The matplotlib figure of an explained plan.

    Raises
    ------
    ConfigError
        matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ConfigError("--plot: matplotlib is not installed; install lbpar[plot].") from None
    layers = report["layers"]
    width = min(60.0, max(7.0, 0.22 * len(layers)))
    figure = Figure(figsize=(width, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    whole: Any = figure
    below: Any = None
    if report.get("pipeline"):
        both: Any = figure.subfigures(2, 1, height_ratios=(3, 1))
        whole, below = both
    grids, times = whole.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    total = max(1e-9, log2(report["procs"])) if report["procs"] > 1 else 1.0
    seen = []
    for x, row in enumerate(layers):
        bottom = 0.0
        for loop in "NDHWGFC":
            ways = row["grid"].get(loop, 1)
            if ways > 1:
                grids.bar(x, log2(ways), 0.92, bottom, color=COLOURS[loop], edgecolor="white", linewidth=0.5)
                if len(layers) <= 70:
                    grids.text(
                        x, bottom + log2(ways) / 2, str(ways), ha="center", va="center", fontsize=6, color="white"
                    )
                bottom += log2(ways)
                seen.append(loop)
        if bottom < total:
            grids.bar(x, total - bottom, 0.92, bottom, color=COLOURS[""], edgecolor="white", linewidth=0.5)
            seen.append("")
    ms = [1e3 * r["compute_seconds"] for r in layers]
    moved = [1e3 * r["communication_seconds"] for r in layers]
    places = list(range(len(layers)))
    times.bar(places, ms, 0.92, color="#666666", label="computation")
    times.bar(places, moved, 0.92, ms, color="#ee8866", label="communication")
    times.set_ylabel("ms per step")
    times.legend(fontsize=8, frameon=False)
    grids.set_ylabel("processes (log2)")
    keys = [k for k in COLOURS if k in seen]
    patches = [Patch(color=COLOURS[k], label=WORDS.get(k, "idle (same work repeated)")) for k in keys]
    grids.legend(
        handles=patches, ncols=max(1, len(patches)), fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), frameon=False
    )
    step = 1 if len(layers) <= 120 else 2
    times.set_xticks(places[::step], [r["layer"] for r in layers][::step], rotation=90, fontsize=6)
    times.set_xlim(-0.6, len(layers) - 0.4)
    if below is not None:
        spans = [Span(**s) for s in report["pipeline"]["spans"]]
        draw_pipeline(below.subplots(), spans, [f"stage {i}" for i in range(len(report["pipeline"]["lines"]))])
    figure.suptitle(
        f"{report['network']}, batch {report['batch']}, {report['procs']} processes, {report['machine']['name']}: "
        f"{report['strategy']}, {1e3 * report['step']['seconds']:.3g} ms a step",
        fontsize=10,
    )
    return figure
