"""The reference engine: NumPy on host memory, complete and correct in every corner case, reasonably fast."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lbpar.engine import channels, convolution, losses, norm, pooling, updates
from lbpar.engine.base import Array, Engine
from lbpar.engine.device import Host
from lbpar.engine.masks import keep_where
from lbpar.random import outer_sum, uniform32


class NumpyEngine(Host, Engine):
    """All local kernels in NumPy.

    An engine for another library on host memory derives from this one, overrides what the library does better and
    calls ``super()`` for the rest. Threads are those of NumPy's BLAS, which reads OMP_NUM_THREADS at start.
    """

    name = "numpy"
    accelerated = frozenset({"float32", "float64"})

    def __init__(self, dtype: npt.DTypeLike = np.float32, threads: int | None = None) -> None:
        Engine.__init__(self, dtype, threads)

    conv_forward = staticmethod(convolution.forward)
    conv_backward_data = staticmethod(convolution.backward_data)
    conv_backward_weights = staticmethod(convolution.backward_weights)

    def bias_add(self, y: Array, b: Array) -> Array:
        y += b
        return y

    def bias_backward(self, dy: Array) -> Array:
        return norm.sum_rows(dy).astype(dy.dtype)

    def linear_forward(self, x: Array, w: Array, b: Array | None) -> Array:
        y = np.matmul(x, w.T)
        if b is not None:
            y += b
        return y

    def linear_backward_data(self, dy: Array, w: Array) -> Array:
        return np.matmul(dy, w)

    def linear_backward_weights(self, x: Array, dy: Array, out: Array | None = None) -> Array:
        return np.matmul(dy.T, x, out=out)

    max_pool_forward = staticmethod(pooling.max_forward)
    max_pool_backward = staticmethod(pooling.max_backward)
    avg_pool_forward = staticmethod(pooling.avg_forward)
    avg_pool_backward = staticmethod(pooling.avg_backward)
    spatial_sum = staticmethod(pooling.spatial_sum)
    spatial_broadcast = staticmethod(pooling.spatial_broadcast)

    norm_sums = staticmethod(norm.sums)
    norm_moments = staticmethod(norm.moments)
    norm_running = staticmethod(norm.running)
    norm_apply = staticmethod(norm.apply)
    norm_backward_sums = staticmethod(norm.backward_sums)
    norm_backward_data = staticmethod(norm.backward_data)

    def norm_inference(
        self, x: Array, mean: Array, var: Array, scale: Array | None, bias: Array | None, eps: float
    ) -> Array:
        return self.norm_apply(x, mean, 1.0 / np.sqrt(var + eps), scale, bias)

    def relu_forward(self, x: Array) -> Array:
        return np.maximum(x, 0)

    def _rectify(self, y: Array) -> Array:
        """`relu_forward` in place."""
        return np.maximum(y, 0, out=y)

    def relu_backward(self, y: Array, dy: Array) -> Array:
        return keep_where(y > 0, dy)

    def leaky_relu_forward(self, x: Array, slope: float) -> Array:
        y = x * float(slope)
        return np.maximum(x, y, out=y) if 0 <= slope <= 1 else np.where(x > 0, x, y)

    def leaky_relu_backward(self, y: Array, dy: Array, slope: float) -> Array:
        dx = np.take(np.array([slope, 1], dtype=dy.dtype), (y > 0).view(np.int8))
        dx *= dy
        return dx

    sigmoid_forward = staticmethod(losses.sigmoid)

    def sigmoid_backward(self, y: Array, dy: Array) -> Array:
        dx = 1 - y
        dx *= y
        dx *= dy
        return dx

    def tanh_forward(self, x: Array, scale: float) -> Array:
        y = np.tanh(x)
        y *= scale
        return y

    def tanh_backward(self, y: Array, dy: Array, scale: float) -> Array:
        dx = y * y
        dx *= -1 / scale
        dx += scale
        dx *= dy
        return dx

    local_response_norm_forward = staticmethod(channels.local_response_norm_forward)
    local_response_norm_backward = staticmethod(channels.local_response_norm_backward)

    def local_response_norm_ratio(self, y: Array, dy: Array, scale: Array) -> Array:
        out = dy * y
        out /= scale
        return out

    softmax_denominator = staticmethod(channels.softmax_denominator)
    softmax_forward = staticmethod(channels.softmax_forward)
    softmax_inner = staticmethod(channels.softmax_inner)
    softmax_backward = staticmethod(channels.softmax_backward)

    def channel_shuffle(self, x: Array, rows: int, columns: int) -> Array:
        table = x.reshape((*x.shape[:-1], rows, columns))
        return np.ascontiguousarray(table.swapaxes(-1, -2)).reshape(x.shape)

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

    upsample_forward = staticmethod(pooling.upsample_forward)
    upsample_backward = staticmethod(pooling.upsample_backward)

    def dropout(self, x: Array, rate: float, key: int, index: Sequence[npt.NDArray[np.int64]]) -> Array:
        if rate >= 1:
            return np.zeros_like(x)
        y = keep_where(uniform32(key, outer_sum(index)) >= rate, x)
        y *= 1 / (1 - rate)
        return y

    softmax_max = staticmethod(losses.softmax_max)
    softmax_sums = staticmethod(losses.softmax_sums)
    softmax_rank = staticmethod(losses.softmax_rank)
    count_hits = staticmethod(losses.count_hits)
    cross_entropy_loss = staticmethod(losses.cross_entropy_loss)
    cross_entropy_backward = staticmethod(losses.cross_entropy_backward)
    mse_loss = staticmethod(losses.mse_loss)
    mse_backward = staticmethod(losses.mse_backward)
    bce_loss = staticmethod(losses.bce_loss)
    bce_backward = staticmethod(losses.bce_backward)
    dice_sums = staticmethod(losses.dice_sums)
    dice_loss = staticmethod(losses.dice_loss)
    dice_backward = staticmethod(losses.dice_backward)
    dice_backward_data = staticmethod(losses.dice_backward_data)

    def axpy(self, a: float, x: Array, y: Array | None = None) -> Array:
        result = x * x.dtype.type(a)
        if y is not None:
            result += y
        return result

    squared_norms = staticmethod(updates.squared_norms)
    clip = staticmethod(updates.clip)
    sgd = staticmethod(updates.sgd)
    adam = staticmethod(updates.adam)
    lars = staticmethod(updates.lars)
    lamb_moments = staticmethod(updates.lamb_moments)
    lamb = staticmethod(updates.lamb)
