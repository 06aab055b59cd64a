"""Passes over rows that no library has, in C (``kernels/rows.c``), compiled on the machine they run on and kept.

Where no C compiler is found the engine that asked does without them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lbpar import kernel_source
from lbpar.engine._dnnl.library import address_of
from lbpar.engine.base import Array, Float64Array
from lbpar.errors import EngineError

log = logging.getLogger(__name__)

SWITCH = "LBPAR_NATIVE"
"""Environment variable: 0 leaves the compiled passes out."""

CACHE = "LBPAR_CACHE"
"""Environment variable: the folder in which compiled code is kept; default ``lbpar`` in the user's cache folder."""

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
"""
_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_TRIES = (("-march=native", "-mprefer-vector-width=512", "-fopenmp"), ("-march=native", "-fopenmp"), ("-fopenmp",), ())


class Native:
    """The compiled passes on float32 C-contiguous arrays; statistics are float64.

    Parameters
    ----------
    path : the compiled library
    threads : OpenMP threads for arrays that are worth it
    """

    def __init__(self, path: Path, threads: int) -> None:
        import cffi

        ffi = cffi.FFI()
        ffi.cdef(_CDEF)
        self.lib: Any = ffi.dlopen(str(path))
        self.pointer = address_of(ffi)
        self.null = ffi.NULL
        self.path, self.threads = path, threads

    def _team(self, size: int) -> int:
        return self.threads if size >= SMALL else 1

    def norm_sums(self, x: Array, shift: Array) -> Float64Array:
        """`Engine.norm_sums`."""
        c, size, p = x.shape[-1], x.size, self.pointer
        out = np.empty((2, c))
        _check(self.lib.lbpar_norm_sums(p(x), size // c, c, p(_f64(shift)), p(out), self._team(size)))
        return out

    def norm_moments(self, sums: Array, shift: Array, count: float, eps: float) -> Float64Array:
        """`Engine.norm_moments`, as one array (3, C)."""
        c, p = sums.shape[-1], self.pointer
        out = np.empty((3, c))
        self.lib.lbpar_norm_moments(p(_f64(sums)), p(_f64(shift)), c, max(count, 1), eps, p(out))
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
            p(_f64(mean)),
            p(_f64(invstd)),
            null if scale is None else p(_f32(scale)),
            null if bias is None else p(_f32(bias)),
            relu,
            self._team(size),
        )
        _check(status)

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
            p(_f64(mean)),
            p(_f64(invstd)),
            p(out),
            self._team(size),
        )
        _check(status)
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
            p(_f64(mean)),
            p(_f64(invstd)),
            null if scale is None else p(_f32(scale)),
            p(_f64(sums)),
            count,
            self._team(size),
        )
        _check(status)

    def sum_rows(self, x: Array) -> Array:
        """Sum over all but the last dimension, added in float64."""
        c, size, p = x.shape[-1], x.size, self.pointer
        out = np.empty(c, np.float32)
        _check(self.lib.lbpar_sum_rows(p(x), size // c, c, p(out), self._team(size)))
        return out

    def relu(self, x: Array, y: Array) -> None:
        """max(x, 0) into y, which may be x; keeps NaN."""
        self.lib.lbpar_relu(self.pointer(x), self.pointer(y), x.size, self._team(x.size))

    def relu_backward(self, y: Array, dy: Array, dx: Array) -> None:
        """dy where y > 0, else 0, into dx."""
        p = self.pointer
        self.lib.lbpar_relu_backward(p(y), p(dy), p(dx), y.size, self._team(y.size))

    def add(self, x: Array, z: Array, y: Array) -> None:
        """x + z into y, which may be either."""
        p = self.pointer
        self.lib.lbpar_add(p(x), p(z), p(y), x.size, self._team(x.size))

    def copy_columns(self, source: Array, first: int, target: Array, at: int, count: int) -> None:
        """Columns of the last dimension: ``target[..., at:at+count] = source[..., first:first+count]``."""
        a, b = source.shape[-1], target.shape[-1]
        size = source.size // a * count
        x, y = self.pointer(source), self.pointer(target)
        self.lib.lbpar_copy(x + 4 * first, a, y + 4 * at, b, source.size // a, count, self._team(size))


def native(threads: int) -> Native | None:
    """The compiled passes, or None where they cannot be had: no compiler, no cffi, or switched off."""
    if os.environ.get(SWITCH, "1") == "0":
        return None
    path = _library(os.environ.get(CACHE, ""), os.environ.get("CC", ""))
    if path is None:
        return None
    try:
        return Native(path, threads)
    except (OSError, ImportError) as error:  # a folder from which nothing may be executed, say
        log.info("native passes: %s cannot be loaded (%s)", path, error)
        return None


@lru_cache(maxsize=8)
def _library(cache: str, compiler: str) -> Path | None:
    """Path of the library, compiled if it is not there yet."""
    source = _source()
    if source is None:
        log.info("native passes: kernels/rows.c is not installed")
        return None
    digest = hashlib.sha256(source.read_bytes() + _processor().encode() + repr((_FLAGS, _TRIES, compiler)).encode())
    name = f"rows-{digest.hexdigest()[:16]}.so"
    folders = [Path(cache)] if cache else [_user_cache(), Path(tempfile.gettempdir()) / f"lbpar-{os.getuid()}"]
    for folder in folders:
        if (folder / name).exists() and _ours(folder):
            return folder / name
    command = next((c for c in ([compiler] if compiler else ["cc", "gcc", "clang"]) if shutil.which(c.split()[0])), "")
    if not command:
        log.info("native passes: no C compiler found; norms and relu run through oneDNN alone, slower")
        return None
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _ours(folder) and _compile(command, source, folder / name):
                return folder / name
        except OSError as error:
            log.info("native passes: %s cannot be used (%s)", folder, error)
    return None


def _compile(command: str, source: Path, target: Path) -> bool:
    """Compile with the best flags that the compiler takes. The file appears whole: other ranks may be at the same."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    for extra in _TRIES:
        run = [*command.split(), *_FLAGS, *extra, "-o", name, str(source), "-lm"]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            os.replace(name, target)
            return True
    os.unlink(name)
    log.info("native passes: %s failed: %s", command, done.stderr.strip()[-500:])
    return False


def _source() -> Path | None:
    """``rows.c``, if this installation has it."""
    try:
        path = kernel_source.folder() / "rows.c"
    except EngineError:
        return None
    return path if path.is_file() else None


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "lbpar"


def _ours(folder: Path) -> bool:
    """Code is loaded only from folders that belong to this user."""
    return folder.stat().st_uid == os.getuid()


def _processor() -> str:
    """What ``-march=native`` depends on: nodes of a cluster that share a home folder may differ."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = {line for line in file if line.startswith(("flags", "model name", "Features"))}
    except OSError:
        lines = {platform.processor()}
    return platform.machine() + "".join(sorted(lines))


def _check(status: int) -> None:
    if status:
        raise MemoryError("out of memory in a normalisation")


def _f64(a: Array) -> Array:
    return a if a.dtype == _F64 and a.flags.c_contiguous else np.ascontiguousarray(a, dtype=np.float64)


def _f32(a: Array) -> Array:
    return a if a.dtype == _F32 and a.flags.c_contiguous else np.ascontiguousarray(a, dtype=np.float32)
