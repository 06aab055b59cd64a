"""Weighted sums of a few elements along each spatial dimension, forward and backward: interpolation, rims that mirror or repeat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lbpar.engine.device import Array

Taps = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Which elements each place reads (taps, places), and their weights; weights of 0 fill up."""


def taps(rule: str, inputs: int, outputs: int, before: int, factor: int, at: NDArray[np.int64]) -> Taps:
    """What the outputs ``at`` read, by exact integer arithmetic; see `lbpar.graph.ops.lines.Line`."""
    if rule in ("linear", "corners"):
        if rule == "linear":
            position, unit = np.maximum(2 * at + 1 - factor, 0), 2 * factor
        else:
            position, unit = at * (inputs - 1), max(outputs - 1, 1)
        first, rest = position // unit, (position % unit) / unit
        return np.stack([first, np.minimum(first + 1, inputs - 1)]), np.stack([1 - rest, rest])
    place = at - before
    if rule == "reflect":
        place = np.abs(place)
        place = np.where(place > inputs - 1, 2 * (inputs - 1) - place, place)
    return np.clip(place, 0, inputs - 1)[None], np.ones((1, len(at)))


def turned(forward: Taps, at: NDArray[np.int64]) -> Taps:
    """What the inputs ``at`` (ascending) receive from all outputs, of which ``forward`` says what they read."""
    index, weight = forward
    output = np.broadcast_to(np.arange(index.shape[1]), index.shape)
    some = (weight != 0) & np.isin(index, at)
    order = np.argsort(index[some], kind="stable")
    place, source, factor = np.searchsorted(at, index[some][order]), output[some][order], weight[some][order]
    nth = np.arange(len(place)) - np.searchsorted(place, place)
    found = (
        np.zeros((max(nth.max(initial=0) + 1, 1), len(at)), np.int64),
        np.zeros((max(nth.max(initial=0) + 1, 1), len(at))),
    )
    found[0][nth, place], found[1][nth, place] = source, factor
    return found


def along_lines(x: Array, lines: Sequence[Taps | None]) -> Array:
    """The sums along the spatial dimensions of (N, [D, H, W], C), one after the other; None leaves a dimension as it is."""
    for axis, line in enumerate(lines, 1):
        if line is None:
            continue
        shape = (*(1,) * axis, -1, *(1,) * (x.ndim - axis - 1))
        total: Array | None = None
        for index, weight in zip(*line, strict=True):
            part = x.take(index, axis)
            if (weight != 1).any():
                part *= weight.reshape(shape).astype(x.dtype)
            total = part if total is None else np.add(total, part, out=total)
        assert total is not None
        x = total
    return np.ascontiguousarray(x)


def thinned(x: Array, part: tuple[slice, ...]) -> Array:
    """Elements at regular distances."""
    return np.ascontiguousarray(x[part])
