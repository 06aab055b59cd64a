"""The reference engine: NumPy on host memory, complete and correct in every corner case, reasonably fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lbpar.engine import convolution, losses, norm, pooling
from lbpar.engine import random as counter_random
from lbpar.engine.base import Array, Engine, Event, Float64Array, Index, Window
from lbpar.engine.masks import keep_where


class NumpyEngine(Engine):
    """All local kernels in NumPy.

    An engine for another library on host memory derives from this one, overrides what the library does better and
    calls ``super()`` for the rest. Threads are those of NumPy's BLAS, which reads OMP_NUM_THREADS at start.
    """

    name = "numpy"
    accelerated = frozenset({"float32", "float64"})

    # -- convolution -----------------------------------------------------------------------------------------------

    def conv_forward(
        self, x: Array, w: Array, b: Array | None, win: Window, groups: int, out_spatial: Sequence[int]
    ) -> Array:
        return convolution.forward(x, w, b, win, groups, out_spatial)

    def conv_backward_data(self, dy: Array, w: Array, win: Window, groups: int, in_spatial: Sequence[int]) -> Array:
        return convolution.backward_data(dy, w, win, groups, in_spatial)

    def conv_backward_weights(self, x: Array, dy: Array, win: Window, groups: int, out: Array | None = None) -> Array:
        return convolution.backward_weights(x, dy, win, groups)

    def bias_add(self, y: Array, b: Array) -> Array:
        y += b
        return y

    def bias_backward(self, dy: Array) -> Array:
        return norm.sum_rows(dy).astype(dy.dtype)

    # -- linear ----------------------------------------------------------------------------------------------------

    def linear_forward(self, x: Array, w: Array, b: Array | None) -> Array:
        y = np.matmul(x, w.T)
        if b is not None:
            y += b
        return y

    def linear_backward_data(self, dy: Array, w: Array) -> Array:
        return np.matmul(dy, w)

    def linear_backward_weights(self, x: Array, dy: Array, out: Array | None = None) -> Array:
        return np.matmul(dy.T, x, out=out)

    # -- pooling ---------------------------------------------------------------------------------------------------

    def max_pool_forward(self, x: Array, win: Window, out_spatial: Sequence[int]) -> tuple[Array, Array]:
        return pooling.max_forward(x, win, out_spatial)

    def max_pool_backward(self, dy: Array, arg: Array, win: Window, in_spatial: Sequence[int]) -> Array:
        return pooling.max_backward(dy, arg, win, in_spatial)

    def avg_pool_forward(
        self, x: Array, win: Window, out_spatial: Sequence[int], divisors: Sequence[Float64Array]
    ) -> Array:
        return pooling.avg_forward(x, win, out_spatial, divisors)

    def avg_pool_backward(
        self, dy: Array, win: Window, in_spatial: Sequence[int], divisors: Sequence[Float64Array]
    ) -> Array:
        return pooling.avg_backward(dy, win, in_spatial, divisors)

    def spatial_sum(self, x: Array, scale: float) -> Array:
        return pooling.spatial_sum(x, scale)

    def spatial_broadcast(self, dy: Array, spatial: Sequence[int], scale: float) -> Array:
        return pooling.spatial_broadcast(dy, spatial, scale)

    # -- normalisation ---------------------------------------------------------------------------------------------

    def norm_sums(self, x: Array, shift: Array) -> Float64Array:
        return norm.sums(x, shift)

    def norm_moments(
        self, sums: Array, shift: Array, count: float, eps: float
    ) -> tuple[Float64Array, Float64Array, Float64Array]:
        return norm.moments(sums, shift, count, eps)

    def norm_apply(self, x: Array, mean: Array, invstd: Array, scale: Array | None, bias: Array | None) -> Array:
        return norm.apply(x, mean, invstd, scale, bias)

    def norm_backward_sums(self, x: Array, dy: Array, mean: Array, invstd: Array) -> Float64Array:
        return norm.backward_sums(x, dy, mean, invstd)

    def norm_backward_data(
        self, x: Array, dy: Array, mean: Array, invstd: Array, scale: Array | None, sums: Array, count: float
    ) -> Array:
        return norm.backward_data(x, dy, mean, invstd, scale, sums, count)

    # -- pointwise -------------------------------------------------------------------------------------------------

    def relu_forward(self, x: Array) -> Array:
        return np.maximum(x, 0)

    def relu_backward(self, y: Array, dy: Array) -> Array:
        return keep_where(y > 0, dy)

    def leaky_relu_forward(self, x: Array, slope: float) -> Array:
        y = x * float(slope)
        return np.maximum(x, y, out=y) if 0 <= slope <= 1 else np.where(x > 0, x, y)

    def leaky_relu_backward(self, y: Array, dy: Array, slope: float) -> Array:
        dx = np.take(np.array([slope, 1], dtype=dy.dtype), (y > 0).view(np.int8))
        dx *= dy
        return dx

    def sigmoid_forward(self, x: Array) -> Array:
        return losses.sigmoid(x)

    def sigmoid_backward(self, y: Array, dy: Array) -> Array:
        dx = 1 - y
        dx *= y
        dx *= dy
        return dx

    def add(self, xs: Sequence[Array]) -> Array:
        y = xs[0].copy() if len(xs) == 1 else xs[0] + xs[1]
        for x in xs[2:]:
            y += x
        return y

    def multiply(self, xs: Sequence[Array]) -> Array:
        y = xs[0].copy() if len(xs) == 1 else xs[0] * xs[1]
        for x in xs[2:]:
            y *= x
        return y

    def multiply_backward(self, dy: Array, xs: Sequence[Array], i: int) -> Array:
        return self.multiply([dy, *xs[:i], *xs[i + 1 :]])

    def concat(self, xs: Sequence[Array]) -> Array:
        return np.concatenate(xs, axis=-1)

    def upsample_forward(
        self, x: Array, factors: Sequence[int], out_spatial: Sequence[int], offsets: Sequence[int]
    ) -> Array:
        return pooling.upsample_forward(x, factors, out_spatial, offsets)

    def upsample_backward(self, dy: Array, factors: Sequence[int]) -> Array:
        return pooling.upsample_backward(dy, factors)

    def dropout(self, x: Array, rate: float, key: int, index: npt.NDArray[np.int64]) -> Array:
        if rate >= 1:
            return np.zeros_like(x)
        y = keep_where(np.broadcast_to(counter_random.uniform32(key, index) >= rate, x.shape), x)
        y *= 1 / (1 - rate)
        return y

    # -- split softmax and losses ----------------------------------------------------------------------------------

    def softmax_max(self, x: Array) -> Array:
        return losses.softmax_max(x)

    def softmax_sums(self, x: Array, m: Array, target: Array, class_start: int) -> Float64Array:
        return losses.softmax_sums(x, m, target, class_start)

    def cross_entropy_loss(self, sums: Array, smoothing: float, classes: int, scale: float) -> Float64Array:
        return losses.cross_entropy_loss(sums, smoothing, classes, scale)

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
        return losses.cross_entropy_backward(x, m, sums, target, class_start, smoothing, classes, scale)

    def softmax_rank(self, x: Array, m: Array, sums: Array, target: Array, class_start: int) -> Float64Array:
        return losses.softmax_rank(x, m, sums, target, class_start)

    def mse_loss(self, x: Array, t: Array, scale: float) -> Float64Array:
        return losses.mse_loss(x, t, scale)

    def mse_backward(self, x: Array, t: Array, scale: float) -> Array:
        return losses.mse_backward(x, t, scale)

    def bce_loss(self, x: Array, t: Array, scale: float) -> Float64Array:
        return losses.bce_loss(x, t, scale)

    def bce_backward(self, x: Array, t: Array, scale: float) -> Array:
        return losses.bce_backward(x, t, scale)

    def dice_sums(self, x: Array, m: Array, sums: Array, target: Array, class_start: int) -> Float64Array:
        return losses.dice_sums(x, m, sums, target, class_start)

    def dice_loss(self, dsums: Array, eps: float, classes: int) -> Float64Array:
        return losses.dice_loss(dsums, eps, classes)

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
        return losses.dice_backward(x, m, sums, target, class_start, dsums, eps, classes)

    def dice_backward_data(self, x: Array, m: Array, sums: Array, g: Array, inner: Array) -> Array:
        return losses.dice_backward_data(x, m, sums, g, inner)

    # -- device side: host memory, so everything has happened when a call returns -----------------------------------

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike | None = None) -> Array:
        return np.empty(tuple(shape), dtype=self.dtype if dtype is None else dtype)

    def from_host(self, a: npt.NDArray[Any]) -> Array:
        return np.asarray(a, order="C")

    def to_host(self, a: Array) -> npt.NDArray[Any]:
        return a

    def pack(self, a: Array, index: Index) -> Array:
        return np.array(a[_outer(index, a.shape)], order="C")

    def unpack(self, buf: Array, a: Array, index: Index, accumulate: bool = False) -> None:
        where = _outer(index, a.shape)
        values = buf.reshape(a[where].shape)
        if not accumulate:
            a[where] = values
        elif any(not isinstance(i, slice) for i in index):
            np.add.at(a, where, values)  # unlike +=, adds every one of repeated rows
        else:
            a[where] += values

    def record(self) -> Event:
        return None

    def wait(self, event: Event) -> None:
        return None

    def synchronize(self) -> None:
        return None


def _outer(index: Index, shape: Sequence[int]) -> Index:
    """``index`` for NumPy, so that arrays of several dimensions select an outer product instead of pairs."""
    if sum(not isinstance(i, slice) for i in index) < 2:
        return tuple(index)
    return np.ix_(*(np.arange(n)[i] if isinstance(i, slice) else i for i, n in zip(index, shape, strict=True)))
