"""Metrics of an evaluation, from what its steps have counted: exact, whatever the grid and the batches.

A class that neither occurs nor is ever found has no Dice and no IoU, and counts in no mean. So it is of each volume for the Dice per volume, as in
nnU-Net's evaluation: where a class is found that is not there, the volume's Dice is 0. (MONAI's DiceMetric leaves these volumes out as well; with
``ignore_empty=False`` it has 0 for them, too, but 1 where the class is neither there nor found.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

FALLING = ("loss", "mae", "rmse")
"""Metrics that are the better the smaller they are."""


def scores(sums: Mapping[str, NDArray[Any]], elements: float, metrics: tuple[str, ...]) -> dict[str, Any]:
    """Metrics by name.

    Parameters
    ----------
    sums : mapping
        ``counts``, ``confusion``, ``volumes`` and ``errors`` (`lbpar.graph.ops.losses`), summed over steps.
    elements : float
        Of the output: how many errors there are.
    metrics : tuple of str
        Of `lbpar.config.losses.METRICS`.

    Returns
    -------
    dict
        A number each; ``dice_of``, ``iou_of`` and ``dice_per_volume_of`` have one per class, under its number, None where it has none, and
        ``confusion`` is a list of rows.
    """
    out: dict[str, Any] = {}
    for metric in metrics:
        if metric == "confusion":
            out[metric] = sums[metric].astype(np.int64).tolist()
        elif metric in ("mae", "rmse"):
            total, squares = sums["errors"] / max(1, elements)
            out[metric] = float(total if metric == "mae" else np.sqrt(squares))
        elif metric == "balanced_accuracy":
            found, _, there = sums["counts"]
            out[metric] = _mean(_ratio(found, there))
        else:
            each = _of_classes(metric, sums)
            out[metric] = _mean(each[1:] if len(each) > 1 else each)
            out[f"{metric}_of"] = {str(k): None if np.isnan(v) else float(v) for k, v in enumerate(each)}
    return out


def _of_classes(metric: str, sums: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """A metric of each class, NaN where it has none."""
    if metric == "dice_per_volume":
        total, number = sums["volumes"]
        return _ratio(total, number)
    found, taken, there = sums["counts"]
    union = taken + there
    return _ratio(2 * found, union) if metric == "dice" else _ratio(found, union - found)


def _ratio(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """``a / b``, NaN where that is 0 / 0."""
    return np.divide(a, b, out=np.full(a.shape, np.nan), where=b > 0)


def _mean(values: NDArray[Any]) -> float | None:
    told = values[~np.isnan(values)]
    return float(told.mean()) if told.size else None
