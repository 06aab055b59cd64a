"""Finding and loading oneDNN, and the state that all primitives of one engine share."""

from __future__ import annotations

import mmap
import os
import site
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from lbpar.engine.native.build import types
from lbpar.engine.onednn import cdef
from lbpar.errors import EngineError

ENVIRONMENT = "LBPAR_DNNL"
SONAME = "libdnnl.so.3"
WHEEL = "onednn-cpu-gomp"
_WHEELS = (WHEEL, "onednn-cpu-iomp", "onednn")
SLACK = 1 << 16
"""Bytes behind scratch memory that kernels may touch: some (AMX) read a row too many, or write the end of a padded one."""

LARGE = 1 << 20
"""Bytes of scratch memory from which on it comes from the operating system, and goes back there: the C library would keep some of it."""

_STATUS = {
    1: "out of memory",
    2: "invalid arguments",
    3: "unimplemented",
    4: "no further implementation",
    5: "runtime error",
    6: "not required",
}
_REMEDY = f"install the wheel with `pip install {WHEEL}`, or name a library with {ENVIRONMENT}=/path/to/{SONAME}"


class Refused(EngineError):
    """oneDNN has no kernel for a case; the engine falls back to its reference."""


class Library:
    """One loaded libdnnl: `lib` has the functions, `ffi` the types."""

    def __init__(self, path: str, ffi: Any, lib: Any) -> None:
        self.path, self.ffi, self.lib = path, ffi, lib
        version = lib.dnnl_version()
        self.version: tuple[int, int, int] = (version.major, version.minor, version.patch)
        self.runtime: int = version.cpu_runtime
        self.openmp = self.runtime == cdef.RUNTIME_OMP

    def check(self, status: int, what: str) -> None:
        """Raise `Refused` or `EngineError` unless ``status`` is success."""
        if status:
            kind = Refused if status in (2, 3, 4) else EngineError
            raise kind(
                f"oneDNN {'.'.join(map(str, self.version))} ({self.path}): {what}: {_STATUS.get(status, status)}"
            )


@lru_cache
def _open(path: str) -> Library:
    """Load ``path``, for good, since its threads outlive engines; raise OSError with the reason if it cannot serve."""
    import _cffi_backend

    ffi = types(cdef.CDEF)
    try:
        library = Library(path, ffi, ffi.dlopen(path))
    except _cffi_backend.FFI.error as error:
        raise OSError(str(error)) from None
    if library.version[0] != 3:
        raise OSError(f"{path}: version {library.version[0]}, expected 3")
    if library.runtime not in (cdef.RUNTIME_SEQ, cdef.RUNTIME_OMP):
        raise OSError(f"{path}: built for CPU runtime {library.runtime:#x}, expected OpenMP or sequential")
    return library


def _candidates() -> Iterator[str]:
    """Where a library may lie. A bare name must come first: once any libdnnl is loaded, the loader answers it with that."""
    yield SONAME
    for prefix in (sys.prefix, site.getuserbase(), os.environ.get("CONDA_PREFIX", "")):
        path = Path(prefix, "lib", SONAME)
        if prefix and path.exists():
            yield str(path.resolve())


def _installed() -> Iterator[str]:
    """Where wheels may have put one besides: asking for that reads the records of all packages, too much for every rank of a job."""
    import importlib.metadata

    for wheel in _WHEELS:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        yield from (str(Path(str(file.locate())).resolve()) for file in files if file.name == SONAME)


@lru_cache(maxsize=8)
def _load(explicit: str) -> Library:
    if explicit:
        path = os.path.join(explicit, SONAME) if os.path.isdir(explicit) else explicit
        try:
            return _open(path)
        except (OSError, ImportError, AttributeError) as error:
            raise EngineError(f"oneDNN: {ENVIRONMENT}={explicit} cannot be used ({error}); {_REMEDY}") from error
    found: list[Library] = []
    reasons: list[str] = []
    for places in (_candidates, _installed):
        for path in dict.fromkeys(() if found else places()):
            try:
                found.append(_open(path))
            except (OSError, ImportError, AttributeError) as error:  # a broken one must not hide the next candidate
                reasons.append(str(error))
    if not found:
        raise EngineError(f"oneDNN: no usable {SONAME} ({'; '.join(reasons)}); {_REMEDY}, or use the numpy engine")
    return max(found, key=lambda library: library.version)


def load() -> Library:
    """The newest usable oneDNN, or the one that the environment variable LBPAR_DNNL names (a file or its directory).

    Raises
    ------
    EngineError
        If there is none; the message names the wheel to install.
    """
    return _load(os.environ.get(ENVIRONMENT, ""))


class DnnlContext:
    """What the primitives of one engine share: oneDNN's engine and stream, the thread count, and scratch memory.

    Scratch memory is reused by every call, so a context belongs to one compute thread at a time.
    """

    def __init__(self, library: Library, threads: int | None) -> None:
        ffi, lib = library.ffi, library.lib
        self.library, self.ffi, self.lib = library, ffi, lib
        self.pointer = address_of(ffi)
        self.threads = threads if library.openmp else None
        handle = ffi.new("void **")
        library.check(lib.dnnl_engine_create(handle, 1, 0), "engine")
        self.engine = handle[0]
        library.check(lib.dnnl_stream_create(handle, self.engine, 1), "stream")
        self.stream = handle[0]
        # Our own cache holds the primitives; oneDNN's would only hold them twice.
        lib.dnnl_set_primitive_cache_capacity(0)
        self._areas: dict[str, tuple[int, Any]] = {}
        self.moved = 0  # how often scratch memory has got another address
        self.null = ffi.NULL

    def use_threads(self) -> None:
        """OpenMP's thread count belongs to the calling thread, so it is set before every call (some 0.1 us)."""
        if self.threads:
            self.lib.omp_set_num_threads(self.threads)

    def max_threads(self) -> int:
        """Threads that a kernel called now would use."""
        self.use_threads()
        return int(self.lib.omp_get_max_threads()) if self.library.openmp else 1

    def area(self, name: str, nbytes: int) -> Any:
        """Address of reused scratch memory: at least ``nbytes`` bytes, aligned to 64; valid until the next larger request."""
        size, address = self._areas.get(name, (0, None))
        if size < nbytes:
            size = max(nbytes, 4096)
            address = self.pointer(aligned(size + SLACK))  # keeps the memory alive
            self._areas[name] = (size, address)
            self.moved += 1
        return address

    def desc(self, dims: Sequence[int], strides: Sequence[int] | None = None, dtype: int = cdef.F32) -> Any:
        """Memory descriptor; ``strides`` in elements, None lets oneDNN choose the format."""
        out = self.ffi.new("void **")
        if strides is None:
            status = self.lib.dnnl_memory_desc_create_with_tag(out, len(dims), list(dims), dtype, cdef.TAG_ANY)
        else:
            status = self.lib.dnnl_memory_desc_create_with_strides(out, len(dims), list(dims), dtype, list(strides))
        self.library.check(status, f"memory descriptor {tuple(dims)}")
        return self.ffi.gc(out[0], self.lib.dnnl_memory_desc_destroy)

    def rows(self, shape: Sequence[int], dtype: int = cdef.F32) -> Any:
        """Descriptor of a C-contiguous array with its own dimensions."""
        return self.desc(shape, contiguous_strides(shape), dtype)

    def activation(self, shape: Sequence[int], dtype: int = cdef.F32) -> Any:
        """Descriptor of a channels-last array (N, *S, C); oneDNN names the dimensions N, C, *S."""
        strides = contiguous_strides(shape)
        return self.desc((shape[0], shape[-1], *shape[1:-1]), (strides[0], strides[-1], *strides[1:-1]), dtype)

    def weights(self, shape: Sequence[int], groups: int, plain: bool, dtype: int = cdef.F32) -> Any:
        """Descriptor of convolution weights (F, *K, C/groups), as they lie or (not plain) in a format of oneDNN's choice."""
        f, *kernel, c = shape
        strides = contiguous_strides(shape)
        dims: list[int] = [f, c, *kernel]
        steps = [strides[0], strides[-1], *strides[1:-1]]
        if groups > 1:
            dims = [groups, f // groups, *dims[1:]]
            steps = [strides[0] * (f // groups), *steps]
        return self.desc(dims, steps if plain else None, dtype)

    def attributes(self, post_ops: Any = None, fpmath: int = 0) -> Any:
        """Primitive attributes: scratchpad supplied by us, and optionally post-ops and a lower computing precision."""
        out = self.ffi.new("void **")
        self.library.check(self.lib.dnnl_primitive_attr_create(out), "attributes")
        attr = self.ffi.gc(out[0], self.lib.dnnl_primitive_attr_destroy)
        self.library.check(self.lib.dnnl_primitive_attr_set_scratchpad_mode(attr, 1), "scratchpad mode")
        if fpmath:
            self.library.check(self.lib.dnnl_primitive_attr_set_fpmath_mode(attr, fpmath), "floating-point mode")
        if post_ops is not None:
            self.library.check(self.lib.dnnl_primitive_attr_set_post_ops(attr, post_ops), "post-ops")
        return attr

    def post_ops(self, *ops: tuple[Any, ...]) -> Any:
        """Post-ops from ("eltwise", alg, alpha, beta) and ("binary", alg, descriptor)."""
        out = self.ffi.new("void **")
        self.library.check(self.lib.dnnl_post_ops_create(out), "post-ops")
        chain = self.ffi.gc(out[0], self.lib.dnnl_post_ops_destroy)
        for kind, *rest in ops:
            append = getattr(self.lib, f"dnnl_post_ops_append_{kind}")
            self.library.check(append(chain, *rest), f"post-op {kind}")
        return chain


class Description:
    """What a primitive would be: by itself, a hint for backward primitives, which need no compiled kernel of it.

    Parameters
    ----------
    context
    create : name of the function ``dnnl_<create>_primitive_desc_create``
    arguments : what that function takes after the engine
    """

    __slots__ = ("_keep", "context", "descriptor")

    def __init__(self, context: DnnlContext, create: str, arguments: Sequence[Any]) -> None:
        context.use_threads()  # kernels size their scratchpads by the thread count at creation
        out = context.ffi.new("void **")
        function = getattr(context.lib, f"dnnl_{create}_primitive_desc_create")
        head = () if create == "reorder" else (context.engine,)
        context.library.check(function(out, *head, *arguments), create)
        self.context = context
        self.descriptor = context.ffi.gc(out[0], context.lib.dnnl_primitive_desc_destroy)
        self._keep = arguments

    def query(self, what: int) -> Any:
        """Descriptor that the primitive chose for an argument."""
        return self.context.lib.dnnl_primitive_desc_query_md(self.descriptor, what, 0)

    def size(self, what: int) -> int:
        """Bytes of the memory that a descriptor of the primitive asks for; 0 where it has none."""
        desc = self.query(what)
        return int(self.context.lib.dnnl_memory_desc_get_size(desc)) if desc != self.context.null else 0

    @property
    def implementation(self) -> str:
        """oneDNN's name of the kernel it chose."""
        out = self.context.ffi.new("const char **")
        self.context.lib.dnnl_primitive_desc_query(self.descriptor, cdef.QUERY_IMPL, 0, out)
        return str(self.context.ffi.string(out[0]).decode())


class Primitive(Description):
    """A oneDNN primitive with its argument list laid out; a call sets the addresses and runs it.

    Parameters
    ----------
    context, create, arguments
        As for `Description`.
    memories : (execution argument, descriptor) in the order in which a call gives addresses; a descriptor may be a
        query number, which stands for the descriptor that the primitive chose
    """

    __slots__ = ("_args", "_count", "_execute", "_memories", "_prim", "_scratch", "_set", "_set_at", "_set_threads")

    def __init__(
        self, context: DnnlContext, create: str, arguments: Sequence[Any], memories: Sequence[tuple[int, Any]]
    ) -> None:
        super().__init__(context, create, arguments)
        ffi, lib, check = context.ffi, context.lib, context.library.check
        out = ffi.new("void **")
        check(lib.dnnl_primitive_create(out, self.descriptor), create)
        self._prim = ffi.gc(out[0], lib.dnnl_primitive_destroy)
        size = self.size(cdef.QUERY_SCRATCHPAD)
        listed = [*memories, *([(cdef.ARG_SCRATCHPAD, cdef.QUERY_SCRATCHPAD)] if size else [])]
        self._args = ffi.new("dnnl_exec_arg_t[]", max(len(listed), 1))
        made = []
        for i, (arg, desc) in enumerate(listed):
            if isinstance(desc, int):
                desc = self.query(desc)
            check(lib.dnnl_memory_create(out, desc, context.engine, ffi.NULL), f"{create}: argument {arg}")
            made.append(ffi.gc(out[0], lib.dnnl_memory_destroy))
            self._args[i].arg, self._args[i].memory = arg, out[0]
        self._memories = tuple(made[: len(memories)])
        self._scratch = (made[-1], size) if size else None
        self._count = len(listed)
        self._keep = (arguments, memories)
        self._set, self._execute = lib.dnnl_memory_set_data_handle, lib.dnnl_primitive_execute
        self._set_threads: Any = lib.omp_set_num_threads if context.library.openmp else None
        self._set_at = -1

    def __call__(self, *addresses: Any) -> None:
        context, put = self.context, self._set
        for memory, address in zip(self._memories, addresses, strict=True):
            put(memory, address)
        if self._scratch is not None:
            memory, size = self._scratch
            address = context.area("scratchpad", size)
            if context.moved != self._set_at:  # the address itself would keep memory alive that was outgrown
                put(memory, address)
                self._set_at = context.moved
        if context.threads:
            self._set_threads(context.threads)
        status = self._execute(self._prim, context.stream, self._count, self._args)
        if status:
            context.library.check(status, f"running {self.implementation}")


def address_of(ffi: Any) -> Any:
    """``ffi.from_buffer`` for arrays of bytes, without its Python wrapper (a tenth of a microsecond in every operand)."""
    import _cffi_backend

    return partial(_cffi_backend.from_buffer, ffi.typeof("char[]"))


def dense(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``a``, copied where it is not C-contiguous float32: oneDNN is given an address only. Of bfloat16, the bits."""
    if a.dtype.kind == "V":
        return np.ascontiguousarray(a).view(np.uint16)
    if a.dtype == np.float32 and a.flags.c_contiguous:
        return a
    return np.ascontiguousarray(a, dtype=np.float32)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous array."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


def aligned(nbytes: int, alignment: int = 64) -> np.ndarray[Any, Any]:
    """Uninitialised bytes that start at a multiple of ``alignment``: vector loads then never straddle cache lines."""
    if nbytes >= LARGE:
        return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    raw = np.empty(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]
