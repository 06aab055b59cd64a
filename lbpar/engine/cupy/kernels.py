"""The CUDA kernels: which there are, for which element types, and how they are loaded and launched.

A module is one file of ``kernels/`` compiled for one element type, when the first of its kernels is launched. CuPy keeps compiled
code in a folder of the user's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lbpar.engine.cupy.names import GROUPS
from lbpar.errors import EngineError
from lbpar.shipped import shipped

TYPES = {
    "float32": "float", "float64": "double", "float16": "__half", "bfloat16": "__nv_bfloat16", "int64": "i64", "int32": "int",
    "int16": "short", "int8": "signed char", "uint8": "u8", "uint16": "u16", "uint32": "u32",
}  # fmt: skip
"""Names of element types in the kernels."""

THREADS = 256
"""Threads of a block where a kernel does not ask for another number."""

INDEX_LIMIT = 2**31 - 1 - (1 << 24)
"""Largest index in 32 bits; what is left lets a thread look beyond its last element."""

SHARED = 48 << 10
"""Bytes of shared memory that a kernel gets without asking for more."""

OPTIONS = ("-std=c++17", "-default-device")
"""What the compiler is told; lambdas without annotation run on the device."""


def folder() -> Path:
    """Where the sources are."""
    header = shipped("kernels/common.cuh")
    if header is None:
        raise EngineError(
            "engine.name: cupy: the CUDA sources of lbpar (kernels/*.cu) are not installed; install lbpar again."
        )
    return header.parent


@cache
def source(file: str) -> str:
    """One file with the headers that it includes, each once: CuPy's cache goes by this text."""
    seen: set[str] = set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (folder() / name).read_text(encoding="utf-8").replace("#pragma once\n", "")
        return re.sub(r'^#include "([\w.]+)"$', lambda m: expand(m[1]), text, flags=re.MULTILINE)

    return f"// kernels/{file}\n{expand(file)}"


class Kernels:
    """Loads and launches kernels on one stream."""

    def __init__(self, cupy: Any, stream: Any) -> None:
        self._cupy, self._stream = cupy, stream
        self._functions: dict[tuple[str, str], Any] = {}
        self._most = 32 * cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["multiProcessorCount"]

    def function(self, file: str, name: str) -> Any:
        """A kernel by its name expression."""
        found = self._functions.get((file, name))
        if found is None:
            names = next((group for group in GROUPS.get(file, ()) if name in group), (name,))
            try:
                module = self._cupy.RawModule(code=source(file), options=OPTIONS, name_expressions=names)
                for n in names:
                    self._functions[file, n] = module.get_function(n)
            except OSError as error:
                raise EngineError(
                    f"engine.name: cupy: the kernels of {file} cannot be kept: {error}. Set CUPY_CACHE_DIR to a folder on a file system with room, or "
                    "CUPY_CACHE_IN_MEMORY=1."
                ) from error
            except Exception as error:
                raise EngineError(
                    f"engine.name: cupy: the kernels of {file} cannot be compiled or loaded: {str(error).strip()[-2000:]}. Where libnvrtc or "
                    "headers are missing: pip install 'lbpar[cuda13]' or 'lbpar[cuda12]', which bring them (cupy-cuda13x[ctk])."
                ) from error
            found = self._functions[file, name]
        return found

    def blocks(self, work: int, threads: int = THREADS) -> int:
        """Blocks of a kernel whose threads stride over ``work`` elements."""
        return min(-(-work // threads), self._most)

    def launch(
        self, file: str, name: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0
    ) -> None:
        """Run a kernel; nothing where the grid is empty."""
        if 0 not in grid:
            function = self.function(file, name)
            if shared > SHARED and function.max_dynamic_shared_size_bytes < shared:
                function.max_dynamic_shared_size_bytes = shared
            function(tuple(grid), tuple(block), tuple(args), shared_mem=shared, stream=self._stream)


def kind_of(dtype: Any) -> str:
    """Name of an element type in the kernels."""
    try:
        return TYPES[np.dtype(dtype).name]
    except KeyError:
        raise EngineError(
            f"engine.name: cupy: no kernel takes {np.dtype(dtype).name}, expected one of {', '.join(TYPES)}."
        ) from None


def index_type(largest: int) -> str:
    """Type of the kernels' index arithmetic where no index is above ``largest``."""
    return "i32" if largest <= INDEX_LIMIT else "i64"


def address(a: Any) -> int:
    """Where an array of the device begins."""
    return int(a.data.ptr)
