"""Passes that no library has, in C (``kernels/*.c``), compiled on the machine they run on (`lbpar.engine.native.build`).

Where no C compiler is found, engines do without them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lbpar.engine.device import Array
from lbpar.engine.half import bits
from lbpar.engine.native import build
from lbpar.engine.onednn.library import address_of

log = logging.getLogger(__name__)

SWITCH = "LBPAR_NATIVE"
"""Environment variable: 0 leaves the compiled passes out."""

SMALL = 1 << 15
"""Elements below which a second thread costs more than it saves (measured)."""

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)


@lru_cache
def _open(path: Path) -> tuple[Any, Any]:
    """The types and functions of a compiled library, which stays loaded: threads of OpenMP outlive engines."""
    ffi = build.types(build.declarations())
    return ffi, ffi.dlopen(str(path))


class Native:
    """The compiled passes on C-contiguous arrays of float32, those of rows (`of`) on bfloat16 as well; statistics are float64.

    Parameters
    ----------
    path : the compiled library
    threads : OpenMP threads for arrays that are worth it; None: as many as OpenMP gives the calling thread
    """

    def __init__(self, path: Path, threads: int | None) -> None:
        ffi, self.lib = _open(path)
        self.pointer = address_of(ffi)
        self.null = ffi.NULL
        self.path, self.threads = path, threads

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A pass, ``lbpar_<name>`` of ``kernels/*.c``, where its arguments and result are described.

        ``pass(over, arrays, *numbers)``: how many elements there are to share among threads; the arrays, None for one that is left out;
        and what follows them but for the number of threads. Raises MemoryError if there was none for work arrays.
        """
        function, pointer, null = getattr(self.lib, f"lbpar_{name}"), self.pointer, self.null
        if name.endswith("_bfloat16"):

            def pointer(a: Array, plain: Any = pointer) -> Any:
                return plain(bits(a))

        def run(over: int, arrays: Sequence[Array | None], *numbers: float) -> Any:
            given = [null if a is None else pointer(a) for a in arrays]
            team = 1 if over < SMALL else self.threads or self.lib.lbpar_threads()
            value = function(*given, *numbers, team)
            if value.__class__ is int and value:
                raise MemoryError(f"out of memory in the compiled pass {name}")
            return value

        self.__dict__[name] = run  # every small step spends time here
        return run

    def of(self, x: Array, name: str) -> Callable[..., Any]:
        """The pass on activations of x's type."""
        return getattr(self, name if x.dtype == _F32 else f"{name}_{x.dtype.name}")  # type: ignore[no-any-return]

    @contextmanager
    def flushing(self) -> Iterator[None]:
        """Context in which this thread, and the OpenMP threads that work for it, take denormal numbers as zero."""
        lib, team = self.lib, self.threads or self.lib.lbpar_threads()
        before = lib.lbpar_flush(lib.lbpar_flush_bits(), team)
        try:
            yield
        finally:
            lib.lbpar_flush(before, team)


def native(threads: int | None = None) -> Native | None:
    """The compiled passes (see `Native`), or None: no compiler, no cffi, or switched off."""
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
        if (a.dtype is not _F32 and a.dtype != _F32) or not a.flags.c_contiguous or not a.size:
            return False
    return True


def is_dense_alike(*arrays: Array) -> bool:
    """Whether all arrays are C-contiguous, of one type, float32 or bfloat16, with something in them: what passes of rows take."""
    first = arrays[0].dtype
    if first is _F32 or first.name != "bfloat16":
        return is_dense(*arrays)
    return all(a.dtype == first and a.flags.c_contiguous and a.size for a in arrays)


def float64(a: Array) -> Array:
    """``a`` as C-contiguous float64."""
    return a if a.dtype == _F64 and a.flags.c_contiguous else np.ascontiguousarray(a, dtype=np.float64)


def float32(a: Array) -> Array:
    """``a`` as C-contiguous float32."""
    return a if a.dtype == _F32 and a.flags.c_contiguous else np.ascontiguousarray(a, dtype=np.float32)
