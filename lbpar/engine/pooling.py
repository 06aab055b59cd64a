"""Pooling, spatial sums and nearest-neighbour upsampling in NumPy, each beside its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lbpar.engine.base import Array, Engine, Float64Array, Window
from lbpar.engine.masks import keep_where, set_where
from lbpar.engine.windows import first_tap, tap_slices


class Pooling(Engine):
    """The engine's pooling and upsampling."""

    def max_pool_forward(self, x: Array, win: Window, out_spatial: Sequence[int]) -> tuple[Array, Array]:
        """``arg`` holds the number of the tap, -1 where no tap lies inside."""
        kernel = tuple(dim.kernel for dim in win)
        in_spatial = x.shape[1:-1]
        y = np.full((x.shape[0], *out_spatial, x.shape[-1]), -np.inf, dtype=x.dtype)
        arg = np.empty(y.shape, dtype=np.min_scalar_type(-max(1, math.prod(kernel))))
        arg[...] = _first_taps(win, in_spatial, out_spatial)
        if x.size == 0 or y.size == 0:
            return y, arg
        any_nan = bool(np.isnan(x).any())
        for number, tap in enumerate(np.ndindex(*kernel)):
            out, read = _where(win, tap, in_spatial, out_spatial)
            values, best = x[read], y[out]
            better = values > best
            if any_nan:
                better |= np.isnan(values)
            set_where(better, arg[out], number)
            np.maximum(best, values, out=best)  # NaN stays NaN
        return y, arg

    def max_pool_backward(self, dy: Array, arg: Array, win: Window, in_spatial: Sequence[int]) -> Array:
        dx = np.zeros((dy.shape[0], *in_spatial, dy.shape[-1]), dtype=dy.dtype)
        if dx.size == 0 or dy.size == 0:
            return dx
        for number, tap in enumerate(np.ndindex(*(dim.kernel for dim in win))):
            out, read = _where(win, tap, in_spatial, dy.shape[1:-1])
            dx[read] += keep_where(arg[out] == number, dy[out])
        return dx

    def avg_pool_forward(
        self, x: Array, win: Window, out_spatial: Sequence[int], divisors: Sequence[Float64Array]
    ) -> Array:
        """Sums one dimension at a time."""
        y = x
        for axis, (dim, n_out, divisor) in enumerate(zip(win, out_spatial, divisors, strict=True), start=1):
            total = np.zeros((*y.shape[:axis], n_out, *y.shape[axis + 1 :]), dtype=x.dtype)
            for tap in range(dim.kernel):
                out, read = tap_slices(dim, tap, y.shape[axis], n_out)
                total[_along(axis, out)] += y[_along(axis, read)]
            total *= factors(divisor, axis, y)
            y = total
        return y

    def avg_pool_backward(
        self, dy: Array, win: Window, in_spatial: Sequence[int], divisors: Sequence[Float64Array]
    ) -> Array:
        dx = dy
        for axis, (dim, n_in, divisor) in enumerate(zip(win, in_spatial, divisors, strict=True), start=1):
            total = np.zeros((*dx.shape[:axis], n_in, *dx.shape[axis + 1 :]), dtype=dy.dtype)
            part = dx * factors(divisor, axis, dx)
            for tap in range(dim.kernel):
                out, read = tap_slices(dim, tap, n_in, dx.shape[axis])
                total[_along(axis, read)] += part[_along(axis, out)]
            dx = total
        return dx

    def spatial_sum(self, x: Array, scale: float) -> Array:
        total = x.sum(axis=tuple(range(1, x.ndim - 1)), dtype=np.float64)
        total *= scale
        return total.astype(x.dtype, copy=False)

    def spatial_broadcast(self, dy: Array, spatial: Sequence[int], scale: float) -> Array:
        dx = np.empty((dy.shape[0], *spatial, dy.shape[-1]), dtype=dy.dtype)
        dx[...] = (dy * float(scale)).reshape(dy.shape[0], *(1 for _ in spatial), dy.shape[-1])
        return dx

    def upsample_forward(
        self, x: Array, factors: Sequence[int], out_spatial: Sequence[int], offsets: Sequence[int]
    ) -> Array:
        y = x
        for axis, (factor, n_out, offset) in enumerate(zip(factors, out_spatial, offsets, strict=True), start=1):
            y = np.take(y, (np.arange(n_out) + offset) // factor, axis=axis)
        return y.copy() if y is x else np.ascontiguousarray(y)

    def upsample_backward(self, dy: Array, factors: Sequence[int]) -> Array:
        dx = dy
        for axis, factor in enumerate(factors, start=1):
            split = (*dx.shape[:axis], dx.shape[axis] // factor, factor, *dx.shape[axis + 1 :])
            dx = dx.reshape(split).sum(axis=axis + 1)
        return dx.copy() if dx is dy else np.ascontiguousarray(dx)


def _where(
    win: Window, tap: Sequence[int], in_spatial: Sequence[int], out_spatial: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Index of the outputs (N, *out, C) for which ``tap`` lies inside, and of the inputs (N, *in, C) it reads."""
    pairs = [tap_slices(*four) for four in zip(win, tap, in_spatial, out_spatial, strict=True)]
    if any(out.stop == out.start for out, _ in pairs):
        pairs = [(slice(0, 0), slice(0, 0))] * len(pairs)  # empty in one dimension: empty in all
    every = slice(None)
    return (every, *(out for out, _ in pairs)), (every, *(read for _, read in pairs))


def _first_taps(win: Window, in_spatial: Sequence[int], out_spatial: Sequence[int]) -> Array:
    """Number (row-major) of the first tap inside the input, int64 (*out, 1); -1 where there is none."""
    number = np.zeros((), dtype=np.int64)
    inside = np.ones((), dtype=bool)
    for dim, n_in, n_out in zip(win, in_spatial, out_spatial, strict=True):
        first = first_tap(dim, n_in, n_out)
        number = number[..., None] * dim.kernel + first
        inside = inside[..., None] & (first >= 0)
    return np.where(inside, number, -1)[..., None]


def _along(axis: int, part: slice) -> tuple[slice, ...]:
    return (*(slice(None) for _ in range(axis)), part)


def factors(divisor: Float64Array, axis: int, like: Array) -> Array:
    """1 / divisor (0 where it is 0) in the type of ``like``, shaped to broadcast along ``axis``."""
    divisor = np.asarray(divisor, dtype=np.float64)
    inverse = np.divide(1.0, divisor, out=np.zeros_like(divisor), where=divisor != 0)
    return inverse.astype(like.dtype).reshape(-1, *(1 for _ in range(like.ndim - axis - 1)))
