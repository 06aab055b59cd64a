"""Softmax over split channels, and the losses (``kernels/softmax.cu``, ``kernels/losses.cu``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lbpar.engine.cupy.kernels import THREADS, kind_of
from lbpar.engine.cupy.names import ERRORS
from lbpar.engine.cupy.norms import F64, _matrix
from lbpar.engine.cupy.pooling import Pooling
from lbpar.engine.device import Array, Float64Array

SOFTMAX, LOSSES = "softmax.cu", "losses.cu"
MOST_TOPS = 8
NOBODY = -(2**63)
"""Stands for no ignored label."""


class Losses(Pooling):
    """The part of the engine that ends networks."""

    def softmax_max(self, x: Array) -> Array:
        return self._by_rows(SOFTMAX, "softmax_max", x, self.empty(x.shape[:-1], x.dtype), self._dense(x))

    def softmax_denominator(self, x: Array, m: Array) -> Float64Array:
        return self._by_rows(SOFTMAX, "softmax_denominator", x, self.empty(m.shape, F64), *self._both(x, m))

    def softmax_forward(self, x: Array, m: Array, sums: Array) -> Array:
        return self._by_rows(SOFTMAX, "softmax_forward", x, self._like(x), *self._both(x, m), self._as(sums, F64))

    def softmax_inner(self, y: Array, dy: Array) -> Float64Array:
        return self._by_rows(SOFTMAX, "softmax_inner", y, self.empty(y.shape[:-1], F64), *self._both(y, dy))

    def softmax_backward(self, y: Array, dy: Array, inner: Array) -> Array:
        return self._by_rows(SOFTMAX, "softmax_backward", y, self._like(y), *self._both(y, dy), self._as(inner, F64))

    def softmax_sums(self, x: Array, m: Array, target: Array, class_start: int) -> Float64Array:
        sums = self.empty((3, *x.shape[:-1]), F64)
        args = (*self._both(x, m), self._dense(target), class_start)
        return self._by_rows(LOSSES, "softmax_sums", x, sums, *args, more=_integers(target))

    def cross_entropy_loss(self, sums: Array, smoothing: float, classes: int, scale: float) -> Float64Array:
        rows = sums[0].size
        args = (self._as(sums, F64), float(smoothing), float(classes), rows)
        return self._total("cross_entropy_partials", rows, scale, *args)

    def cross_entropy_backward(
        self,
        x: Array,
        m: Array,
        sums: Array,
        target: Array,
        class_start: int,
        smoothing: float,
        classes: int,
        scale: float,
    ) -> Array:
        arrays = (*self._both(x, m), self._as(sums, F64), self._dense(target))
        args = (*arrays, class_start, float(smoothing), float(classes), float(scale))
        return self._by_rows(LOSSES, "cross_entropy_backward", x, self._like(x), *args, more=_integers(target))

    def softmax_rank(self, x: Array, m: Array, sums: Array, target: Array, class_start: int) -> Float64Array:
        args = (*self._both(x, m), self._as(sums, F64), self._dense(target), class_start)
        return self._by_rows(LOSSES, "softmax_rank", x, self.empty(m.shape, F64), *args, more=_integers(target))

    def count_hits(self, rank: Array, tops: Sequence[int]) -> Float64Array:
        return self._count_hits(rank, None, tops, NOBODY)

    def _count_hits(self, rank: Array, target: Array | None, tops: Sequence[float], ignore: int) -> Float64Array:
        of = np.full((), 0, np.dtype([("of", "f8", MOST_TOPS)]))
        of["of"][: len(tops)] = tops
        name = f"count_hits<{'i64' if target is None else kind_of(target.dtype)}>"
        args = (self._as(rank, F64), None if target is None else self._dense(target), of, ignore, rank.size)
        return self._total(name, rank.size, 1.0, *args, results=(len(tops),))

    def mse_loss(self, x: Array, t: Array, scale: float) -> Float64Array:
        return self._compared("mse_partials", x, t, scale)

    def mse_backward(self, x: Array, t: Array, scale: float) -> Array:
        return self._difference("mse_backward", x, t, scale)

    def bce_loss(self, x: Array, t: Array, scale: float) -> Float64Array:
        return self._compared("bce_partials", x, t, scale)

    def bce_backward(self, x: Array, t: Array, scale: float) -> Array:
        return self._difference("bce_backward", x, t, scale)

    def error_loss(self, x: Array, t: Array, kind: str, scale: float) -> Float64Array:
        if kind not in ERRORS:  # of somebody's own
            return super().error_loss(x, t, kind, scale)  # type: ignore[misc,no-any-return]
        return self._compared("error_partials", x, t, scale, f", {ERRORS[kind]}")

    def error_backward(self, x: Array, t: Array, kind: str, scale: float) -> Array:
        if kind not in ERRORS:
            return super().error_backward(x, t, kind, scale)  # type: ignore[misc,no-any-return]
        return self._difference("error_backward", x, t, scale, f", {ERRORS[kind]}")

    def _both(self, x: Array, m: Array) -> tuple[Array, Array]:
        """Two arrays, of the first one's type."""
        return self._dense(x), self._as(m, x.dtype)

    def _by_rows(self, file: str, name: str, x: Array, out: Array, *args: Any, more: str = "") -> Array:
        """Launch a kernel of which some lanes share each row of x; it takes ``out`` first, rows and channels last."""
        rows, channels = _matrix(x)
        width = 1 if channels <= 4 else 8 if channels <= 64 else 32
        name = f"{name}<{kind_of(x.dtype)}{more}, {width}>"
        self.kernels.launch(file, name, (self.kernels.blocks(rows * width),), (THREADS,), (out, *args, rows, channels))
        return out

    def _loss(self, name: str, grid: tuple[int, ...], *args: Any) -> None:
        self.kernels.launch(LOSSES, name, grid, (THREADS,), args)

    def _total(self, name: str, size: int, scale: float, *args: Any, results: tuple[int, ...] = ()) -> Float64Array:
        """``scale`` times the sum of what a kernel of partial sums makes of ``size`` elements; for each of several results."""
        blocks, along = max(1, self.kernels.blocks(size)), results[0] if results else 1
        partial, out = self.empty((along, blocks), F64), self.empty(results, F64)
        self._loss(name, (blocks, along), partial, *args)
        self._loss("sum_partials", (1, along), out, partial, float(scale), blocks)
        return out

    def _compared(self, name: str, x: Array, t: Array, scale: float, more: str = "") -> Float64Array:
        name = f"{name}<{kind_of(x.dtype)}, {kind_of(t.dtype)}{more}>"
        return self._total(name, x.size, scale, self._dense(x), self._dense(t), x.size)

    def _difference(self, name: str, x: Array, t: Array, scale: float, more: str = "") -> Array:
        dx, name = self._like(x), f"{name}<{kind_of(x.dtype)}, {kind_of(t.dtype)}{more}>"
        self._loss(name, (self.kernels.blocks(x.size),), dx, self._dense(x), self._dense(t), float(scale), x.size)
        return dx


def _integers(target: Array) -> str:
    return f", {kind_of(target.dtype)}"
