"""A picture of slices: image, truth, prediction and where these differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lbpar.errors import ConfigError
from lbpar.study.slices import Slice


def draw_slices(found: Sequence[Slice], path: str | Path) -> None:
    """Write a row per slice; the ending decides the format (png, svg, pdf).

    Raises
    ------
    ConfigError
        matplotlib is missing, or the file cannot be written.
    """
    figure = slices_figure(found)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--picture: {path} cannot be written: {error}.") from None


def slices_figure(found: Sequence[Slice]) -> Any:
    """The matplotlib figure."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--picture: matplotlib is not installed; install lbpar[plot].") from None
    figure = Figure(figsize=(11, 2.9 * len(found) + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(found), 4, squeeze=False)
    for row, one in zip(axes, found, strict=True):
        where = f"sample {one.sample}" if one.depth is None else f"sample {one.sample}, plane {one.depth}"
        wrong = one.prediction - one.truth.astype(float)
        if one.classes:
            shown: dict[str, Any] = {
                "cmap": "tab20" if one.classes > 2 else "gray",
                "vmin": 0,
                "vmax": max(one.classes - 1, 1),
            }
            difference, title = (wrong != 0).astype(float), f"differ in {np.count_nonzero(wrong):,} of {wrong.size:,}"
            last: dict[str, Any] = {"cmap": "Reds", "vmin": 0, "vmax": 1}
        else:
            ends = min(one.truth.min(), one.prediction.min()), max(one.truth.max(), one.prediction.max())
            shown = {"cmap": "viridis", "vmin": ends[0], "vmax": ends[1]}
            most = float(np.abs(wrong).max()) or 1.0
            difference, title = wrong, f"prediction − truth, up to {most:.3g}"
            last = {"cmap": "RdBu", "vmin": -most, "vmax": most}
        planes = (
            (one.image, {"cmap": "gray"}, where),
            (one.truth, shown, "truth"),
            (one.prediction, shown, "prediction"),
        )
        for axis, (plane, how, name) in zip(row, (*planes, (difference, last, title)), strict=True):
            upright = plane if one.voxel is None else np.rot90(plane)  # a head looks to the right
            aspect = one.voxel[1] / one.voxel[0] if one.voxel else 1.0
            axis.imshow(upright, interpolation="nearest", aspect=aspect, **how)
            axis.set_title(name, fontsize=9)
            axis.set_axis_off()
    return figure
