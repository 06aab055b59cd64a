"""NVIDIA's run-time compiler through ctypes: code for any architecture, without a device or a driver, and what it takes of one."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lbpar.engine.cupy.kernels import OPTIONS, source

ARCHITECTURES = {"sm_70": 80, "sm_80": 108, "sm_90": 132, "sm_100": 148}
"""With the multiprocessors of V100, A100, H100 and B200."""


class CompileError(Exception):
    """What the compiler said."""


@dataclass(frozen=True)
class Resources:
    """Of one kernel for one architecture; sizes in bytes. ``spilled`` are stores of registers to memory, ``stack`` is local memory."""

    name: str
    architecture: str
    registers: int
    shared: int
    stack: int
    spilled: int


@cache
def library() -> tuple[ctypes.CDLL, Path] | None:
    """The wheels' compiler and headers, None where they are not installed."""
    spec = find_spec("nvidia")
    for folder in map(Path, (spec.submodule_search_locations or ()) if spec else ()):
        headers = folder / "cuda_runtime" / "include"
        for path in sorted(folder.glob("cuda_nvrtc/lib/libnvrtc.so.*")):
            if (headers / "cuda_bf16.h").exists():
                return ctypes.CDLL(str(path)), headers
    return None


def compile_kernels(file: str, names: Sequence[str], architecture: str) -> list[Resources]:
    """Compile instantiations of the kernels of one file of ``kernels/``, as `lbpar.engine.cupy.kernels` does through CuPy.

    Raises
    ------
    CompileError
        With the compiler's log.
    """
    found = library()
    assert found
    nvrtc, headers = found
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source(file).encode(), file.encode(), 0, None, None))
    try:
        for name in names:
            _check(nvrtc.nvrtcAddNameExpression(program, name.encode()))
        flags = [f"-arch={architecture}", *OPTIONS, "-ftz=true", f"-I{headers}", "--ptxas-options=-v"]  # CuPy adds -ftz
        given = (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags))
        failed = nvrtc.nvrtcCompileProgram(program, len(flags), given)
        log = _log(nvrtc, program)
        if failed:
            raise CompileError(f"{file} for {architecture}:\n{log[:8000]}")
        report = _report(log)
        lowered = ctypes.c_char_p()
        rows = []
        for name in names:
            _check(nvrtc.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(lowered)))
            rows.append(Resources(name, architecture, *report[(lowered.value or b"").decode()]))
        return rows
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _report(log: str) -> dict[str, tuple[int, int, int, int]]:
    """Registers, shared memory, stack and spills per kernel."""
    report = {}
    for part in log.split("Compiling entry function ")[1:]:
        name = part.split("'")[1]
        numbers = [
            re.search(pattern, part)
            for pattern in (
                r"Used (\d+) registers",
                r"(\d+) bytes smem",
                r"(\d+) bytes stack",
                r"(\d+) bytes spill stores",
            )
        ]
        report[name] = tuple(int(n[1]) if n else 0 for n in numbers)
    return report


def _log(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(nvrtc.nvrtcGetProgramLog(program, text))
    return text.value.decode()


def _check(status: int) -> None:
    if status:
        raise CompileError(f"nvrtc status {status}")
