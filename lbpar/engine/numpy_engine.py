"""The reference engine: NumPy on host memory, complete and correct in every corner case, reasonably fast."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lbpar.engine import convolution
from lbpar.engine.activations import ACTIVATIONS
from lbpar.engine.base import Array, Engine
from lbpar.engine.channels import Channels
from lbpar.engine.device import Host
from lbpar.engine.losses import Losses, sigmoid
from lbpar.engine.masks import keep_where
from lbpar.engine.norm import Norms, sum_rows
from lbpar.engine.pooling import Pooling
from lbpar.engine.updates import Updates
from lbpar.random import outer_sum, uniform32


class NumpyEngine(Host, Pooling, Norms, Channels, Losses, Updates, Engine):
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
        return sum_rows(dy).astype(dy.dtype)

    def linear_forward(self, x: Array, w: Array, b: Array | None) -> Array:
        y = np.matmul(x, w.T)
        if b is not None:
            y += b
        return y

    def linear_backward_data(self, dy: Array, w: Array) -> Array:
        return np.matmul(dy, w)

    def linear_backward_weights(self, x: Array, dy: Array, out: Array | None = None) -> Array:
        return np.matmul(dy.T, x, out=out)

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

    sigmoid_forward = staticmethod(sigmoid)

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

    def activation_forward(self, kind: str, x: Array, *options: float | str) -> Array:
        return np.asarray(ACTIVATIONS[kind][0](x, *options), x.dtype)

    def activation_backward(self, kind: str, kept: Array, dy: Array, *options: float | str) -> Array:
        return np.asarray(dy * ACTIVATIONS[kind][1](kept, *options), dy.dtype)

    def local_response_norm_ratio(self, y: Array, dy: Array, scale: Array) -> Array:
        out = dy * y
        out /= scale
        return out

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

    def dropout(self, x: Array, rate: float, key: int | Array, index: Sequence[npt.NDArray[np.int64]]) -> Array:
        if rate >= 1:
            return np.zeros_like(x)
        y = keep_where(uniform32(int(key), outer_sum(index)) >= rate, x)
        y *= 1 / (1 - rate)
        return y

    def axpy(self, a: float, x: Array, y: Array | None = None) -> Array:
        result = x * x.dtype.type(a)
        if y is not None:
            result += y
        return result
