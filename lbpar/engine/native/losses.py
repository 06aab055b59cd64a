"""Softmax and losses of float32 arrays by the compiled passes (``kernels/losses.c``), the rest by NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lbpar.engine.base import Array, Float64Array
from lbpar.engine.native.passes import Native, check, float32, float64, is_dense
from lbpar.engine.numpy_engine import NumpyEngine


class CompiledLosses(NumpyEngine):
    """The part of an engine that computes losses.

    Attributes
    ----------
    native : Native or None
        None leaves everything to NumPy.
    """

    native: Native | None = None

    def _new(self, shape: Sequence[int], dtype: npt.DTypeLike = np.float32) -> Array:
        return np.empty(shape, dtype)

    def softmax_max(self, x: Array) -> Array:
        native = self.native
        if native is None or not is_dense(x):
            return super().softmax_max(x)
        m = self._new(x.shape[:-1])
        n, c, p = m.size, x.shape[-1], native.pointer
        native.lib.lbpar_softmax_max(p(x), n, c, p(m), native.team(x.size))
        return m

    def softmax_sums(self, x: Array, m: Array, target: Array, class_start: int) -> Float64Array:
        native = self.native
        if native is None or not is_dense(x):
            return super().softmax_sums(x, m, target, class_start)
        out = self._new((3, *x.shape[:-1]), np.float64)
        n, c, p, team = x.size // x.shape[-1], x.shape[-1], native.pointer, native.team(x.size)
        check(native.lib.lbpar_softmax_sums(p(x), p(float32(m)), p(_int64(target)), class_start, n, c, p(out), team))
        return out

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
        native = self.native
        if native is None or not is_dense(x):
            return super().cross_entropy_backward(x, m, sums, target, class_start, smoothing, classes, scale)
        dx = self._new(x.shape)
        n, c, p, team = x.size // x.shape[-1], x.shape[-1], native.pointer, native.team(x.size)
        even, hit = smoothing / classes, 1 - smoothing
        arrays = p(x), p(float32(m)), p(float64(sums[0])), p(_int64(target))
        run = native.lib.lbpar_cross_entropy_backward
        check(run(*arrays, class_start, n, c, even, hit, scale, p(dx), team))
        return dx

    def softmax_rank(self, x: Array, m: Array, sums: Array, target: Array, class_start: int) -> Float64Array:
        native = self.native
        if native is None or not is_dense(x):
            return super().softmax_rank(x, m, sums, target, class_start)
        out = self._new(x.shape[:-1], np.float64)
        n, c, p, team = out.size, x.shape[-1], native.pointer, native.team(x.size)
        arrays = p(x), p(float32(m)), p(float64(sums[0])), p(float64(sums[1])), p(_int64(target))
        native.lib.lbpar_softmax_rank(*arrays, class_start, n, c, p(out), team)
        return out

    def mse_loss(self, x: Array, t: Array, scale: float) -> Float64Array:
        native = self.native
        if native is None or not is_dense(x, t):
            return super().mse_loss(x, t, scale)
        p = native.pointer
        return np.asarray(scale * native.lib.lbpar_mse_loss(p(x), p(t), x.size, native.team(x.size)))

    def mse_backward(self, x: Array, t: Array, scale: float) -> Array:
        native = self.native
        if native is None or not is_dense(x, t):
            return super().mse_backward(x, t, scale)
        dx, p = self._new(x.shape), native.pointer
        native.lib.lbpar_mse_backward(p(x), p(t), x.size, 2 * scale, p(dx), native.team(x.size))
        return dx

    def bce_loss(self, x: Array, t: Array, scale: float) -> Float64Array:
        native = self.native
        if native is None or not is_dense(x, t):
            return super().bce_loss(x, t, scale)
        p = native.pointer
        return np.asarray(scale * native.lib.lbpar_bce_loss(p(x), p(t), x.size, native.team(x.size)))

    def bce_backward(self, x: Array, t: Array, scale: float) -> Array:
        native = self.native
        if native is None or not is_dense(x, t):
            return super().bce_backward(x, t, scale)
        dx, p = self._new(x.shape), native.pointer
        native.lib.lbpar_bce_backward(p(x), p(t), x.size, scale, p(dx), native.team(x.size))
        return dx

    def dice_sums(self, x: Array, m: Array, sums: Array, target: Array, class_start: int) -> Float64Array:
        native = self.native
        if native is None or not is_dense(x):
            return super().dice_sums(x, m, sums, target, class_start)
        n, c, p, team = x.size // x.shape[-1], x.shape[-1], native.pointer, native.team(x.size)
        out = np.empty((3, c))
        arrays = p(x), p(float32(m)), p(float64(sums[0])), p(_int64(target))
        check(native.lib.lbpar_dice_sums(*arrays, class_start, n, c, p(out), team))
        return out

    def dice_backward(
        self,
        x: Array,
        m: Array,
        sums: Array,
        target: Array,
        class_start: int,
        dsums: Array,
        eps: float,
        classes: int,
    ) -> tuple[Array, Float64Array]:
        native = self.native
        if native is None or not is_dense(x):
            return super().dice_backward(x, m, sums, target, class_start, dsums, eps, classes)
        n, c, p, team = x.size // x.shape[-1], x.shape[-1], native.pointer, native.team(x.size)
        overlap, predicted, true = dsums
        union = predicted + true + eps
        rest, hit = float64((2 * overlap + eps) / (union * union) / classes), float64(-2 / union / classes)
        g, inner = self._new(x.shape), self._new(x.shape[:-1], np.float64)
        arrays = p(x), p(float32(m)), p(float64(sums[0])), p(_int64(target))
        run = native.lib.lbpar_dice_backward
        check(run(*arrays, class_start, n, c, p(rest), p(hit), p(g), p(inner), team))
        return g, inner

    def dice_backward_data(self, x: Array, m: Array, sums: Array, g: Array, inner: Array) -> Array:
        native = self.native
        if native is None or not is_dense(x, g):
            return super().dice_backward_data(x, m, sums, g, inner)
        dx = self._new(x.shape)
        n, c, p, team = x.size // x.shape[-1], x.shape[-1], native.pointer, native.team(x.size)
        arrays = p(x), p(float32(m)), p(float64(sums[0])), p(g), p(float64(inner))
        check(native.lib.lbpar_dice_backward_data(*arrays, n, c, p(dx), team))
        return dx


def _int64(target: Array) -> npt.NDArray[np.int64]:
    return np.ascontiguousarray(target, dtype=np.int64)
