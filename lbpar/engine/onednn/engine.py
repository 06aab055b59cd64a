"""The oneDNN engine: kernels of oneDNN and of our own C on NumPy memory, the NumPy reference for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lbpar.engine.base import LocalWindow, Window
from lbpar.engine.convolution import is_pointwise
from lbpar.engine.device import Array, Float64Array
from lbpar.engine.half import Halves, bits
from lbpar.engine.native.engine import Compiled
from lbpar.engine.native.passes import native
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.onednn import cdef, conv, pool, rows
from lbpar.engine.onednn.library import DnnlContext, Refused, dense, load
from lbpar.engine.onednn.memory import Arena
from lbpar.engine.windows import read_by, reading
from lbpar.errors import EngineError

T = TypeVar("T")
_F32 = np.dtype(np.float32)
_COMPUTE = ("float32", "bfloat16")
_LOWEST = np.finfo(np.float32).min
_LOWEST_BITS, _NAN_BITS = 0xFF7F, (0x7F80, 0xFF80)
# Of bfloat16: the lowest number, or minus infinity, as an integer without sign is at least the first; NaN is above the second, as an
# integer with sign, or above the third, without.
_MAX_PLANS = 4096
SMALL = 1 << 14
"""Elements up to which normalisation runs in NumPy: below, a call costs more than the arithmetic
(measured), and the reference's float64 sums come for free."""


SLAB = {cdef.BF16: 1 << 25, cdef.F32: 1 << 28}
"""Bytes of scratch memory above which a convolution is computed slab by slab: bfloat16 is arranged for its kernels, and AVX2 computes weight
gradients of padded volumes of float32 from a copy of the whole input (slabs take up to 1.6 times as long, measured)."""


class Primitives(Halves, NumpyEngine):
    """The part of the engine that runs oneDNN's primitives; cases that they do not take go to the reference.

    Primitives are created once per operation, types, shapes and geometry, and kept in ``_plans``.
    """

    _context: DnnlContext
    arena: Arena

    def __init__(self, dtype: npt.DTypeLike, threads: int | None, compute: str) -> None:
        super().__init__(dtype, threads)
        if compute not in _COMPUTE:
            raise EngineError(f"onednn engine: compute={compute!r}, expected one of {', '.join(_COMPUTE)}")
        self.compute = compute
        self._context = DnnlContext(load(), threads)
        self.volume_copies = not self._context.lib.dnnl_get_effective_cpu_isa() & cdef.AVX512
        if compute != "float32":
            self._probe()
            self._hold(compute)
        self._address = self._context.pointer
        self._plans: dict[Any, Any] = {}
        self.arena = Arena()

    def _probe(self) -> None:
        """Fail now, not in the first layer, where the CPU or the library has no such arithmetic."""
        shape = (1, 4, 4, 16), (16, 1, 1, 16), (LocalWindow(1), LocalWindow(1)), 1, (4, 4)
        try:
            conv.Convolution(self._context, "y", *shape, False, cdef.BF16)
        except Refused as error:
            raise EngineError(
                f"engine.dtype: {self.compute} needs a processor with AVX-512 or AMX instructions for it, which this one "
                f"lacks ({error}); use float32"
            ) from error

    def _stored(self, *arrays: Array) -> int | None:
        """The type of activations in oneDNN's terms, if all have it and primitives take it."""
        dtype = arrays[0].dtype
        if any(a.dtype != dtype for a in arrays[1:]):
            return None
        return cdef.F32 if dtype == _F32 else cdef.BF16 if self._is_half(arrays[0]) else None

    def _weights(self, w: Array, stored: int) -> Array | None:
        """Weights that multiply activations of a type; None where they do not."""
        if stored == cdef.BF16:
            return dense(self._rounded(w))
        return dense(w) if w.dtype == _F32 else None

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
        whole = self.zeros(shape, part.dtype)
        whole[crop] = part
        return whole

    # -- convolution -----------------------------------------------------------------------------------------------

    def conv_forward(
        self, x: Array, w: Array, b: Array | None, win: Window, groups: int, out_spatial: Sequence[int]
    ) -> Array:
        out, stored = tuple(out_spatial), self._stored(x)
        weights = None if stored is None else self._weights(w, stored)
        if stored is None or weights is None or not (x.size and w.size and all(out)):
            return super().conv_forward(x, w, b, win, groups, out_spatial)
        if stored == cdef.BF16 and groups == 1 and len(win) == 3 and is_pointwise(win, x.shape[1:-1], out):
            # What primitives get wrong of such volumes is right as a product of matrices.
            y = self.linear_forward(x.reshape(-1, x.shape[-1]), w.reshape(len(w), -1), b)
            return y.reshape(*x.shape[:-1], len(w))
        run = self._plan(conv.Convolution, "y", x.shape, w.shape, win, groups, out, b is not None, stored)
        if run is None:
            return super().conv_forward(x, w, b, win, groups, out_spatial)
        y = self.empty((x.shape[0], *out, w.shape[0]), x.dtype)
        if run.staged > SLAB[stored] and out[0] > 1:
            for lo, hi in _slabs(out[0], run.staged, SLAB[stored]):
                first, last = reading(win[0], lo, hi, x.shape[1])
                moved = (replace(win[0], pad=win[0].pad - lo * win[0].stride + first), *win[1:])
                y[:, lo:hi] = self.conv_forward(x[:, first:last], w, b, moved, groups, (hi - lo, *out[1:]))
            return y
        run(_part(x, run.crop), weights, bits(y), None if b is None else dense(b))
        return y

    def conv_backward_data(self, dy: Array, w: Array, win: Window, groups: int, in_spatial: Sequence[int]) -> Array:
        shape, stored = (dy.shape[0], *in_spatial, w.shape[-1] * groups), self._stored(dy)
        weights = None if stored is None else self._weights(w, stored)
        if stored is None or weights is None or not (dy.size and w.size and all(in_spatial)):
            return super().conv_backward_data(dy, w, win, groups, in_spatial)
        if stored == cdef.BF16 and groups == 1 and len(win) == 3 and is_pointwise(win, in_spatial, dy.shape[1:-1]):
            return self.linear_backward_data(dy.reshape(-1, len(w)), w.reshape(len(w), -1)).reshape(shape)
        run = self._plan(conv.Convolution, "dx", shape, w.shape, win, groups, dy.shape[1:-1], False, stored)
        if run is None:
            return super().conv_backward_data(dy, w, win, groups, in_spatial)
        if run.staged > SLAB[stored] and shape[1] > 1:
            dx = self.empty(shape, dy.dtype)
            for lo, hi in _slabs(shape[1], run.staged, SLAB[stored]):
                first, last = read_by(win[0], lo, hi, dy.shape[1])
                moved = (replace(win[0], pad=win[0].pad + lo - first * win[0].stride), *win[1:])
                dx[:, lo:hi] = self.conv_backward_data(dy[:, first:last], w, moved, groups, (hi - lo, *shape[2:-1]))
            return dx
        dx = self.empty(run.x_shape, dy.dtype)
        run(bits(dx), weights, dense(dy))
        return self._whole(dx, run.crop, shape)

    def conv_backward_weights(self, x: Array, dy: Array, win: Window, groups: int, out: Array | None = None) -> Array:
        return self._conv_weights(x, dy, win, groups, out, bias=False)[0]

    def conv_backward_weights_bias(
        self, x: Array, dy: Array, win: Window, groups: int, out: Array | None = None
    ) -> tuple[Array, Array]:
        """`Engine.conv_backward_weights_bias` in one kernel; the bias' gradient is summed in float32.

        Of bfloat16 it is summed by a pass of its own, in float64.
        """
        dw, db = self._conv_weights(x, dy, win, groups, out, bias=x.dtype == _F32)
        return dw, self.bias_backward(dy) if db is None else db

    def _conv_weights(
        self, x: Array, dy: Array, win: Window, groups: int, out: Array | None, bias: bool
    ) -> tuple[Array, Array | None]:
        shape, run = (dy.shape[-1], *(dim.kernel for dim in win), x.shape[-1] // groups), None
        stored = self._stored(x, dy)
        if stored is not None and x.size and dy.size:
            run = self._plan(conv.weights_gradient, x.shape, shape, win, groups, dy.shape[1:-1], bias, stored)
        if run is None:
            return super().conv_backward_weights(x, dy, win, groups, out), None
        if stored is not None and run.staged > SLAB[stored] and dy.shape[1] > 1:
            total: Array | None = None
            for lo, hi in _slabs(dy.shape[1], run.staged, SLAB[stored]):
                first, last = reading(win[0], lo, hi, x.shape[1])
                moved = (replace(win[0], pad=win[0].pad - lo * win[0].stride + first), *win[1:])
                into = out if total is None else None
                part = self._conv_weights(x[:, first:last], dy[:, lo:hi], moved, groups, into, bias)[0]
                total = part if total is None else np.add(total, part, out=total)
            assert total is not None
            return total, None
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
        dw = self._matmul(dy.T, x, out=out, result=_F32)
        return super().linear_backward_weights(x, dy, out) if dw is None else dw

    def _matmul(
        self, a: Array, b: Array, row: Array | None = None, out: Array | None = None, result: Any = None
    ) -> Array | None:
        """``a @ b + row``, in a's type or that of the ``result``; of a and b, the transposed may be C-contiguous instead.

        b may be weights of float32 beside activations of another type.
        """
        sizes, stored = (*a.shape, b.shape[1]), self._stored(a)
        if stored == cdef.BF16 and b.dtype == _F32:
            b = self._rounded(b.T).T if b.flags.f_contiguous else self._rounded(b)
        if stored is None or b.dtype != a.dtype or not all(sizes):
            return None
        turned = not a.flags.c_contiguous and a.flags.f_contiguous, not b.flags.c_contiguous and b.flags.f_contiguous
        kind = np.dtype(result or a.dtype)
        run = self._plan(rows.matmul, sizes, turned, row is not None, stored, cdef.F32 if kind == _F32 else stored)
        if run is None:
            return None
        y = self.empty((sizes[0], sizes[2]), kind) if out is None else out
        operands = dense(a.T if turned[0] else a), dense(b.T if turned[1] else b), bits(y)
        run(*map(self._address, operands if row is None else (*operands, dense(row))))
        return y

    # -- pooling ---------------------------------------------------------------------------------------------------

    def _pooling(
        self, algorithm: int, x_shape: tuple[int, ...], like: Array, y_shape: tuple[int, ...], win: Window
    ) -> pool.Pooling | None:
        stored = self._stored(like)
        if stored == cdef.BF16 and not _apart(win, x_shape[1:-1]):
            return None
        if stored is None or not (math.prod(x_shape) and math.prod(y_shape)):
            return None
        return self._plan(pool.Pooling, algorithm, x_shape, y_shape, win, stored)

    def max_pool_forward(self, x: Array, win: Window, out_spatial: Sequence[int]) -> tuple[Array, Array]:
        shape = (x.shape[0], *out_spatial, x.shape[-1])
        run = self._pooling(cdef.POOL_MAX, x.shape, x, shape, win)
        # oneDNN's maximum drops NaN; one more pass finds them.
        if run is None or _holds_nan(x):
            return super().max_pool_forward(x, win, out_spatial)
        y, arg = self.empty(shape, x.dtype), self.empty((run.workspace,), np.uint8)
        run.forward(*map(self._address, (_part(x, run.crop), bits(y), arg)))
        # Its maximum starts from the lowest number, not from -inf.
        if y.min() == _LOWEST if y.dtype == _F32 else bits(y).max() >= _LOWEST_BITS:
            return super().max_pool_forward(x, win, out_spatial)
        return y, arg

    def max_pool_backward(self, dy: Array, arg: Array, win: Window, in_spatial: Sequence[int]) -> Array:
        if arg.dtype != np.uint8 or (
            self._is_half(dy) and not _apart(win, in_spatial)
        ):  # the reference made it; its own are signed
            return super().max_pool_backward(dy, arg, win, in_spatial)
        shape = (dy.shape[0], *in_spatial, dy.shape[-1])
        run = self._pooling(cdef.POOL_MAX, shape, dy, dy.shape, win)
        if run is None:
            raise EngineError("max_pool_backward: arg belongs to another pooling; pass what max_pool_forward returned")
        dx = self.empty(run.x_shape, dy.dtype)
        run.backward(*map(self._address, (dense(dy), bits(dx), arg)))
        return self._whole(dx, run.crop, shape)

    def avg_pool_forward(
        self, x: Array, win: Window, out_spatial: Sequence[int], divisors: Sequence[Float64Array]
    ) -> Array:
        shape, found = (x.shape[0], *out_spatial, x.shape[-1]), pool.avg_factors(win, divisors, x)
        # Rounded once: where the average of a half type must be multiplied after it was rounded, it goes by way of float32.
        run = None if found and self._is_half(x) else self._pooling(cdef.POOL_AVG_WITH_PAD, x.shape, x, shape, win)
        if run is None:
            return super().avg_pool_forward(x, win, out_spatial, divisors)
        y = self.empty(shape, x.dtype)
        run.forward(self._address(_part(x, run.crop)), self._address(bits(y)))
        for factor in found:
            y *= factor
        return y

    def avg_pool_backward(
        self, dy: Array, win: Window, in_spatial: Sequence[int], divisors: Sequence[Float64Array]
    ) -> Array:
        shape, found = (dy.shape[0], *in_spatial, dy.shape[-1]), pool.avg_factors(win, divisors, dy)
        run = None if found and self._is_half(dy) else self._pooling(cdef.POOL_AVG_WITH_PAD, shape, dy, dy.shape, win)
        if run is None:
            return super().avg_pool_backward(dy, win, in_spatial, divisors)
        for factor in found:
            dy = dy * factor
        dx = self.empty(run.x_shape, dy.dtype)
        run.backward(self._address(dense(dy)), self._address(bits(dx)))
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

    Arrays are float32, or activations bfloat16 beside parameters of float32. Both kinds of kernels read and write NumPy memory in place. Scratch memory and the memory of outputs are reused, so an engine belongs to one compute
    thread at a time. A case that both refuse (float64, empty arrays, windows that see no input) runs in the reference.

    Parameters
    ----------
    dtype : numpy dtype or its name
    threads : int, optional
        OpenMP threads of kernels; None leaves OpenMP's default (OMP_NUM_THREADS).
    compute : "float32" or "bfloat16"
        Type of activations, and in which convolutions and matrix products of them multiply; sums stay float32.

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


def _holds_nan(x: Array) -> bool:
    if x.dtype.kind != "V":
        return bool(np.isnan(x.max()))
    raw = x.view(np.uint16)
    return bool(raw.view(np.int16).max() > _NAN_BITS[0] or raw.max() > _NAN_BITS[1])


def _apart(win: Window, inner: Sequence[int]) -> bool:
    """Whether primitives of bfloat16 give good gradients of windows: those that overlap would be rounded as often as they are added to,
    and those of volumes are lost where a window is larger than its input (oneDNN 3.2)."""
    return all(dim.kernel <= min(dim.stride, n) for dim, n in zip(win, inner, strict=True))


def _slabs(extent: int, staged: int, most: int) -> Iterator[tuple[int, int]]:
    """Parts of an extent, of which a convolution takes so many bytes of scratch memory, that take ``most``."""
    step = max(1, extent // -(-staged // most))
    return ((lo, min(lo + step, extent)) for lo in range(0, extent, step))


def _part(x: Array, crop: tuple[slice, ...] | None) -> Array:
    """What the windows of a kernel read of x, as oneDNN takes it."""
    return dense(x if crop is None else x[crop])
