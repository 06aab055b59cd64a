"""The oneDNN engine: float32 kernels of oneDNN and of our own C on NumPy memory, the NumPy reference for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lbpar.engine.base import LocalWindow, Window
from lbpar.engine.device import Array, Float64Array
from lbpar.engine.native.engine import Compiled
from lbpar.engine.native.passes import native
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.onednn import cdef, conv, pool, rows
from lbpar.engine.onednn.library import DnnlContext, Refused, dense, load
from lbpar.engine.onednn.memory import Arena
from lbpar.errors import EngineError

T = TypeVar("T")
_F32 = np.dtype(np.float32)
_COMPUTE = {"float32": cdef.F32, "bfloat16": cdef.BF16}
_LOWEST = np.finfo(np.float32).min
_MAX_PLANS = 4096
SMALL = 1 << 14
"""Elements up to which normalisation runs in NumPy: below, a call costs more than the arithmetic
(measured), and the reference's float64 sums come for free."""


class Primitives(NumpyEngine):
    """The part of the engine that runs oneDNN's primitives; cases that they do not take go to the reference.

    Primitives are created once per operation, shapes and geometry, and kept in ``_plans``.
    """

    _context: DnnlContext
    _compute: int
    arena: Arena

    def __init__(self, dtype: npt.DTypeLike, threads: int | None, compute: str) -> None:
        super().__init__(dtype, threads)
        if compute not in _COMPUTE:
            raise EngineError(f"onednn engine: compute={compute!r}, expected one of {', '.join(_COMPUTE)}")
        self.compute = compute
        self._compute = _COMPUTE[compute]
        self._context = DnnlContext(load(), threads)
        if self._compute != cdef.F32:
            self._probe()
        self._address = self._context.pointer
        self._plans: dict[Any, Any] = {}
        self.arena = Arena()

    def _probe(self) -> None:
        """Fail now, not in the first layer, where the CPU or the library has no such arithmetic."""
        shape = (1, 4, 4, 16), (16, 1, 1, 16), (LocalWindow(1), LocalWindow(1)), 1, (4, 4)
        try:
            conv.Convolution(self._context, "y", *shape, False, self._compute)
        except Refused as error:
            raise EngineError(
                f"engine.dtype: {self.compute} needs a processor with AVX-512 or AMX instructions for it, which this one "
                f"lacks ({error}); use float32"
            ) from error

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike | None = None) -> Array:
        return self.arena.empty(shape, self.dtype if dtype is None else dtype)

    def _plan(self, build: Callable[..., T], *key: Any) -> T | None:
        """What ``build`` makes of the context and the rest; None where oneDNN refuses the case. Either is kept."""
        try:
            found: T | None = self._plans[build, key]
        except KeyError:
            if len(self._plans) >= _MAX_PLANS:  # varying shapes must not grow memory without bound
                self._plans.clear()
            try:
                found = build(self._context, *key)
            except Refused:
                found = None
            self._plans[build, key] = found
        return found

    def _whole(self, part: Array, crop: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Array:
        """A gradient of which oneDNN computed the part ``crop``: zero elsewhere."""
        if crop is None:
            return part
        whole = self.zeros(shape, _F32)
        whole[crop] = part
        return whole

    # -- convolution -----------------------------------------------------------------------------------------------

    def conv_forward(
        self, x: Array, w: Array, b: Array | None, win: Window, groups: int, out_spatial: Sequence[int]
    ) -> Array:
        out, run = tuple(out_spatial), None
        if is_float32(x, w) and x.size and w.size and all(out):
            run = self._plan(conv.Convolution, "y", x.shape, w.shape, win, groups, out, b is not None, self._compute)
        if run is None:
            return super().conv_forward(x, w, b, win, groups, out_spatial)
        y = self.empty((x.shape[0], *out, w.shape[0]), _F32)
        run(_part(x, run.crop), dense(w), y, None if b is None else dense(b))
        return y

    def conv_backward_data(self, dy: Array, w: Array, win: Window, groups: int, in_spatial: Sequence[int]) -> Array:
        shape, run = (dy.shape[0], *in_spatial, w.shape[-1] * groups), None
        if is_float32(dy, w) and dy.size and w.size and all(in_spatial):
            out = dy.shape[1:-1]
            run = self._plan(conv.Convolution, "dx", shape, w.shape, win, groups, out, False, self._compute)
        if run is None:
            return super().conv_backward_data(dy, w, win, groups, in_spatial)
        dx = self.empty(run.x_shape, _F32)
        run(dx, dense(w), dense(dy))
        return self._whole(dx, run.crop, shape)

    def conv_backward_weights(self, x: Array, dy: Array, win: Window, groups: int, out: Array | None = None) -> Array:
        return self._conv_weights(x, dy, win, groups, out, bias=False)[0]

    def conv_backward_weights_bias(
        self, x: Array, dy: Array, win: Window, groups: int, out: Array | None = None
    ) -> tuple[Array, Array]:
        """`Engine.conv_backward_weights_bias` in one kernel; the bias' gradient is summed in float32.

        A kernel in bfloat16 would sum dy rounded, which spoils sums that nearly cancel, as in front of a norm: two kernels then.
        """
        dw, db = self._conv_weights(x, dy, win, groups, out, bias=self._compute == cdef.F32)
        return dw, self.bias_backward(dy) if db is None else db

    def _conv_weights(
        self, x: Array, dy: Array, win: Window, groups: int, out: Array | None, bias: bool
    ) -> tuple[Array, Array | None]:
        shape, run = (dy.shape[-1], *(dim.kernel for dim in win), x.shape[-1] // groups), None
        if is_float32(x, dy) and x.size and dy.size:
            key = x.shape, shape, win, groups, dy.shape[1:-1], bias, self._compute
            run = self._plan(conv.weights_gradient, *key)
        if run is None:
            return super().conv_backward_weights(x, dy, win, groups, out), None
        dw = self.empty(shape, _F32) if out is None else out
        db = self.empty(shape[:1], _F32) if bias else None
        run(_part(x, run.crop), dw, dense(dy), db)
        return dw, db

    def conv_relu_forward(
        self, x: Array, w: Array, b: Array | None, win: Window, groups: int, out_spatial: Sequence[int]
    ) -> Array:
        """`Engine.conv_relu_forward`, the latter in place. (oneDNN's fused relu would turn NaN into 0.)"""
        return self._rectify(self.conv_forward(x, w, b, win, groups, out_spatial))

    # -- linear ----------------------------------------------------------------------------------------------------

    def linear_forward(self, x: Array, w: Array, b: Array | None) -> Array:
        y = self._matmul(x, w.T, b)
        return super().linear_forward(x, w, b) if y is None else y

    def linear_backward_data(self, dy: Array, w: Array) -> Array:
        dx = self._matmul(dy, w)
        return super().linear_backward_data(dy, w) if dx is None else dx

    def linear_backward_weights(self, x: Array, dy: Array, out: Array | None = None) -> Array:
        dw = self._matmul(dy.T, x, out=out)
        return super().linear_backward_weights(x, dy, out) if dw is None else dw

    def _matmul(self, a: Array, b: Array, row: Array | None = None, out: Array | None = None) -> Array | None:
        """``a @ b + row``; of a and b, the transposed may be C-contiguous instead."""
        sizes = (*a.shape, b.shape[1])
        if not (is_float32(a, b) and all(sizes)):
            return None
        turned = not a.flags.c_contiguous and a.flags.f_contiguous, not b.flags.c_contiguous and b.flags.f_contiguous
        run = self._plan(rows.matmul, sizes, turned, row is not None, self._compute)
        if run is None:
            return None
        y = self.empty((sizes[0], sizes[2]), _F32) if out is None else out
        operands = dense(a.T if turned[0] else a), dense(b.T if turned[1] else b), y
        run(*map(self._address, operands if row is None else (*operands, dense(row))))
        return y

    # -- pooling ---------------------------------------------------------------------------------------------------

    def _pooling(
        self, algorithm: int, x_shape: tuple[int, ...], y_shape: tuple[int, ...], win: Window
    ) -> pool.Pooling | None:
        if not (math.prod(x_shape) and math.prod(y_shape)):
            return None
        return self._plan(pool.Pooling, algorithm, x_shape, y_shape, win)

    def max_pool_forward(self, x: Array, win: Window, out_spatial: Sequence[int]) -> tuple[Array, Array]:
        shape = (x.shape[0], *out_spatial, x.shape[-1])
        run = self._pooling(cdef.POOL_MAX, x.shape, shape, win) if is_float32(x) else None
        # oneDNN's maximum drops NaN; one more pass finds them.
        if run is None or np.isnan(x.max()):
            return super().max_pool_forward(x, win, out_spatial)
        y, arg = self.empty(shape, _F32), self.empty((run.workspace,), np.uint8)
        run.forward(*map(self._address, (_part(x, run.crop), y, arg)))
        if y.min() == _LOWEST:  # its maximum starts from there, not from -inf
            return super().max_pool_forward(x, win, out_spatial)
        return y, arg

    def max_pool_backward(self, dy: Array, arg: Array, win: Window, in_spatial: Sequence[int]) -> Array:
        if arg.dtype != np.uint8:  # the reference made it; its own are signed
            return super().max_pool_backward(dy, arg, win, in_spatial)
        shape = (dy.shape[0], *in_spatial, dy.shape[-1])
        run = self._pooling(cdef.POOL_MAX, shape, dy.shape, win)
        if run is None:
            raise EngineError("max_pool_backward: arg belongs to another pooling; pass what max_pool_forward returned")
        dx = self.empty(run.x_shape, _F32)
        run.backward(*map(self._address, (dense(dy), dx, arg)))
        return self._whole(dx, run.crop, shape)

    def avg_pool_forward(
        self, x: Array, win: Window, out_spatial: Sequence[int], divisors: Sequence[Float64Array]
    ) -> Array:
        shape = (x.shape[0], *out_spatial, x.shape[-1])
        run = self._pooling(cdef.POOL_AVG_WITH_PAD, x.shape, shape, win) if is_float32(x) else None
        if run is None:
            return super().avg_pool_forward(x, win, out_spatial, divisors)
        y = self.empty(shape, _F32)
        run.forward(self._address(_part(x, run.crop)), self._address(y))
        for factor in pool.avg_factors(win, divisors, y):
            y *= factor
        return y

    def avg_pool_backward(
        self, dy: Array, win: Window, in_spatial: Sequence[int], divisors: Sequence[Float64Array]
    ) -> Array:
        shape = (dy.shape[0], *in_spatial, dy.shape[-1])
        run = self._pooling(cdef.POOL_AVG_WITH_PAD, shape, dy.shape, win) if is_float32(dy) else None
        if run is None:
            return super().avg_pool_backward(dy, win, in_spatial, divisors)
        for factor in pool.avg_factors(win, divisors, dy):
            dy = dy * factor
        dx = self.empty(run.x_shape, _F32)
        run.backward(self._address(dense(dy)), self._address(dx))
        return self._whole(dx, run.crop, shape)

    # -- normalisation, where there is no compiler -----------------------------------------------------------------

    def _rows(self, build: Callable[..., T], arrays: Sequence[Array], *key: Any) -> T | None:
        """The plan of a kernel on the rows of large float32 arrays of one shape."""
        x = arrays[0]
        if not (is_float32(*arrays) and x.size > SMALL):
            return None
        return self._plan(build, x.size // x.shape[-1], x.shape[-1], *key)

    def norm_sums(self, x: Array, shift: Array) -> Float64Array:
        run = self._rows(rows.Moments, [x])
        return super().norm_sums(x, shift) if run is None else run(dense(x), np.asarray(shift, dtype=np.float64))

    def norm_apply(self, x: Array, mean: Array, invstd: Array, scale: Array | None, bias: Array | None) -> Array:
        y = self._affine(x, [], False, mean, invstd, scale, bias)
        return super().norm_apply(x, mean, invstd, scale, bias) if y is None else y

    def norm_relu_forward(
        self,
        x: Array,
        mean: Array,
        invstd: Array,
        scale: Array | None,
        bias: Array | None,
        residual: Array | None = None,
    ) -> Array:
        """`Engine.norm_relu_forward` in one kernel.

        oneDNN's relu turns NaN into 0, so statistics that are not finite (as any NaN or infinity in x makes them) take the
        unfused way; only a NaN that the statistics or the residual do not know of is hidden.
        """
        y = None
        if np.isfinite(mean + invstd).all():
            y = self._affine(x, [] if residual is None else [residual], True, mean, invstd, scale, bias)
        return super().norm_relu_forward(x, mean, invstd, scale, bias, residual) if y is None else y

    def _affine(
        self,
        x: Array,
        more: list[Array],
        relu: bool,
        mean: Array,
        invstd: Array,
        scale: Array | None,
        bias: Array | None,
    ) -> Array | None:
        run = self._rows(rows.Chain, [x, *more], "maA" if more else "ma", relu)
        if run is None:
            return None
        y = self.empty(x.shape, _F32)
        factor = invstd if scale is None else invstd * scale
        offset = rows.remainder(mean, factor) + (0 if bias is None else bias)
        run(dense(x), [dense(a) for a in more], (mean, factor, offset), y)
        return y

    def norm_backward_sums(self, x: Array, dy: Array, mean: Array, invstd: Array) -> Float64Array:
        run = self._rows(rows.BackwardSums, [x, dy])
        if run is None:
            return super().norm_backward_sums(x, dy, mean, invstd)
        sums = run(dense(x), dense(dy), mean)
        sums[1] *= invstd
        return sums

    def norm_backward_data(
        self, x: Array, dy: Array, mean: Array, invstd: Array, scale: Array | None, sums: Array, count: float
    ) -> Array:
        run = self._rows(rows.Chain, [x, dy], "mAam")
        if run is None:
            return super().norm_backward_data(x, dy, mean, invstd, scale, sums, count)
        dx = self.empty(x.shape, _F32)
        factor = invstd if scale is None else invstd * scale
        slope = -invstd * sums[1] / count
        offset = rows.remainder(mean, slope) - sums[0] / count
        run(dense(x), [dense(dy)], (mean, slope, offset, factor), dx)
        return dx


class OneDnnEngine(Compiled, Primitives):
    """Local kernels by oneDNN's C API and, where there is a C compiler, passes of our own.

    Both read and write NumPy memory in place. Scratch memory and the memory of outputs are reused, so an engine belongs to one compute
    thread at a time. A case that both refuse (float64, empty arrays, windows that see no input) runs in the reference.

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
        Primitives.__init__(self, dtype, threads, compute)
        self.native = native(self._context.max_threads())

    @property
    def library(self) -> str:
        """Version and path of the library in use, for reports."""
        library = self._context.library
        passes = "" if self.native is None else ", compiled passes"
        return f"oneDNN {'.'.join(map(str, library.version))} ({library.path}){passes}"


def is_float32(*arrays: Array) -> bool:
    """Whether all arrays are float32."""
    # No generator: it would take longer than the rest.
    for a in arrays:  # noqa: SIM110
        if a.dtype != _F32:
            return False
    return True


def _part(x: Array, crop: tuple[slice, ...] | None) -> Array:
    """What the windows of a kernel read of x, as oneDNN takes it."""
    return dense(x if crop is None else x[crop])
