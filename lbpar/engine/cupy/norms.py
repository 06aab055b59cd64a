"""Normalisation, biases and sums over positions (``kernels/norm.cu``)."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from lbpar.engine.cupy.kernels import THREADS, kind_of
from lbpar.engine.cupy.products import Products
from lbpar.engine.device import Array, Float64Array

FILE = "norm.cu"
LANES = 64
"""Threads beside each other along the channels of a tile, with 16 bytes each."""

LEAST = 256
"""Rows that a block of threads sums at least, where there are so many."""

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)


class Norms(Products):
    """The part of the engine that works by channels over rows of a matrix (positions, C)."""

    def norm_sums(self, x: Array, shift: Array) -> Float64Array:
        rows, channels = _matrix(x)
        tiles, chunks, each = self._cut(rows, x)
        partial, sums = self.empty((chunks, 2, channels), F64), self.empty((4, channels), F64)
        sizes = (rows, channels, each)
        self._norm(f"norm_partials<{kind_of(x.dtype)}>", (tiles, chunks), partial, self._dense(x), *sizes)
        self._merge("norm_sums", sums, partial, self._as(shift, F64), rows, channels, chunks, each)
        return sums

    def norm_moments(self, sums: Array, shift: Array, count: float, eps: float) -> Float64Array:
        moments = self.empty((3, shift.size), F64)
        args = (moments, self._dense(sums), self._as(shift, F64), float(count), float(eps), shift.size)
        self._norm("norm_moments", (self.kernels.blocks(shift.size),), *args)
        return moments

    def norm_running(self, sums: Array, mean: Array, var: Array, momentum: float, count: int) -> None:
        args = (mean, var, self._dense(sums), float(momentum), float(count), mean.size)
        self._norm("norm_running", (self.kernels.blocks(mean.size),), *args)

    def norm_apply(self, x: Array, mean: Array, invstd: Array, scale: Array | None, bias: Array | None) -> Array:
        return self._apply(x, mean, invstd, scale, bias, None, False)

    def norm_relu_forward(
        self,
        x: Array,
        mean: Array,
        invstd: Array,
        scale: Array | None,
        bias: Array | None,
        residual: Array | None = None,
    ) -> Array:
        return self._apply(x, mean, invstd, scale, bias, residual, True)

    def norm_forward(
        self,
        x: Array,
        shift: Array,
        scale: Array | None,
        bias: Array | None,
        residual: Array | None,
        relu: bool,
        count: float,
        eps: float,
    ) -> tuple[Float64Array, Float64Array, Array]:
        made: tuple[Float64Array, Float64Array, Array] | None = None

        def ours() -> None:
            nonlocal made
            made = None  # of a run before, while plans are timed
            made = super(Norms, self).norm_forward(x, shift, scale, bias, residual, relu, count, eps)  # type: ignore[misc]

        rows, channels = _matrix(x)
        key = (x.shape, x.dtype.name, residual is not None, relu)
        if scale is None or bias is None or rows != count or self.graphs is None or not self.graphs.norm_plan(*key):
            ours()
            assert made is not None
            return made
        y = self._like(x)
        mean, invstd, *rest = (self.empty((channels,), F32) for _ in range(4))
        scale, bias = (self._as(a, F32) for a in (scale, bias))
        arrays = {
            "x": self._dense(x), "y": y, "scale": scale, "b": bias, "mean": mean, "invstd": invstd,
            # Running statistics are lbpar's own affair: of these, weighed with 0, nothing is left in what becomes of them.
            "old_mean": scale, "old_var": scale, "new_mean": rest[0], "new_var": rest[1],
            "residual": None if residual is None else self._dense(residual),
        }  # fmt: skip
        if not self.graphs.norm(key, arrays, eps, ours):
            assert made is not None
            return made
        sums = self.empty((4, channels), F64)
        return sums, self._found(sums, mean, invstd, self._as(shift, F64), count, eps), y

    def _found(
        self, sums: Array | None, mean: Array, invstd: Array, shift: Array | None, count: float, eps: float
    ) -> Float64Array:
        """Moments from statistics that cuDNN has found, and sums, where they are wanted, about a shift."""
        moments = self.empty((3, mean.size), F64)
        args = (sums, moments, mean, invstd, shift, float(count), float(eps), mean.size)
        self._norm("norm_found", (self.kernels.blocks(mean.size),), *args)
        return moments

    def norm_inference(
        self, x: Array, mean: Array, var: Array, scale: Array | None, bias: Array | None, eps: float
    ) -> Array:
        invstd = self.empty(var.shape, F64)
        self._norm("norm_invstd", (self.kernels.blocks(var.size),), invstd, self._as(var, F64), float(eps), var.size)
        return self._apply(x, mean, invstd, scale, bias, None, False)

    def _apply(
        self,
        x: Array,
        mean: Array,
        invstd: Array,
        scale: Array | None,
        bias: Array | None,
        residual: Array | None,
        relu: bool,
    ) -> Array:
        y, (rows, channels) = self._like(x), _matrix(x)
        moments = (self._as(a, F64) for a in (mean, invstd))
        affine = (self._parameter(a, x) for a in (scale, bias))
        name = f"norm_apply<{kind_of(x.dtype)}, {kind_of(_parameters(x))}, {_flag(relu)}>"
        more = None if residual is None else self._dense(residual)
        self._norm(name, self._spread(rows, x), y, self._dense(x), more, *moments, *affine, rows, channels)
        return y

    def norm_backward_sums(self, x: Array, dy: Array, mean: Array, invstd: Array) -> Float64Array:
        return self._backward_sums(x, None, dy, None, mean, invstd)[0]

    def norm_relu_backward_sums(
        self, x: Array, y: Array, dy: Array, mean: Array, invstd: Array, more: Array | None = None
    ) -> tuple[Float64Array, Array]:
        sums, g = self._backward_sums(x, y, dy, more, mean, invstd)
        assert g is not None
        return sums, g

    def _backward_sums(
        self, x: Array, y: Array | None, dy: Array, more: Array | None, mean: Array, invstd: Array
    ) -> tuple[Float64Array, Array | None]:
        rows, channels = _matrix(x)
        tiles, chunks, each = self._cut(rows, x)
        partial, sums = self.empty((chunks, 2, channels), F64), self.empty((2, channels), F64)
        g = None if y is None else self._like(dy)
        given = (None if a is None else self._dense(a) for a in (x, y, dy, more))
        mean, invstd = self._as(mean, F64), self._as(invstd, F64)
        name = f"norm_backward_partials<{kind_of(x.dtype)}, {_flag(y is not None)}>"
        self._norm(name, (tiles, chunks), partial, g, *given, mean, rows, channels, each)
        self._merge(f"norm_backward_sums<{kind_of(_parameters(x))}>", sums, partial, mean, invstd, channels, chunks)
        return sums, g

    def norm_backward_data(
        self, x: Array, dy: Array, mean: Array, invstd: Array, scale: Array | None, sums: Array, count: float
    ) -> Array:
        return self._backward_data(x, dy, mean, invstd, scale, sums, count, None)

    def norm_backward_data_add(
        self,
        x: Array,
        dy: Array,
        mean: Array,
        invstd: Array,
        scale: Array | None,
        sums: Array,
        count: float,
        more: Array,
    ) -> Array:
        return self._backward_data(x, dy, mean, invstd, scale, sums, count, self._dense(more))

    def _backward_data(
        self,
        x: Array,
        dy: Array,
        mean: Array,
        invstd: Array,
        scale: Array | None,
        sums: Array,
        count: float,
        more: Array | None,
    ) -> Array:
        dx, (rows, channels) = self._like(x), _matrix(x)
        moments = (self._as(a, F64) for a in (mean, invstd))
        name = f"norm_backward_data<{kind_of(x.dtype)}, {kind_of(_parameters(x))}>"
        self._norm(
            name, self._spread(rows, x), dx, self._dense(x), self._dense(dy), more, *moments, self._parameter(scale, x),
            self._as(sums, F64), float(count), rows, channels, 0 if more is None else more.shape[-1],
        )  # fmt: skip
        return dx

    def bias_add(self, y: Array, b: Array) -> Array:
        y, (rows, channels) = self._dense(y), _matrix(y)
        name = f"bias_add<{kind_of(y.dtype)}, {kind_of(_parameters(y))}>"
        self._norm(name, self._spread(rows, y), y, y, self._parameter(b, y), rows, channels)
        return y

    def bias_backward(self, dy: Array) -> Array:
        rows, channels = _matrix(dy)
        dtype = self.dtype if dy.dtype == self.activations else dy.dtype
        return self._column_sums(dy, 1, rows, 1.0, dtype).reshape((channels,))

    def spatial_sum(self, x: Array, scale: float) -> Array:
        return self._column_sums(x, x.shape[0], prod(x.shape[1:-1]), scale, x.dtype)

    def _column_sums(self, x: Array, groups: int, rows: int, scale: float, dtype: np.dtype[Any]) -> Array:
        """``scale`` times the sums of (groups, rows, C) over rows, in double: (groups, C)."""
        channels = x.shape[-1]
        tiles, chunks, each = self._cut(rows, x, groups)
        partial, out = self.empty((groups, chunks, channels), F64), self.empty((groups, channels), dtype)
        along = min(groups, 65535)
        args = (partial, self._dense(x), groups, rows, channels, each)
        self._norm(f"column_partials<{kind_of(x.dtype)}>", (tiles, chunks, along), *args)
        name, grid = f"column_sums<{kind_of(dtype)}>", (-(-channels // 32), 1, along)
        self._norm(name, grid, out, partial, float(scale), groups, channels, chunks)
        return out

    def _norm(self, name: str, grid: tuple[int, ...], *args: Any) -> None:
        self.kernels.launch(FILE, name, grid, (THREADS,), args)

    def _merge(self, name: str, sums: Array, *args: Any) -> None:
        """Launch one of the kernels that end sums: 32 channels a block."""
        self._norm(name, (-(-sums.shape[-1] // 32),), sums, *args)

    def _cut(self, rows: int, x: Array, groups: int = 1) -> tuple[int, int, int]:
        """Tiles of channels, chunks of rows, and rows of a chunk: enough blocks to fill the device, each with enough to do."""
        tiles = max(1, -(-x.shape[-1] * x.itemsize // (16 * LANES)))
        if not x.shape[-1]:
            return 0, 1, max(rows, 1)
        most = max(1, 4 * self._card.processors // (tiles * max(groups, 1)))
        each = max(1, -(-rows // max(1, min(most, rows // LEAST))))
        return tiles, max(1, -(-rows // each)), each

    def _spread(self, rows: int, x: Array) -> tuple[int, int]:
        """Tiles of channels, and blocks that share the rows of each."""
        tiles = -(-x.shape[-1] * x.itemsize // (16 * LANES))
        return tiles, min(-(-rows // 4), max(1, 8 * self._card.processors // max(tiles, 1)))

    def _parameter(self, a: Array | None, x: Array) -> Array | None:
        """A scale or bias in the type that kernels of x take."""
        return None if a is None else self._as(a, _parameters(x))


def _matrix(x: Array) -> tuple[int, int]:
    """Positions and channels."""
    return prod(x.shape[:-1]), x.shape[-1]


def _parameters(x: Array) -> np.dtype[Any]:
    """Type of parameters beside activations of x's type."""
    return F64 if x.dtype == F64 else np.dtype(np.float32)


def _flag(value: bool) -> str:
    return "true" if value else "false"
