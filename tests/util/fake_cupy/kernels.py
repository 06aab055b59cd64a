"""`RawModule`: kernels that the emulation runs, in their stream's order, with a watch on what they only read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.util.fake_cupy.machine import CUDADriverError, machine
from tests.util.fake_cupy.memory import MemoryPointer, ndarray
from tests.util.fake_cupy.streams import current

SHARED = 48 << 10
"""Bytes of shared memory that a kernel gets without asking."""

_modules: dict[tuple[str, tuple[str, ...]], Any] = {}


class RawModule:
    """Kernels of one source; its first line names the file."""

    def __init__(
        self,
        *,
        code: str,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        name_expressions: Sequence[str] | None = None,
        enable_cooperative_groups: bool = False,
    ) -> None:
        assert backend == "nvrtc"
        assert name_expressions, "kernels are asked for by name expressions"
        self.code, self.names = code, tuple(name_expressions)

    def get_function(self, name: str) -> RawKernel:
        assert name in self.names, f"{name} is not among the module's name expressions"
        found = re.match(r"// kernels/(\w+\.cu)\n", self.code)
        assert found, "the first line of a source names its file"
        key = (found[1], self.names)
        if key not in _modules:
            from tests.cuda.emulator import Emulator

            _modules[key] = Emulator(found[1], list(self.names))
        return RawKernel(_modules[key], name, _read_only(self.code, name))


class RawKernel:
    """One kernel."""

    def __init__(self, module: Any, name: str, read_only: tuple[bool, ...]) -> None:
        self._module, self.name, self._read_only = module, name, read_only
        self.max_dynamic_shared_size_bytes = SHARED

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        stream: Any = None,
    ) -> None:
        machine().check()
        grid, block = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        assert 0 < grid[0] < 1 << 31 and all(0 < n < 1 << 16 for n in grid[1:]), f"{self.name}: grid {grid}"
        assert all(n > 0 for n in block) and np.prod(block) <= 1024, f"{self.name}: block {block}"
        assert shared_mem <= self.max_dynamic_shared_size_bytes, f"{self.name}: {shared_mem} bytes of shared memory"
        assert len(args) == len(self._read_only), f"{self.name}: {len(args)} arguments, expected {len(self._read_only)}"
        where = stream or current()
        if where.recording is not None and where.recording.invalid:
            raise CUDADriverError(
                "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: operation failed due to a previous error during capture"
            )
        passed = [_argument(a) for a in args]
        read = [a._raw for a, only in zip(args, self._read_only, strict=True) if only and isinstance(a, ndarray)]
        written = [a._raw for a, only in zip(args, self._read_only, strict=True) if not only and isinstance(a, ndarray)]
        watched = [r for r in read if not any(np.may_share_memory(r, w) for w in written)]
        machine().launches[self.name] = machine().launches.get(self.name, 0) + 1

        def work() -> None:
            before = [r.tobytes() for r in watched]
            self._module.launch(self.name, grid, block, passed, shared_bytes=shared_mem)
            for array, old in zip(watched, before, strict=True):
                assert array.tobytes() == old, f"{self.name} wrote to what it should only read"

        where.queue.put(work)


def _argument(a: Any) -> Any:
    """As CuPy passes it: arrays as addresses, numbers of Python in 64 bits, NumPy's as they are."""
    if isinstance(a, ndarray | MemoryPointer):
        return int(a.data.ptr if isinstance(a, ndarray) else a.ptr)
    if a is None:
        return 0
    if isinstance(a, bool):
        return np.bool_(a)
    if isinstance(a, int):
        return np.int64(a)
    if isinstance(a, float):
        return np.float64(a)
    if isinstance(a, np.ndarray):
        assert a.size == 1, "an array of the host"
        return a.copy()
    assert isinstance(a, np.generic), type(a)
    return a


def _read_only(code: str, name: str) -> tuple[bool, ...]:
    """Per parameter of a kernel, whether it points to what is only read."""
    plain = re.sub(r"//[^\n]*|/\*.*?\*/", "", code, flags=re.DOTALL)
    found = re.search(rf"\b{name.split('<')[0]}\s*\(([^{{}};]*)\)\s*\{{", plain)
    assert found, f"{name} is not in its source"
    return tuple("*" in p and re.search(r"\bconst\b[^*]*\*", p) is not None for p in _split(found[1]))


def _split(parameters: str) -> list[str]:
    """Parameters, whose types may hold commas in angle brackets."""
    parts, depth = [""], 0
    for c in parameters:
        depth += (c == "<") - (c == ">")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return parts
