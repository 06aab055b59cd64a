"""Norms, relu, copies, losses and update rules by the compiled passes; the rest is left to another engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from itertools import accumulate
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from lbpar.engine.base import Array, Float64Array
from lbpar.engine.device import Index
from lbpar.engine.native.passes import float32, float64, is_dense, is_dense_alike
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.rules import Blocks

P = ParamSpec("P")
T = TypeVar("T")
_F32 = np.dtype(np.float32)


def compiled(
    arrays: int, takes: Callable[..., bool] = is_dense
) -> Callable[[Callable[Concatenate[Compiled, P], T]], Callable[Concatenate[Compiled, P], T]]:
    """A method for when there are compiled passes and they take its first arguments, so many ``arrays``; else the next engine's.

    ``takes`` tells whether they do: those of rows take bfloat16, too (`is_dense_alike`).
    """

    def decorate(method: Callable[Concatenate[Compiled, P], T]) -> Callable[Concatenate[Compiled, P], T]:
        name = method.__name__

        @wraps(method)
        def choose(self: Compiled, *args: P.args, **kwargs: P.kwargs) -> T:
            given: tuple[Any, ...] = args[:arrays]
            if self.native is not None and takes(*given):
                return method(self, *args, **kwargs)
            other: T = getattr(super(Compiled, self), name)(*args, **kwargs)
            return other

        return choose

    return decorate


class Compiled(NumpyEngine):
    """The part of an engine that runs compiled passes; what they do not take goes to the class behind it.

    Attributes
    ----------
    native : Native or None
        None leaves everything to the class behind.
    """

    native: Any = None  # no type: a method that is `compiled` knows that it is there

    def running(self) -> AbstractContextManager[None]:
        """Denormal numbers count as zero: gradients that fade away would make convolutions several times slower."""
        return nullcontext() if self.native is None or self.dtype != _F32 else self.native.flushing()

    def _like(self, x: Array, name: str, arrays: tuple[Array | None, ...], *numbers: float) -> Array:
        """A new array like x that a pass fills: the one behind ``arrays``."""
        out = self.empty(x.shape, x.dtype)
        self.native.of(x, name)(x.size, (*arrays, out), *numbers)
        return out

    # -- normalisation and sums ------------------------------------------------------------------------------------

    @compiled(1, is_dense_alike)
    def bias_backward(self, dy: Array) -> Array:
        out = np.empty(dy.shape[-1], _F32)
        self.native.of(dy, "sum_rows")(dy.size, (dy, out), *_matrix(dy))
        return out

    @compiled(1, is_dense_alike)
    def norm_sums(self, x: Array, shift: Array) -> Float64Array:
        out = np.empty((4, x.shape[-1]))
        self.native.of(x, "norm_sums")(x.size, (x, float64(shift), out), *_matrix(x))
        return out

    @compiled(0)
    def norm_moments(self, sums: Array, shift: Array, count: float, eps: float) -> Float64Array:
        out = np.empty((3, sums.shape[-1]))
        self.native.norm_moments(0, (float64(sums), float64(shift), out), sums.shape[-1], max(count, 1), eps)
        return out

    @compiled(0)
    def norm_running(self, sums: Array, mean: Array, var: Array, momentum: float, count: int) -> None:
        if mean.dtype == var.dtype == np.float64:
            self.native.norm_running(0, (float64(sums), mean, var), mean.shape[0], momentum, count)
        else:
            super().norm_running(sums, mean, var, momentum, count)

    @compiled(1, is_dense_alike)
    def norm_apply(self, x: Array, mean: Array, invstd: Array, scale: Array | None, bias: Array | None) -> Array:
        return self._norm_apply(x, None, False, mean, invstd, scale, bias)

    @compiled(1, is_dense_alike)
    def norm_relu_forward(
        self,
        x: Array,
        mean: Array,
        invstd: Array,
        scale: Array | None,
        bias: Array | None,
        residual: Array | None = None,
    ) -> Array:
        return self._norm_apply(x, _like(residual, x), True, mean, invstd, scale, bias)

    def _norm_apply(
        self, x: Array, residual: Array | None, relu: bool, mean: Array, invstd: Array, *affine: Array | None
    ) -> Array:
        arrays = x, residual, float64(mean), float64(invstd), *map(_maybe, affine)
        return self._like(x, "norm_apply", arrays, *_matrix(x), relu)

    @compiled(2, is_dense_alike)
    def norm_backward_sums(self, x: Array, dy: Array, mean: Array, invstd: Array) -> Float64Array:
        return self._backward_sums(x, dy, None, None, None, mean, invstd)

    @compiled(3, is_dense_alike)
    def norm_relu_backward_sums(
        self, x: Array, y: Array, dy: Array, mean: Array, invstd: Array, more: Array | None = None
    ) -> tuple[Float64Array, Array]:
        masked = self.empty(dy.shape, dy.dtype)
        return self._backward_sums(x, dy, _like(more, x), y, masked, mean, invstd), masked

    def _backward_sums(self, x: Array, *rest: Any) -> Float64Array:
        *arrays, mean, invstd = rest
        out = np.empty((2, x.shape[-1]))
        self.native.of(x, "norm_backward_sums")(x.size, (x, *arrays, float64(mean), float64(invstd), out), *_matrix(x))
        return out

    @compiled(2, is_dense_alike)
    def norm_backward_data(
        self, x: Array, dy: Array, mean: Array, invstd: Array, scale: Array | None, sums: Array, count: float
    ) -> Array:
        return self._backward_data(x, dy, None, mean, invstd, scale, sums, count)

    @compiled(2, is_dense_alike)
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
        return self._backward_data(x, dy, _like(more, x), mean, invstd, scale, sums, count)

    def _backward_data(self, x: Array, dy: Array, more: Array | None, *rest: Any) -> Array:
        mean, invstd, scale, sums, count = rest
        arrays = x, dy, more, float64(mean), float64(invstd), _maybe(scale), float64(sums)
        return self._like(x, "norm_backward_data", arrays, (x if more is None else more).shape[-1], *_matrix(x), count)

    # -- relu and copies -------------------------------------------------------------------------------------------

    @compiled(1, is_dense_alike)
    def relu_forward(self, x: Array) -> Array:
        return self._like(x, "relu", (x,), x.size)

    @compiled(1, is_dense_alike)
    def _rectify(self, y: Array) -> Array:
        self.native.of(y, "relu")(y.size, (y, y), y.size)
        return y

    @compiled(2, is_dense_alike)
    def relu_backward(self, y: Array, dy: Array) -> Array:
        return self._like(dy, "relu_backward", (y, dy), dy.size)

    def add(self, xs: Sequence[Array]) -> Array:
        if self.native is None or len(xs) != 2 or xs[0].dtype == _F32 or not is_dense_alike(*xs):
            return super().add(xs)  # of float32 NumPy's is as fast
        return self._like(xs[0], "add", tuple(xs), xs[0].size)

    def concat(self, xs: Sequence[Array]) -> Array:
        if self.native is None or not is_dense_alike(*xs):
            return super().concat(xs)
        y = self.empty((*xs[0].shape[:-1], sum(x.shape[-1] for x in xs)), xs[0].dtype)
        for x, at in zip(xs, accumulate((x.shape[-1] for x in xs), initial=0), strict=False):
            self._copy_columns(x, 0, y, at)
        return y

    def pack(self, a: Array, index: Index, out: Array | None = None) -> Array:
        first = self._column(a, index)
        if first is None:
            return super().pack(a, index, out)
        out = self.empty(a[tuple(index)].shape, a.dtype) if out is None else out
        self._copy_columns(a, first, out.reshape(_matrix(a)[0], -1), 0)
        return out

    def unpack(self, buf: Array, a: Array, index: Index, accumulate: bool = False) -> None:
        first = None if accumulate or not is_dense_alike(buf, a) else self._column(a, index)
        if first is None:
            return super().unpack(buf, a, index, accumulate)
        return self._copy_columns(buf.reshape(_matrix(a)[0], -1), 0, a, first)

    def _column(self, a: Array, index: Index) -> int | None:
        """The first of the neighbouring columns that ``index`` selects of all rows, if it does so and a pass can copy them."""
        if self.native is None or not is_dense_alike(a) or any(not isinstance(i, slice) for i in index):
            return None
        part, (first, _, step) = a[tuple(index)], index[-1].indices(a.shape[-1])  # type: ignore[union-attr]
        return first if part.shape[:-1] == a.shape[:-1] and step == 1 and part.size else None

    def _copy_columns(self, source: Array, first: int, target: Array, at: int) -> None:
        """Copy from column ``first`` on to column ``at`` on, as many as the narrower one has."""
        (rows, width), other = _matrix(source), target.shape[-1]
        self.native.of(source, "copy")(
            rows * min(width, other), (source, target), first, width, at, other, rows, min(width, other)
        )

    # -- softmax and losses ----------------------------------------------------------------------------------------

    @compiled(1)
    def softmax_max(self, x: Array) -> Array:
        m = self.empty(x.shape[:-1], _F32)
        self.native.softmax_max(x.size, (x, m), *_matrix(x))
        return m

    @compiled(1)
    def softmax_sums(self, x: Array, m: Array, target: Array, class_start: int) -> Float64Array:
        out = self.empty((3, *x.shape[:-1]), np.float64)
        self.native.softmax_sums(x.size, (x, float32(m), _int64(target), out), class_start, *_matrix(x))
        return out

    @compiled(1)
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
        arrays = x, float32(m), float64(sums[0]), _int64(target)
        factors = smoothing / classes, 1 - smoothing, scale
        return self._like(x, "cross_entropy_backward", arrays, class_start, *_matrix(x), *factors)

    @compiled(1)
    def softmax_rank(self, x: Array, m: Array, sums: Array, target: Array, class_start: int) -> Float64Array:
        out = self.empty(x.shape[:-1], np.float64)
        arrays = x, float32(m), float64(sums[0]), float64(sums[1]), _int64(target)
        self.native.softmax_rank(x.size, (*arrays, out), class_start, *_matrix(x))
        return out

    @compiled(2)
    def mse_loss(self, x: Array, t: Array, scale: float) -> Float64Array:
        return np.asarray(scale * self.native.mse_loss(x.size, (x, t), x.size))

    @compiled(2)
    def mse_backward(self, x: Array, t: Array, scale: float) -> Array:
        return self._like(x, "mse_backward", (x, t), x.size, 2 * scale)

    @compiled(2)
    def bce_loss(self, x: Array, t: Array, scale: float) -> Float64Array:
        return np.asarray(scale * self.native.bce_loss(x.size, (x, t), x.size))

    @compiled(2)
    def bce_backward(self, x: Array, t: Array, scale: float) -> Array:
        return self._like(x, "bce_backward", (x, t), x.size, scale)

    @compiled(1)
    def dice_sums(self, x: Array, m: Array, sums: Array, target: Array, class_start: int) -> Float64Array:
        out = np.empty((3, x.shape[-1]))
        arrays = x, float32(m), float64(sums[0]), _int64(target)
        self.native.dice_sums(x.size, (*arrays, out), class_start, *_matrix(x))
        return out

    @compiled(1)
    def dice_backward(
        self, x: Array, m: Array, sums: Array, target: Array, class_start: int, dsums: Array, eps: float, classes: int
    ) -> tuple[Array, Float64Array]:
        overlap, predicted, true = dsums
        union = predicted + true + eps
        rest, hit = float64((2 * overlap + eps) / (union * union) / classes), float64(-2 / union / classes)
        g, inner = self.empty(x.shape, _F32), self.empty(x.shape[:-1], np.float64)
        arrays = x, float32(m), float64(sums[0]), _int64(target)
        self.native.dice_backward(x.size, (*arrays, rest, hit, g, inner), class_start, *_matrix(x))
        return g, inner

    @compiled(1)
    def dice_backward_data(self, x: Array, m: Array, sums: Array, g: Array, inner: Array) -> Array:
        arrays = x, float32(m), float64(sums[0]), float32(g), float64(inner)
        return self._like(x, "dice_backward_data", arrays, *_matrix(x))

    # -- update rules, to the last bit as NumPy's ------------------------------------------------------------------

    def sgd(
        self, blocks: Blocks, momentum: float, nesterov: bool, decays: Sequence[float], rates: Sequence[float]
    ) -> None:
        for block, decay, rate in zip(blocks, decays, rates, strict=True):
            if self.native is not None and is_dense(*block):
                arrays, size = (*block, None)[:3], block[0].size  # without momentum, no velocity
                self.native.sgd(size, arrays, size, momentum, nesterov, decay, rate)
            else:
                super().sgd([block], momentum, nesterov, [decay], [rate])

    def adam(
        self,
        blocks: Blocks,
        betas: tuple[float, float],
        eps: float,
        keeps: Sequence[float],
        decays: Sequence[float],
        rates: Sequence[float],
    ) -> None:
        for block, keep, decay, rate in zip(blocks, keeps, decays, rates, strict=True):
            if self.native is not None and is_dense(*block):
                size = block[0].size
                self.native.adam(size, block, size, keep, decay, *betas, eps, rate)
            else:
                super().adam([block], betas, eps, [keep], [decay], [rate])


def _matrix(x: Array) -> tuple[int, int]:
    """Rows and columns of an array, as the passes see it."""
    return x.size // x.shape[-1], x.shape[-1]


def _maybe(a: Array | None) -> Array | None:
    """`float32` of an array that may be left out."""
    return None if a is None else float32(a)


def _like(a: Array | None, x: Array) -> Array | None:
    """An array, which may be left out, as passes of x's type take it."""
    return None if a is None else np.ascontiguousarray(a, x.dtype)


def _int64(target: Array) -> npt.NDArray[np.int64]:
    return np.ascontiguousarray(target, dtype=np.int64)
