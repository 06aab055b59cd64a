"""Statistics of normalisation in NumPy: sums in float64, block by block, so that no float64 copy of x is made."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from lbpar.engine.base import Array, Float64Array

BLOCK_ELEMENTS = 1 << 15
"""Elements converted to float64 at a time: 256 KiB, within a core's own cache."""


def rows_of(x: Array) -> Array:
    """x as a matrix (positions, C); unlike reshape(-1, C) also for C = 0."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def sum_rows(x: Array) -> Float64Array:
    """Sum over all but the last dimension, in float64."""
    matrix = rows_of(x)
    total: Float64Array = _block_sums(len(matrix), matrix.shape[1], lambda part: (matrix[part].astype(np.float64),))[0]
    return total


def sums(x: Array, shift: Array) -> Float64Array:
    """See `Engine.norm_sums`."""
    matrix, centre = rows_of(x), np.asarray(shift, dtype=np.float64)

    def terms(part: slice) -> tuple[Float64Array, ...]:
        difference = matrix[part] - centre
        return difference, difference * difference

    return _block_sums(len(matrix), matrix.shape[1], terms)


def moments(sums: Array, shift: Array, count: float, eps: float) -> Float64Array:
    """See `Engine.norm_moments`."""
    first, second = sums / max(count, 1)
    var = np.maximum(second - first * first, 0.0)
    return np.stack([shift + first, 1.0 / np.sqrt(var + eps), var])


def running(sums: Array, mean: Array, var: Array, momentum: float, count: int) -> None:
    """See `Engine.norm_running`."""
    offset = sums[0] / count
    batch = np.maximum(sums[1] / count - offset * offset, 0.0) * (count / max(count - 1, 1))
    mean += momentum * offset
    var += momentum * (batch - var)


def apply(x: Array, mean: Array, invstd: Array, scale: Array | None, bias: Array | None) -> Array:
    """See `Engine.norm_apply`."""
    y = x - mean.astype(x.dtype)
    y *= (invstd if scale is None else invstd * scale).astype(x.dtype)
    if bias is not None:
        y += bias
    return y


def backward_sums(x: Array, dy: Array, mean: Array, invstd: Array) -> Float64Array:
    """See `Engine.norm_backward_sums`."""
    matrix, gradient = rows_of(x), rows_of(dy)

    def terms(part: slice) -> tuple[Float64Array, ...]:
        g = gradient[part].astype(np.float64)
        return g, (matrix[part] - np.asarray(mean, dtype=np.float64)) * g

    result = _block_sums(len(matrix), matrix.shape[1], terms)
    result[1] *= invstd
    return result


def backward_data(
    x: Array, dy: Array, mean: Array, invstd: Array, scale: Array | None, sums: Array, count: float
) -> Array:
    """See `Engine.norm_backward_data`."""
    factor = invstd if scale is None else invstd * scale
    dx = x - mean.astype(x.dtype)
    dx *= (-factor * invstd * sums[1] / count).astype(x.dtype)
    dx += (-factor * sums[0] / count).astype(x.dtype)
    dx += dy * factor.astype(x.dtype)
    return dx


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
