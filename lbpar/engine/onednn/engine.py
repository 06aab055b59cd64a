"""The oneDNN engine: float32 kernels of oneDNN on NumPy memory, the NumPy reference for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lbpar.engine.base import LocalWindow, Window
from lbpar.engine.device import Array, Float64Array, Index
from lbpar.engine.native.losses import CompiledLosses
from lbpar.engine.native.passes import is_dense, native
from lbpar.engine.native.updates import CompiledUpdates
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.onednn import cdef, conv, pool, rows
from lbpar.engine.onednn.library import Context, Refused, load
from lbpar.engine.onednn.memory import Arena
from lbpar.errors import EngineError

T = TypeVar("T")
_F32 = np.dtype(np.float32)
_COMPUTE = {"float32": cdef.F32, "bfloat16": cdef.BF16}
_LOWEST = np.finfo(np.float32).min
_MAX_PLANS = 4096
_UNKNOWN: Any = object()
SMALL = 1 << 14
"""Elements up to which pointwise and normalisation kernels run in NumPy: below, a call costs more than the arithmetic
(measured), and the reference's float64 sums come for free."""


class OneDnnEngine(CompiledLosses, CompiledUpdates):
    """Local kernels by oneDNN's C API.

    oneDNN reads and writes NumPy memory in place. Primitives are created once per operation, shapes and geometry;
    scratch memory and the memory of outputs are reused, so an engine belongs to one compute thread at a time. A case
    that oneDNN refuses (float64, empty arrays, windows that see no input) runs in the reference.

    Parameters
    ----------
    dtype : numpy dtype or its name
    threads : int, optional
        OpenMP threads of kernels; None leaves OpenMP's default (OMP_NUM_THREADS).
    compute : "float32" or "bfloat16"
        Precision in which convolutions and matrix products of float32 arrays may multiply; sums stay float32.

    Raises
    ------
    EngineError
        No usable libdnnl.so.3 (the message names the wheel), or an unknown ``compute``.
    """

    name = "onednn"
    accelerated = frozenset({"float32"})

    def __init__(self, dtype: npt.DTypeLike = np.float32, threads: int | None = None, compute: str = "float32") -> None:
        super().__init__(dtype, threads)
        if compute not in _COMPUTE:
            raise EngineError(f"onednn engine: compute={compute!r}, expected one of {', '.join(_COMPUTE)}")
        self.compute = compute
        self._compute = _COMPUTE[compute]
        self._context = Context(load(), threads)
        if self._compute != cdef.F32:
            self._probe()
        self._address = self._context.pointer
        self._plans: dict[Any, Any] = {}
        self.arena = Arena()
        self.native = native(self._context.max_threads())

    def running(self) -> AbstractContextManager[None]:
        """Denormal numbers count as zero: gradients that fade away would make convolutions several times slower."""
        return nullcontext() if self.native is None or self.dtype != _F32 else self.native.flushing()

    @property
    def library(self) -> str:
        """Version and path of the library in use, for reports."""
        library = self._context.library
        passes = "" if self.native is None else ", compiled passes"
        return f"oneDNN {'.'.join(map(str, library.version))} ({library.path}){passes}"

    def _probe(self) -> None:
        """Fail now, not in the first layer, where the CPU or the library has no such arithmetic."""
        window = (LocalWindow(1), LocalWindow(1))
        geometry = conv.Geometry.of(window, (4, 4), (4, 4))
        try:
            conv.Forward(self._context, (1, 4, 4, 16), (16, 1, 1, 16), (1, 4, 4, 16), geometry, 1, False, self._compute)
        except Refused as error:
            raise EngineError(
                f"engine.dtype: {self.compute} needs a processor with AVX-512 or AMX instructions for it, which this one "
                f"lacks ({error}); use float32"
            ) from error

    # -- plumbing --------------------------------------------------------------------------------------------------

    def _plan(self, key: Any, build: Callable[[], T]) -> T | None:
        """The cached primitive(s) for ``key``; None, cached too, where oneDNN refuses the case."""
        try:
            found: T | None = self._plans[key]
        except KeyError:
            if len(self._plans) >= _MAX_PLANS:  # varying shapes must not grow memory without bound
                self._plans.clear()
            try:
                found = build()
            except Refused:
                found = None
            self._plans[key] = found
        return found

    def _new(self, shape: Sequence[int], dtype: npt.DTypeLike = _F32) -> Array:
        return self.arena.empty(shape, dtype)

    # -- convolution -----------------------------------------------------------------------------------------------

    def conv_forward(
        self, x: Array, w: Array, b: Array | None, win: Window, groups: int, out_spatial: Sequence[int]
    ) -> Array:
        y = self._conv(x, w, b, win, groups, tuple(out_spatial))
        return super().conv_forward(x, w, b, win, groups, out_spatial) if y is None else y

    def _conv(
        self, x: Array, w: Array, b: Array | None, win: Window, groups: int, out: tuple[int, ...]
    ) -> Array | None:
        key = ("conv", x.shape, w.shape, win, groups, out, b is None, x.dtype, w.dtype)
        found = self._plans.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            found = self._plan_conv(key, x, w, b, win, groups, out)
        if found is None:
            return None
        run, crop = found
        y = self._new((x.shape[0], *out, w.shape[0]))
        run(_dense(x if crop is None else x[crop]), _dense(w), None if b is None else _dense(b), y)
        return y

    def _plan_conv(
        self, key: Any, x: Array, w: Array, b: Array | None, win: Window, groups: int, out: tuple[int, ...]
    ) -> Any:
        if not (is_float32(x, w) and x.size and w.size and all(out)):
            return None
        y_shape = (x.shape[0], *out, w.shape[0])

        def build() -> tuple[conv.Forward, tuple[slice, ...] | None]:
            geometry = conv.Geometry.of(win, x.shape[1:-1], out)
            x_shape = (x.shape[0], *geometry.spatial, x.shape[-1])
            compute = conv.safe_type("y", geometry, w.shape[-1], self._compute)
            plan = conv.Forward(self._context, x_shape, w.shape, y_shape, geometry, groups, b is not None, compute)
            return plan, geometry.crop

        return self._plan(key, build)

    def conv_backward_data(self, dy: Array, w: Array, win: Window, groups: int, in_spatial: Sequence[int]) -> Array:
        inner = tuple(in_spatial)
        key = ("conv_data", dy.shape, w.shape, win, groups, inner, dy.dtype, w.dtype)
        found = self._plans.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            found = self._plan_conv_data(key, dy, w, win, groups, inner)
        if found is None:
            return super().conv_backward_data(dy, w, win, groups, in_spatial)
        run, crop, x_shape = found
        dx = self._new(x_shape)
        run(_dense(dy), _dense(w), dx)
        return dx if crop is None else self._embed(dx, crop, (dy.shape[0], *inner, x_shape[-1]))

    def _plan_conv_data(self, key: Any, dy: Array, w: Array, win: Window, groups: int, inner: tuple[int, ...]) -> Any:
        if not (is_float32(dy, w) and dy.size and w.size and all(inner)):
            return None
        channels = w.shape[-1] * groups

        def build() -> tuple[conv.BackwardData, tuple[slice, ...] | None, tuple[int, ...]]:
            geometry = conv.Geometry.of(win, inner, dy.shape[1:-1])
            x_shape = (dy.shape[0], *geometry.spatial, channels)
            compute = conv.safe_type("dx", geometry, w.shape[-1], self._compute)
            plan = conv.BackwardData(self._context, x_shape, w.shape, dy.shape, geometry, groups, compute)
            return plan, geometry.crop, x_shape

        return self._plan(key, build)

    def conv_backward_weights(self, x: Array, dy: Array, win: Window, groups: int, out: Array | None = None) -> Array:
        return self._conv_weights(x, dy, win, groups, out, bias=False)[0]

    def _conv_weights(
        self, x: Array, dy: Array, win: Window, groups: int, out: Array | None, bias: bool
    ) -> tuple[Array, Array | None]:
        key = ("conv_weights", x.shape, dy.shape, win, groups, bias, x.dtype, dy.dtype)
        found = self._plans.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            found = self._plan_conv_weights(key, x, dy, win, groups, bias)
        if found is None:
            return super().conv_backward_weights(x, dy, win, groups), None
        run, crop, w_shape = found
        dw = self._new(w_shape) if out is None else out
        db = self._new(w_shape[:1]) if bias else None
        run(_dense(x if crop is None else x[crop]), _dense(dy), dw, db)
        return dw, db

    def _plan_conv_weights(self, key: Any, x: Array, dy: Array, win: Window, groups: int, bias: bool) -> Any:
        if not (is_float32(x, dy) and x.size and dy.size):
            return None
        w_shape = (dy.shape[-1], *(dim.kernel for dim in win), x.shape[-1] // groups)

        def build() -> tuple[Any, tuple[slice, ...] | None, tuple[int, ...]]:
            geometry = conv.Geometry.of(win, x.shape[1:-1], dy.shape[1:-1])
            rows = x.size // x.shape[-1]
            single = geometry.pointwise and all(dim.kernel == 1 for dim in win) and groups == 1
            if single and not bias and rows <= conv.FEW_ROWS and self._compute == cdef.F32:
                return conv.PointwiseWeights(self._context, rows, x.shape[-1], dy.shape[-1]), None, w_shape
            x_shape = (x.shape[0], *geometry.spatial, x.shape[-1])
            compute = conv.safe_type("dw", geometry, w_shape[-1], self._compute)
            plan = conv.BackwardWeights(self._context, x_shape, w_shape, dy.shape, geometry, groups, bias, compute)
            return plan, geometry.crop, w_shape

        return self._plan(key, build)

    def _embed(self, part: Array, crop: tuple[slice, ...], shape: tuple[int, ...]) -> Array:
        whole = self._new(shape)
        whole.fill(0)
        whole[crop] = part
        return whole

    def bias_backward(self, dy: Array) -> Array:
        if self.native is not None and is_dense(dy):
            return self.native.sum_rows(dy)
        return super().bias_backward(dy)

    # -- linear ----------------------------------------------------------------------------------------------------

    def linear_forward(self, x: Array, w: Array, b: Array | None) -> Array:
        y = self._matmul(x, w, (x.shape[0], x.shape[1], w.shape[0]), (x.shape[1], 1), (1, w.shape[1]), b)
        return super().linear_forward(x, w, b) if y is None else y

    def linear_backward_data(self, dy: Array, w: Array) -> Array:
        dx = self._matmul(dy, w, (dy.shape[0], dy.shape[1], w.shape[1]), (dy.shape[1], 1), (w.shape[1], 1), None)
        return super().linear_backward_data(dy, w) if dx is None else dx

    def linear_backward_weights(self, x: Array, dy: Array, out: Array | None = None) -> Array:
        sizes = (dy.shape[1], dy.shape[0], x.shape[1])
        dw = self._matmul(dy, x, sizes, (1, dy.shape[1]), (x.shape[1], 1), None, out)
        return super().linear_backward_weights(x, dy, out) if dw is None else dw

    def _matmul(
        self,
        left: Array,
        right: Array,
        sizes: tuple[int, int, int],
        left_strides: tuple[int, int],
        right_strides: tuple[int, int],
        row: Array | None,
        out: Array | None = None,
    ) -> Array | None:
        if not (is_float32(left, right) and all(sizes)):
            return None
        key = ("matmul", sizes, left_strides, right_strides, row is None)
        run = self._plan(
            key,
            lambda: pool.matmul(
                self._context, sizes, left_strides, right_strides, row is not None, int(self._compute == cdef.BF16)
            ),
        )
        if run is None:
            return None
        y = self._new((sizes[0], sizes[2])) if out is None else out
        a = self._address
        extra = () if row is None else (a(_dense(row)),)
        run(a(_dense(left)), a(_dense(right)), a(y), *extra)
        return y

    # -- pooling ---------------------------------------------------------------------------------------------------

    def _pooling(
        self, algorithm: int, x_shape: tuple[int, ...], y_shape: tuple[int, ...], win: Window
    ) -> tuple[pool.Pooling, tuple[slice, ...] | None, tuple[int, ...]] | None:
        if not (math.prod(x_shape) and math.prod(y_shape)):
            return None

        def build() -> tuple[pool.Pooling, tuple[slice, ...] | None, tuple[int, ...]]:
            geometry = conv.Geometry.of(win, x_shape[1:-1], y_shape[1:-1])
            cropped = (x_shape[0], *geometry.spatial, x_shape[-1])
            plan = pool.Pooling(self._context, algorithm, cropped, y_shape, win, x_shape[1:-1], geometry)
            return plan, geometry.crop, cropped

        return self._plan(("pool", algorithm, x_shape, y_shape, win), build)

    def max_pool_forward(self, x: Array, win: Window, out_spatial: Sequence[int]) -> tuple[Array, Array]:
        y_shape = (x.shape[0], *out_spatial, x.shape[-1])
        found = self._pooling(cdef.POOL_MAX, x.shape, y_shape, win) if is_float32(x) else None
        # oneDNN's maximum drops NaN; one more pass finds them.
        if found is None or np.isnan(x.max()):
            return super().max_pool_forward(x, win, out_spatial)
        plan, crop, _ = found
        y, arg = self._new(y_shape), self.arena.empty((plan.workspace,), np.uint8)
        a = self._address
        plan.forward(a(_dense(x if crop is None else x[crop])), a(y), a(arg))
        if y.min() == _LOWEST:  # its maximum starts from there, not from -inf
            return super().max_pool_forward(x, win, out_spatial)
        return y, arg

    def max_pool_backward(self, dy: Array, arg: Array, win: Window, in_spatial: Sequence[int]) -> Array:
        if arg.dtype != np.uint8:  # the reference made it; its own are signed
            return super().max_pool_backward(dy, arg, win, in_spatial)
        x_shape = (dy.shape[0], *in_spatial, dy.shape[-1])
        found = self._pooling(cdef.POOL_MAX, x_shape, dy.shape, win)
        if found is None:
            raise EngineError("max_pool_backward: arg belongs to another pooling; pass what max_pool_forward returned")
        plan, crop, cropped = found
        dx = self._new(cropped)
        a = self._address
        plan.backward(a(_dense(dy)), a(dx), a(arg))
        return dx if crop is None else self._embed(dx, crop, x_shape)

    def avg_pool_forward(
        self, x: Array, win: Window, out_spatial: Sequence[int], divisors: Sequence[Float64Array]
    ) -> Array:
        y_shape = (x.shape[0], *out_spatial, x.shape[-1])
        found = self._pooling(cdef.POOL_AVG_WITH_PAD, x.shape, y_shape, win) if is_float32(x) else None
        if found is None:
            return super().avg_pool_forward(x, win, out_spatial, divisors)
        plan, crop, _ = found
        y = self._new(y_shape)
        plan.forward(self._address(_dense(x if crop is None else x[crop])), self._address(y))
        for factor in pool.avg_factors(win, divisors) or ():
            y *= factor
        return y

    def avg_pool_backward(
        self, dy: Array, win: Window, in_spatial: Sequence[int], divisors: Sequence[Float64Array]
    ) -> Array:
        x_shape = (dy.shape[0], *in_spatial, dy.shape[-1])
        found = self._pooling(cdef.POOL_AVG_WITH_PAD, x_shape, dy.shape, win) if is_float32(dy) else None
        if found is None:
            return super().avg_pool_backward(dy, win, in_spatial, divisors)
        plan, crop, cropped = found
        for factor in pool.avg_factors(win, divisors) or ():
            dy = dy * factor
        dx = self._new(cropped)
        plan.backward(self._address(_dense(dy)), self._address(dx))
        return dx if crop is None else self._embed(dx, crop, x_shape)

    # -- normalisation ---------------------------------------------------------------------------------------------

    def norm_sums(self, x: Array, shift: Array) -> Float64Array:
        if self.native is not None and is_dense(x):
            return self.native.norm_sums(x, shift)
        run = None
        if is_float32(x) and x.size > SMALL:
            channels = x.shape[-1]
            n = x.size // channels
            run = self._plan(
                ("moments", n, channels),
                lambda: rows.Moments(self._context, rows.Tiling(self._context, n, channels)),
            )
        if run is None:
            return super().norm_sums(x, shift)
        return run(_dense(x), np.asarray(shift, dtype=np.float64))

    def norm_moments(self, sums: Array, shift: Array, count: float, eps: float) -> Float64Array:
        if self.native is None:
            return super().norm_moments(sums, shift, count, eps)
        return self.native.norm_moments(sums, shift, count, eps)

    def norm_running(self, sums: Array, mean: Array, var: Array, momentum: float, count: int) -> None:
        native = self.native
        if native is None or not mean.dtype == var.dtype == sums.dtype == np.float64:
            super().norm_running(sums, mean, var, momentum, count)
        else:
            native.norm_running(sums, mean, var, momentum, count)

    def norm_apply(self, x: Array, mean: Array, invstd: Array, scale: Array | None, bias: Array | None) -> Array:
        y = self._norm_apply(x, mean, invstd, scale, bias, relu=False)
        return super().norm_apply(x, mean, invstd, scale, bias) if y is None else y

    def _norm_apply(
        self, x: Array, mean: Array, invstd: Array, scale: Array | None, bias: Array | None, relu: bool
    ) -> Array | None:
        if self.native is not None and is_dense(x):
            y = self._new(x.shape)
            self.native.norm_apply(x, y, mean, invstd, scale, bias, None, relu)
            return y
        if not (is_float32(x) and x.size > SMALL) or (relu and not np.isfinite(mean + invstd).all()):
            return None
        columns = x.shape[-1]
        count = x.size // columns
        run = self._plan(
            ("norm_apply", count, columns, relu), lambda: rows.norm_apply(self._context, count, columns, relu)
        )
        if run is None:
            return None
        y = self._new(x.shape)
        factor = invstd if scale is None else invstd * scale
        offset = rows.remainder(mean, factor) + (0 if bias is None else bias)
        vectors = [rows.vector32(v, columns, 1) for v in (mean, None, factor, offset)]
        a = self._address
        run(a(_dense(x)), a(y), *(a(v) for v in vectors))
        return y

    def _norm_add_relu(
        self, x: Array, mean: Array, invstd: Array, scale: Array | None, bias: Array | None, residual: Array
    ) -> Array | None:
        if self.native is not None and is_dense(x, residual):
            y = self._new(x.shape)
            self.native.norm_apply(x, y, mean, invstd, scale, bias, residual, True)
            return y
        if not (is_float32(x, residual) and x.size > SMALL and np.isfinite(mean + invstd).all()):
            return None
        columns = x.shape[-1]
        count = x.size // columns
        chain = self._plan(("norm_add_relu", count, columns), lambda: rows.norm_add_relu(self._context, count, columns))
        if chain is None:
            return None
        y = self._new(x.shape)
        factor = invstd if scale is None else invstd * scale
        offset = rows.remainder(mean, factor) + (0 if bias is None else bias)
        chain(_dense(x), y, [_dense(residual)], (mean, factor, offset))
        return y

    def norm_backward_sums(self, x: Array, dy: Array, mean: Array, invstd: Array) -> Float64Array:
        if self.native is not None and is_dense(x, dy):
            return self.native.norm_backward_sums(x, dy, mean, invstd)
        sums = self._backward_sums(x, dy, mean, None, None) if is_float32(x, dy) and x.size > SMALL else None
        if sums is None:
            return super().norm_backward_sums(x, dy, mean, invstd)
        sums[1] *= invstd
        return sums

    def _backward_sums(
        self,
        x: Array,
        dy: Array,
        mean: Array,
        y: Array | None,
        masked: Array | None,
    ) -> Float64Array | None:
        """sum(dy), sum(dy * (x - mean)); with y, dy is masked first and stored in ``masked``."""
        channels = x.shape[-1]
        n = x.size // channels
        relu = y is not None
        run = self._plan(
            ("backward_sums", n, channels, relu),
            lambda: rows.BackwardSums(self._context, rows.Tiling(self._context, n, channels), relu),
        )
        if run is None:
            return None
        return run(_dense(x), _dense(dy), mean, None if y is None else _dense(y), masked)

    def norm_backward_data(
        self, x: Array, dy: Array, mean: Array, invstd: Array, scale: Array | None, sums: Array, count: float
    ) -> Array:
        if self.native is not None and is_dense(x, dy):
            dx = self._new(x.shape)
            self.native.norm_backward_data(x, dy, dx, mean, invstd, scale, sums, count)
            return dx
        chain = None
        if is_float32(x, dy) and x.size > SMALL:
            columns = x.shape[-1]
            n = x.size // columns
            chain = self._plan(("norm_data", n, columns), lambda: rows.norm_backward_data(self._context, n, columns))
        if chain is None:
            return super().norm_backward_data(x, dy, mean, invstd, scale, sums, count)
        dx = self._new(x.shape)
        factor = invstd if scale is None else invstd * scale
        slope = -invstd * sums[1] / count
        chain(_dense(x), dx, [_dense(dy)], (mean, slope, rows.remainder(mean, slope) - sums[0] / count, factor))
        return dx

    # -- pointwise -------------------------------------------------------------------------------------------------

    def _forward(self, algorithm: int, x: Array, alpha: float) -> Array | None:
        if not (is_float32(x) and x.size > SMALL):
            return None
        shape = (x.size,)
        run = self._plan(
            ("eltwise", algorithm, shape, alpha), lambda: rows.eltwise_forward(self._context, algorithm, shape, alpha)
        )
        if run is None:
            return None
        y = self._new(x.shape)
        run(self._address(_dense(x)), self._address(y))
        return y

    def _backward(self, algorithm: int, y: Array, dy: Array, alpha: float) -> Array | None:
        if not (is_float32(y, dy) and y.size > SMALL):
            return None
        shape = (y.size,)
        run = self._plan(
            ("eltwise_backward", algorithm, shape, alpha),
            lambda: rows.eltwise_backward(self._context, algorithm, shape, alpha),
        )
        if run is None:
            return None
        dx = self._new(dy.shape)
        a = self._address
        run(a(_dense(dy)), a(_dense(y)), a(dx))
        return dx

    def relu_forward(self, x: Array) -> Array:
        return self._relu(x, None)

    def _relu(self, x: Array, y: Array | None) -> Array:
        """max(x, 0) in y (which may be x), or in a new array."""
        if self.native is None or not is_dense(x):
            return np.maximum(x, 0, out=y)
        out = self._new(x.shape) if y is None else y
        self.native.relu(x, out)
        return out

    def relu_backward(self, y: Array, dy: Array) -> Array:
        if self.native is not None and is_dense(y, dy):
            out = self._new(dy.shape)
            self.native.relu_backward(y, dy, out)
            return out
        dx = self._backward(cdef.RELU_FROM_DST, y, dy, 0.0)
        # oneDNN multiplies by 0 where relu is shut, which turns an infinite dy into NaN.
        return super().relu_backward(y, dy) if dx is None or np.isnan(dx.min()) else dx

    def leaky_relu_forward(self, x: Array, slope: float) -> Array:
        y = self._forward(cdef.RELU_FROM_DST, x, float(slope)) if slope >= 0 else None
        return super().leaky_relu_forward(x, slope) if y is None else y

    def leaky_relu_backward(self, y: Array, dy: Array, slope: float) -> Array:
        dx = self._backward(cdef.RELU_FROM_DST, y, dy, float(slope)) if slope >= 0 else None
        return super().leaky_relu_backward(y, dy, slope) if dx is None else dx

    def sigmoid_forward(self, x: Array) -> Array:
        y = self._forward(cdef.LOGISTIC_FROM_DST, x, 0.0)
        return super().sigmoid_forward(x) if y is None else y

    def sigmoid_backward(self, y: Array, dy: Array) -> Array:
        dx = self._backward(cdef.LOGISTIC_FROM_DST, y, dy, 0.0)
        return super().sigmoid_backward(y, dy) if dx is None else dx

    def add(self, xs: Sequence[Array]) -> Array:
        y = self._binary(cdef.BINARY_ADD, xs)
        return super().add(xs) if y is None else y

    def multiply(self, xs: Sequence[Array]) -> Array:
        y = self._binary(cdef.BINARY_MUL, xs)
        return super().multiply(xs) if y is None else y

    def _binary(self, algorithm: int, xs: Sequence[Array]) -> Array | None:
        if len(xs) < 2 or not (is_float32(*xs) and xs[0].size > SMALL):
            return None
        shape = (xs[0].size,)
        more = len(xs) - 2
        run = self._plan(("binary", algorithm, shape, more), lambda: rows.binary(self._context, algorithm, shape, more))
        if run is None:
            return None
        y = self._new(xs[0].shape)
        first, second, *rest = (self._address(_dense(x)) for x in xs)
        run(first, second, self._address(y), *rest)
        return y

    def concat(self, xs: Sequence[Array]) -> Array:
        if not is_float32(*xs):
            return super().concat(xs)
        y = self._new((*xs[0].shape[:-1], sum(x.shape[-1] for x in xs)))
        if self.native is not None and all(is_dense(x) for x in xs):
            at = 0
            for x in xs:
                self.native.copy_columns(x, 0, y, at, x.shape[-1])
                at += x.shape[-1]
            return y
        return np.concatenate(xs, axis=-1, out=y)

    # -- fused kernels ----------------------------------------------------------------------------------------------

    def conv_relu_forward(
        self, x: Array, w: Array, b: Array | None, win: Window, groups: int, out_spatial: Sequence[int]
    ) -> Array:
        """``relu_forward(conv_forward(...))``, the former in place. (oneDNN's fused relu would turn NaN into 0.)"""
        y = self._conv(x, w, b, win, groups, tuple(out_spatial))
        if y is None:
            return self.relu_forward(NumpyEngine.conv_forward(x, w, b, win, groups, out_spatial))
        return self._relu(y, y)

    def conv_backward_weights_bias(
        self, x: Array, dy: Array, win: Window, groups: int, out: Array | None = None
    ) -> tuple[Array, Array]:
        """``conv_backward_weights(...)`` and ``bias_backward(dy)`` in one kernel; the latter is summed in float32.

        A kernel in bfloat16 would sum dy rounded, which spoils sums that nearly cancel, as in front of a norm: two kernels then.
        """
        dw, db = self._conv_weights(x, dy, win, groups, out, bias=self._compute == cdef.F32)
        return dw, self.bias_backward(dy) if db is None else db

    def norm_relu_forward(
        self,
        x: Array,
        mean: Array,
        invstd: Array,
        scale: Array | None,
        bias: Array | None,
        residual: Array | None = None,
    ) -> Array:
        """``relu_forward(add([norm_apply(...), residual]))`` in one kernel, the sum only where residual is given.

        oneDNN's relu turns NaN into 0, so statistics that are not finite (as any NaN or infinity in x makes them) take the
        unfused way; only a NaN that the statistics or the residual do not know of is hidden.
        """
        if residual is None:
            fused = self._norm_apply(x, mean, invstd, scale, bias, relu=True)
        else:
            fused = self._norm_add_relu(x, mean, invstd, scale, bias, residual)
        if fused is not None:
            return fused
        y = self.norm_apply(x, mean, invstd, scale, bias)
        return self.relu_forward(y if residual is None else self.add([y, residual]))

    def norm_relu_backward_sums(
        self, x: Array, y: Array, dy: Array, mean: Array, invstd: Array, more: Array | None = None
    ) -> tuple[Float64Array, Array]:
        """``norm_backward_sums(x, g, ...)`` with ``g = relu_backward(y, dy [+ more])``, and g, in one pass over memory.

        g is also the gradient of `norm_relu_forward`'s residual; `norm_backward_data` takes it as dy.
        """
        if self.native is not None and is_dense(x, y, dy) and (more is None or is_dense(more)):
            masked = self._new(dy.shape)
            return self.native.norm_backward_sums(x, dy, mean, invstd, more, y, masked), masked
        if more is not None:
            dy = self.add([dy, more])
        if is_float32(x, y, dy) and x.size > SMALL:
            masked = self._new(dy.shape)
            sums = self._backward_sums(x, dy, mean, y, masked)
            # An infinite dy where relu is shut becomes NaN in oneDNN, 0 in the reference.
            if sums is not None and not np.isnan(sums).any():
                sums[1] *= invstd
                return sums, masked
        masked = self.relu_backward(y, dy)
        return self.norm_backward_sums(x, masked, mean, invstd), masked

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
        """`norm_backward_data` plus the first channels of ``more``, in one pass over memory."""
        if self.native is None or not is_dense(x, dy, more):
            return super().norm_backward_data_add(x, dy, mean, invstd, scale, sums, count, more)
        dx = self._new(x.shape)
        self.native.norm_backward_data(x, dy, dx, mean, invstd, scale, sums, count, more)
        return dx

    # -- device side -----------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike | None = None) -> Array:
        return self.arena.empty(shape, self.dtype if dtype is None else dtype)

    def pack(self, a: Array, index: Index, out: Array | None = None) -> Array:
        if self.native is None or not is_dense(a) or any(not isinstance(i, slice) for i in index):
            return super().pack(a, index, out)
        part = a[tuple(index)]
        if part.shape[:-1] != a.shape[:-1] or index[-1].step not in (None, 1) or not part.size:
            return super().pack(a, index, out)
        target = self._new(part.shape) if out is None else out.reshape(part.shape)
        self.native.copy_columns(a, index[-1].indices(a.shape[-1])[0], target, 0, part.shape[-1])
        return target if out is None else out


def is_float32(*arrays: Array) -> bool:
    """Whether all arrays are float32."""
    return all(a.dtype == _F32 for a in arrays)


def _dense(a: Array) -> Array:
    """``a``, copied where it is not C-contiguous float32: oneDNN gets an address and believes it."""
    if a.dtype == _F32 and a.flags.c_contiguous:
        return a
    return np.ascontiguousarray(a, dtype=_F32)
