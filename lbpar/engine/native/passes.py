"""Passes that no library has, in C (``kernels/*.c``), compiled on the machine they run on (`lbpar.engine.native.build`).

Where no C compiler is found whoever asked does without them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lbpar.engine.base import Array, Float64Array
from lbpar.engine.native import build
from lbpar.engine.onednn.library import address_of

log = logging.getLogger(__name__)

SWITCH = "LBPAR_NATIVE"
"""Environment variable: 0 leaves the compiled passes out."""

SMALL = 1 << 15
"""Elements below which a second thread costs more than it saves (measured)."""

_CDEF = """
int lbpar_norm_sums(const void *x, int64_t n, int64_t c, const void *shift, void *out, int threads);
int lbpar_norm_backward_sums(const void *x, const void *dy, const void *more, const void *y, void *g, int64_t n,
                             int64_t c, const void *mean, const void *invstd, void *out, int threads);
int lbpar_norm_apply(const void *x, const void *z, void *y, int64_t n, int64_t c, const void *mean, const void *invstd,
                     const void *scale, const void *bias, int relu, int threads);
int lbpar_norm_backward_data(const void *x, const void *dy, const void *z, int64_t stride, void *dx, int64_t n,
                             int64_t c, const void *mean, const void *invstd, const void *scale, const void *sums,
                             double count, int threads);
int lbpar_norm_moments(const void *sums, const void *shift, int64_t c, double count, double eps, void *out);
int lbpar_norm_running(const void *sums, void *mean, void *var, int64_t c, double momentum, double count);
int lbpar_sum_rows(const void *x, int64_t n, int64_t c, void *out, int threads);
int lbpar_relu(const void *x, void *y, int64_t n, int threads);
int lbpar_relu_backward(const void *y, const void *dy, void *dx, int64_t n, int threads);
int lbpar_add(const void *x, const void *z, void *y, int64_t n, int threads);
int lbpar_copy(const void *from, int64_t from_stride, void *to, int64_t to_stride, int64_t n, int64_t c, int threads);

int lbpar_softmax_max(const void *x, int64_t n, int64_t c, void *m, int threads);
int lbpar_softmax_sums(const void *x, const void *m, const void *target, int64_t start, int64_t n, int64_t c, void *out,
                       int threads);
int lbpar_cross_entropy_backward(const void *x, const void *m, const void *s, const void *target, int64_t start,
                                 int64_t n, int64_t c, double even, double hit, double scale, void *dx, int threads);
int lbpar_softmax_rank(const void *x, const void *m, const void *s, const void *at, const void *target, int64_t start,
                       int64_t n, int64_t c, void *out, int threads);
int lbpar_dice_sums(const void *x, const void *m, const void *s, const void *target, int64_t start, int64_t n,
                    int64_t c, void *out, int threads);
int lbpar_dice_backward(const void *x, const void *m, const void *s, const void *target, int64_t start, int64_t n,
                        int64_t c, const void *rest, const void *hit, void *g, void *inner, int threads);
int lbpar_dice_backward_data(const void *x, const void *m, const void *s, const void *g, const void *inner, int64_t n,
                             int64_t c, void *dx, int threads);
double lbpar_mse_loss(const void *x, const void *t, int64_t n, int threads);
int lbpar_mse_backward(const void *x, const void *t, int64_t n, double factor, void *dx, int threads);
double lbpar_bce_loss(const void *x, const void *t, int64_t n, int threads);
int lbpar_bce_backward(const void *x, const void *t, int64_t n, double scale, void *dx, int threads);

int lbpar_sgd(void *p, const void *g, void *v, int64_t n, double momentum, int nesterov, double decay, double rate,
              int threads);
int lbpar_adam(void *p, const void *g, void *m, void *v, int64_t n, double keep, double decay, double b1, double b2,
               double eps, double rate, int threads);

int lbpar_threads(void);
int64_t lbpar_flush_bits(void);
int64_t lbpar_flush(int64_t bits, int threads);
"""
_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)


class Native:
    """The compiled passes on float32 C-contiguous arrays; statistics are float64.

    Parameters
    ----------
    path : the compiled library
    threads : OpenMP threads for arrays that are worth it; None: as many as OpenMP gives the calling thread
    """

    def __init__(self, path: Path, threads: int | None) -> None:
        import cffi

        ffi = cffi.FFI()
        ffi.cdef(_CDEF)
        self.lib: Any = ffi.dlopen(str(path))
        self.pointer = address_of(ffi)
        self.null = ffi.NULL
        self.path, self.threads = path, threads

    def team(self, size: int) -> int:
        """Threads for a pass over so many elements."""
        if size < SMALL:
            return 1
        return self.threads or int(self.lib.lbpar_threads())

    def norm_sums(self, x: Array, shift: Array) -> Float64Array:
        """`Engine.norm_sums`."""
        c, size, p = x.shape[-1], x.size, self.pointer
        out = np.empty((4, c))
        check(self.lib.lbpar_norm_sums(p(x), size // c, c, p(float64(shift)), p(out), self.team(size)))
        return out

    def norm_moments(self, sums: Array, shift: Array, count: float, eps: float) -> Float64Array:
        """`Engine.norm_moments`, as one array (3, C)."""
        c, p = sums.shape[-1], self.pointer
        out = np.empty((3, c))
        self.lib.lbpar_norm_moments(p(float64(sums)), p(float64(shift)), c, max(count, 1), eps, p(out))
        return out

    def norm_running(self, sums: Array, mean: Array, var: Array, momentum: float, count: int) -> None:
        """`Engine.norm_running` on C-contiguous float64 arrays."""
        p = self.pointer
        self.lib.lbpar_norm_running(p(sums), p(mean), p(var), mean.shape[0], momentum, count)

    def norm_apply(
        self,
        x: Array,
        y: Array,
        mean: Array,
        invstd: Array,
        scale: Array | None,
        bias: Array | None,
        residual: Array | None,
        relu: bool,
    ) -> None:
        """`Engine.norm_apply` into y [+ residual] [relu]."""
        c, size, p, null = x.shape[-1], x.size, self.pointer, self.null
        status = self.lib.lbpar_norm_apply(
            p(x),
            null if residual is None else p(residual),
            p(y),
            size // c,
            c,
            p(float64(mean)),
            p(float64(invstd)),
            null if scale is None else p(float32(scale)),
            null if bias is None else p(float32(bias)),
            relu,
            self.team(size),
        )
        check(status)

    def norm_backward_sums(
        self,
        x: Array,
        dy: Array,
        mean: Array,
        invstd: Array,
        more: Array | None = None,
        y: Array | None = None,
        g: Array | None = None,
    ) -> Float64Array:
        """`Engine.norm_backward_sums` of ``dy [+ more]``, masked by ``y > 0`` where y is given, and stored in g."""
        c, size, p, null = x.shape[-1], x.size, self.pointer, self.null
        out = np.empty((2, c))
        status = self.lib.lbpar_norm_backward_sums(
            p(x),
            p(dy),
            null if more is None else p(more),
            null if y is None else p(y),
            null if g is None else p(g),
            size // c,
            c,
            p(float64(mean)),
            p(float64(invstd)),
            p(out),
            self.team(size),
        )
        check(status)
        return out

    def norm_backward_data(
        self,
        x: Array,
        dy: Array,
        dx: Array,
        mean: Array,
        invstd: Array,
        scale: Array | None,
        sums: Array,
        count: float,
        more: Array | None = None,
    ) -> None:
        """`Engine.norm_backward_data` into dx, plus the first channels of ``more``."""
        c, size, p, null = x.shape[-1], x.size, self.pointer, self.null
        status = self.lib.lbpar_norm_backward_data(
            p(x),
            p(dy),
            null if more is None else p(more),
            c if more is None else more.shape[-1],
            p(dx),
            size // c,
            c,
            p(float64(mean)),
            p(float64(invstd)),
            null if scale is None else p(float32(scale)),
            p(float64(sums)),
            count,
            self.team(size),
        )
        check(status)

    def sum_rows(self, x: Array) -> Array:
        """Sum over all but the last dimension, added in float64."""
        c, size, p = x.shape[-1], x.size, self.pointer
        out = np.empty(c, np.float32)
        check(self.lib.lbpar_sum_rows(p(x), size // c, c, p(out), self.team(size)))
        return out

    def relu(self, x: Array, y: Array) -> None:
        """max(x, 0) into y, which may be x; keeps NaN."""
        self.lib.lbpar_relu(self.pointer(x), self.pointer(y), x.size, self.team(x.size))

    def relu_backward(self, y: Array, dy: Array, dx: Array) -> None:
        """dy where y > 0, else 0, into dx."""
        p = self.pointer
        self.lib.lbpar_relu_backward(p(y), p(dy), p(dx), y.size, self.team(y.size))

    def add(self, x: Array, z: Array, y: Array) -> None:
        """x + z into y, which may be either."""
        p = self.pointer
        self.lib.lbpar_add(p(x), p(z), p(y), x.size, self.team(x.size))

    def copy_columns(self, source: Array, first: int, target: Array, at: int, count: int) -> None:
        """Columns of the last dimension: ``target[..., at:at+count] = source[..., first:first+count]``."""
        a, b = source.shape[-1], target.shape[-1]
        size = source.size // a * count
        x, y = self.pointer(source), self.pointer(target)
        self.lib.lbpar_copy(x + 4 * first, a, y + 4 * at, b, source.size // a, count, self.team(size))

    # -- optimizers: see the rules in `lbpar.runtime.optim` ----------------------------------------------------------------

    def sgd(
        self, p: Array, g: Array, v: Sequence[Array], momentum: float, nesterov: bool, decay: float, rate: float
    ) -> None:
        """Step of `SGD`: p and its velocity v (none of them: no momentum) are changed."""
        a = self.pointer
        velocity = a(v[0]) if v else self.null
        self.lib.lbpar_sgd(a(p), a(g), velocity, p.size, momentum, nesterov, decay, rate, self.team(p.size))

    def adam(
        self,
        p: Array,
        g: Array,
        m: Array,
        v: Array,
        betas: tuple[float, float],
        keep: float,
        decay: float,
        eps: float,
        rate: float,
    ) -> None:
        """``p *= keep; g += decay * p``, moments m and v of g, ``p -= rate * m / (sqrt(v) + eps)``; g is not changed."""
        a = self.pointer
        n = p.size
        self.lib.lbpar_adam(a(p), a(g), a(m), a(v), n, keep, decay, *betas, eps, rate, self.team(n))

    # -- denormal numbers --------------------------------------------------------------------------------------------------

    def flushing(self) -> Flushing:
        """Context in which this thread, and the OpenMP threads that work for it, take denormal numbers as zero."""
        return Flushing(self)

    def flush(self, bits: int | None) -> int:
        """Set the bits that decide about denormals (None: flush to zero); returns those that this thread had."""
        lib = self.lib
        wanted = lib.lbpar_flush_bits() if bits is None else bits
        return int(lib.lbpar_flush(wanted, self.threads or lib.lbpar_threads()))


class Flushing:
    """While it is entered, the threads of some passes take denormal numbers as zero; what they did before is restored."""

    __slots__ = ("_before", "_native")

    def __init__(self, native: Native) -> None:
        self._native = native

    def __enter__(self) -> None:
        self._before: int = self._native.flush(None)

    def __exit__(self, *_: object) -> None:
        self._native.flush(self._before)


def native(threads: int | None = None) -> Native | None:
    """The compiled passes (see `Native`), or None where they cannot be had: no compiler, no cffi, or switched off."""
    if os.environ.get(SWITCH, "1") == "0":
        return None
    path = build.library()
    if path is None:
        return None
    try:
        return Native(path, threads)
    except (OSError, ImportError) as error:  # a folder from which nothing may be executed, say
        log.info("native passes: %s cannot be loaded (%s)", path, error)
        return None


def is_dense(*arrays: Array) -> bool:
    """Whether all arrays are C-contiguous float32 with something in them: what `Native` takes."""
    # No generator: it would take longer than the rest.
    for a in arrays:  # noqa: SIM110
        if a.dtype != _F32 or not a.flags.c_contiguous or not a.size:
            return False
    return True


def check(status: int) -> None:
    """MemoryError if a pass found no memory for its work arrays."""
    if status:
        raise MemoryError("out of memory in a compiled pass")


def float64(a: Array) -> Array:
    """``a`` as C-contiguous float64."""
    return a if a.dtype == _F64 and a.flags.c_contiguous else np.ascontiguousarray(a, dtype=np.float64)


def float32(a: Array) -> Array:
    """``a`` as C-contiguous float32."""
    return a if a.dtype == _F32 and a.flags.c_contiguous else np.ascontiguousarray(a, dtype=np.float32)
