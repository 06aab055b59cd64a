"""Statistics of normalisation in NumPy: sums in float64, block by block, so that no float64 copy of x is made.

Moments about a shift far from the mean cancel. A block's are taken about its own first row, and moved from there to the shift
that all blocks share in double-double arithmetic; `Engine.norm_sums` says in which form they are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from lbpar.engine.base import Array, Engine, Float64Array
from lbpar.engine.double_double import Pair, add, leading, plus, times
from lbpar.engine.windows import blocks

BLOCK_ELEMENTS = 1 << 15
"""Elements converted to float64 at a time: 256 KiB, within a core's own cache."""

LEADING_BITS = 32
"""Bits of the first part of a sum. Such parts of up to 2**20 blocks, all of much the same size, add up without rounding."""


def rows_of(x: Array) -> Array:
    """x as a matrix (positions, C); unlike reshape(-1, C) also for C = 0."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def sum_rows(x: Array) -> Float64Array:
    """Sum over all but the last dimension, in float64."""
    matrix = rows_of(x)
    total: Float64Array = _block_sums(len(matrix), matrix.shape[1], lambda part: (matrix[part].astype(np.float64),))[0]
    return total


class Norms(Engine):
    """The engine's normalisation."""

    def norm_sums(self, x: Array, shift: Array) -> Float64Array:
        matrix = rows_of(x)
        if not matrix.size:
            return np.zeros((4, matrix.shape[1]))
        origin = matrix[0].astype(np.float64)

        def terms(part: slice) -> tuple[Float64Array, ...]:
            difference = matrix[part] - origin
            return difference, difference * difference

        return moved(
            _block_sums(len(matrix), matrix.shape[1], terms), len(matrix), origin, np.asarray(shift, np.float64)
        )

    def norm_moments(self, sums: Array, shift: Array, count: float, eps: float) -> Float64Array:
        offset, var = _offset_and_variance(sums, max(count, 1))
        return np.stack([shift + offset, 1.0 / np.sqrt(var + eps), var])

    def norm_running(self, sums: Array, mean: Array, var: Array, momentum: float, count: int) -> None:
        offset, biased = _offset_and_variance(sums, count)
        mean += momentum * offset
        var += momentum * (biased * (count / max(count - 1, 1)) - var)

    def norm_apply(self, x: Array, mean: Array, invstd: Array, scale: Array | None, bias: Array | None) -> Array:
        factor = invstd if scale is None else invstd * scale
        centre = mean.astype(x.dtype)
        y = x - centre
        y *= factor.astype(x.dtype)
        y += ((centre - mean) * factor + (0 if bias is None else bias)).astype(x.dtype)
        return y

    def norm_backward_sums(self, x: Array, dy: Array, mean: Array, invstd: Array) -> Float64Array:
        matrix, gradient = rows_of(x), rows_of(dy)

        def terms(part: slice) -> tuple[Float64Array, ...]:
            g = gradient[part].astype(np.float64)
            return g, (matrix[part] - np.asarray(mean, dtype=np.float64)) * g

        result = _block_sums(len(matrix), matrix.shape[1], terms)
        result[1] *= invstd
        return result

    def norm_backward_data(
        self, x: Array, dy: Array, mean: Array, invstd: Array, scale: Array | None, sums: Array, count: float
    ) -> Array:
        factor = invstd if scale is None else invstd * scale
        slope, centre = -factor * invstd * sums[1] / count, mean.astype(x.dtype)
        dx = x - centre
        dx *= slope.astype(x.dtype)
        dx += ((centre - mean) * slope - factor * sums[0] / count).astype(x.dtype)
        dx += dy * factor.astype(x.dtype)
        return dx

    def sample_norm_sums(self, x: Array) -> Float64Array:
        if not x.size:
            return np.zeros((4, x.shape[0], x.shape[2]))
        origin = x[:, 0, :, 0].astype(np.float64)

        def terms(rows: slice, positions: slice) -> tuple[Float64Array, ...]:
            difference = x[rows, positions] - origin[rows, None, :, None]
            return difference, difference * difference

        sums = _sums_per_row(x.shape, 2, terms).sum(axis=-1)
        return moved(sums, x.shape[1] * x.shape[3], origin, np.zeros_like(origin))

    def sample_norm_apply(
        self, x: Array, mean: Array, invstd: Array, scale: Array | None = None, bias: Array | None = None
    ) -> Array:
        return Norms.norm_apply(self, x, _spread(mean), _spread(invstd), scale, bias)

    def sample_norm_backward_sums(
        self, x: Array, dy: Array, mean: Array, invstd: Array, scale: Array | None = None
    ) -> tuple[Float64Array, Array, Array]:
        centre = _spread(mean)

        def terms(rows: slice, positions: slice) -> tuple[Float64Array, ...]:
            g = dy[rows, positions].astype(np.float64)
            return g, (x[rows, positions] - centre[rows]) * g

        sums = _sums_per_row(x.shape, 2, terms)
        sums[1] *= invstd[..., None]
        dbias, dscale = (s.sum(axis=0).ravel().astype(x.dtype if scale is None else scale.dtype) for s in sums)
        return (sums if scale is None else sums * scale).sum(axis=-1), dscale, dbias

    def sample_norm_backward_data(
        self, count: float, x: Array, dy: Array, mean: Array, invstd: Array, sums: Array, scale: Array | None = None
    ) -> Array:
        g = dy if scale is None else dy * scale.astype(dy.dtype)
        return Norms.norm_backward_data(self, x, g, _spread(mean), _spread(invstd), None, _spread(sums), count)


def _spread(statistic: Array) -> Array:
    """Values of rows and groups, to be broadcast over positions and the channels of a group."""
    return statistic[..., None, :, None]


def _sums_per_row(shape: tuple[int, ...], count: int, terms: Callable[[slice, slice], Sequence[Array]]) -> Float64Array:
    """Sums over positions of each of ``terms(rows, positions)``, block by block: (count, rows, groups, channels)."""
    rows, positions, *channels = shape
    total = np.zeros((count, rows, *channels))
    for part in blocks((rows, positions), BLOCK_ELEMENTS // max(1, math.prod(channels))):
        for i, term in enumerate(terms(*part)):
            total[i, part[0]] += term.sum(axis=1)
    return total


def moved(sums: Float64Array, count: int, origin: Float64Array, shift: Float64Array) -> Float64Array:
    """First and second moments (2, C) of ``count`` values about ``origin``, about ``shift`` instead and as `Engine.norm_sums`."""
    distance = add(origin, -shift)
    first = plus(times(distance, Pair(count)), sums[0])
    second = plus(times(plus(first, sums[0]), distance), sums[1])
    parts = [(leading(p.high, LEADING_BITS), p) for p in (first, second)]
    return np.stack([part for high, p in parts for part in (high, (p.high - high) + p.low)])


def _offset_and_variance(sums: Array, count: float) -> tuple[Float64Array, Float64Array]:
    """Mean less shift, and biased variance, from `Engine.norm_sums` over ``count`` values."""
    first, second = add(sums[0], sums[1]), add(sums[2], sums[3])
    square, scaled = times(first, first), times(second, Pair(count))
    difference = (scaled.high - square.high) + (scaled.low - square.low)
    return first.high / count, np.maximum(difference / (count * count), 0.0)


def _block_sums(rows: int, columns: int, terms: Callable[[slice], tuple[Float64Array, ...]]) -> Float64Array:
    """Column sums of each of ``terms(block)``, added over blocks of rows: (number of terms, columns)."""
    step = max(1, BLOCK_ELEMENTS // max(1, columns))
    total = np.zeros((len(terms(slice(0, 0))), columns))
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        ones = np.ones(part.stop - part.start)
        for i, term in enumerate(terms(part)):
            total[i] += ones @ term
    return total
