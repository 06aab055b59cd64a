"""The CUDA kernels of ``kernels/`` compiled as C++ and run on the CPU, thread by thread: see ``emulation/cuda_on_cpu.h``.

``Emulator("pack.cu", ["pack_pieces<float>"])`` compiles with the machine's g++, once: libraries are kept in ``LBPAR_CACHE`` or
the temporary folder. With ``EMULATOR_SANITIZE=1`` in the environment all of them are built under the address and undefined-behaviour
sanitizers; libasan must then be loaded before Python (`sanitized`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lbpar.engine.cupy.names import GROUPS
from lbpar.engine.native.cache import find, keep, private, temporary

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels"
SANITIZE = "EMULATOR_SANITIZE"
ORDER = "EMULATOR_ORDER"
"""Environment variable: 0 runs threads and blocks from first to last, 1 from last to first, others scatter threads."""

_FLAGS = ("-std=c++17", "-O1", "-g0", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", "-w")
_FLAGS += ("-fno-gnu-unique", "-fvisibility=hidden")
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1")
_SHARED = re.compile(
    r"__shared__\s+(?P<align>__align__\(\w+\)\s+)?(?P<type>[\w:]+(?:<[^;]*?>)?)\s+(?P<name>\w+)(?P<dims>(?:\[[^;]*?\])*);"
)
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\(\w+\)\s+)?(?P<type>[\w: ]+?)\s+(?P<name>\w+)\[\];")
_lock = threading.Lock()

RAN: set[tuple[str, str]] = set()
"""Kernels that have run in this process, by file and name."""


class EmulationError(Exception):
    """A kernel did what no device allows, or was called with the wrong arguments."""


class Emulator:
    """Some instantiations of one file's kernels.

    Parameters
    ----------
    source_name : file in ``kernels/``, or a path
    name_expressions : such as ``pack_pieces<float>``
    sanitize : build under sanitizers; in any case when the environment says so
    defines : macros
    replace : texts in the source or the headers to be replaced by others, each there exactly once (for tests of tests)
    """

    def __init__(
        self,
        source_name: str | Path,
        name_expressions: Sequence[str],
        sanitize: bool = False,
        defines: Mapping[str, Any] | None = None,
        replace: Mapping[str, str] | None = None,
    ) -> None:
        self._file, self.names = str(source_name), tuple(dict.fromkeys(name_expressions))
        alone = bool(defines or replace)
        self._functions: dict[str, tuple[ctypes.CDLL, int]] = {}
        for names in [self.names] if alone else _groups(str(source_name), self.names):
            library = ctypes.CDLL(str(_built(KERNELS / source_name, names, sanitize, defines or {}, replace or {})))
            self._functions |= {name: (library, i) for i, name in enumerate(names)}
        self._sizes: dict[str, list[int]] = {}
        self.launched: set[str] = set()

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        shared_bytes: int = 0,
        order: int | None = None,
    ) -> None:
        """Run a kernel, as ``RawKernel.__call__``: arrays and ints of the host are pointers, NumPy scalars are values."""
        values = [_argument(name, i, arg, size) for i, (arg, size) in enumerate(self._matched(name, args))]
        self.launch_at(name, grid, block, [v.ctypes.data for v in values], shared_bytes, order)

    def launch_at(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        addresses: Sequence[int],
        shared_bytes: int = 0,
        order: int | None = None,
    ) -> None:
        """The same with arguments that lie somewhere already, as CUDA takes them."""
        self.launched.add(name)
        RAN.add((self._file, name))
        library, number = self._functions[name]
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        run = library[f"launch_{number}"]
        run.restype, run.argtypes = (
            ctypes.c_char_p,
            [ctypes.c_void_p] * 2 + [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p],
        )
        sizes = [np.array([*s, 1, 1, 1][:3], np.uint32) for s in (grid, block)]
        _check_shape(name, *map(list, sizes))
        if order is None:
            order = int(os.environ.get(ORDER, "0"))
        with _lock:
            error = run(*(s.ctypes.data for s in sizes), shared_bytes, order, pointers)
        if error:
            raise EmulationError(f"{name}, grid {tuple(grid)}, block {tuple(block)}: {error.decode()}")

    def sizes(self, name: str) -> list[int]:
        """Bytes of each of a kernel's arguments, negative for pointers."""
        if name not in self._sizes:
            library, number = self._functions[name]
            room = (ctypes.c_int * 64)()
            count = library[f"describe_{number}"](room)
            self._sizes[name] = list(room[:count])
        return self._sizes[name]

    def _matched(self, name: str, args: Sequence[Any]) -> list[tuple[Any, int]]:
        sizes = self.sizes(name)
        if len(sizes) != len(args):
            raise EmulationError(f"{name} takes {len(sizes)} arguments, {len(args)} were given")
        return list(zip(args, sizes, strict=True))


def _groups(file: str, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Names that are compiled together: those that the engine loads together, whoever asks for some of them, and the rest."""
    shared = [group for group in GROUPS.get(file, ()) if not set(group).isdisjoint(names)]
    rest = tuple(name for name in names if not any(name in group for group in shared))
    return [*shared, rest] if rest else shared


def _argument(name: str, i: int, arg: Any, size: int) -> np.ndarray:
    """The bytes of one argument; ``size`` is that of the parameter, negative for a pointer."""
    if isinstance(arg, np.ndarray) and arg.dtype.names is None:
        value = np.array(arg.ctypes.data, np.uint64)
        pointer = True
    elif isinstance(arg, (bytes, bytearray)):
        value, pointer = np.frombuffer(bytes(arg), np.uint8), False
    elif isinstance(arg, (np.generic, np.ndarray)):
        value, pointer = np.array(arg), size < 0 and np.asarray(arg).dtype.kind in "iu"
    elif isinstance(arg, (bool, float)):
        value, pointer = np.array(arg), False
    elif isinstance(arg, int):
        value, pointer = np.array(arg, np.int64), size < 0
    else:
        raise EmulationError(f"{name}, argument {i}: {type(arg).__name__}, expected an array, a NumPy scalar or bytes")
    if pointer != (size < 0) or value.nbytes != abs(size):
        expected = "a pointer" if size < 0 else f"a value of {size} bytes"
        raise EmulationError(
            f"{name}, argument {i}: {value.nbytes} bytes{' (a pointer)' * pointer}, expected {expected}"
        )
    return value


def _check_shape(name: str, grid: list[Any], block: list[Any]) -> None:
    threads = int(np.prod(block, dtype=np.int64))
    if not 0 < threads <= 1024 or block[2] > 64 or min(grid) < 1 or max(grid[1:]) > 65535 or grid[0] >= 1 << 31:
        raise EmulationError(f"{name}: no device takes a grid of {grid} with blocks of {block}")


def as_launched(source_name: str, names: Sequence[str], check: Callable[[Emulator], Any], **options: Any) -> None:
    """Run a check, and once more with no other kernels than it launched, built with options of `Emulator`."""
    right = Emulator(source_name, names)
    check(right)
    check(Emulator(source_name, sorted(right.launched), **options))


def sanitized(command: Sequence[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command with sanitizers: every `Emulator` in it is built under them."""
    libraries = [_call([_compiler(), f"-print-file-name={name}"]).strip() for name in ("libasan.so", "libubsan.so")]
    env = {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        SANITIZE: "1",
        **more,
    }
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def compiler_found() -> bool:
    """Whether this machine can emulate at all."""
    return shutil.which(_compiler().split()[0]) is not None


def build(source: Path, made: Path, flags: Sequence[str]) -> None:
    """Compile one file of C++."""
    _call([*_compiler().split(), *flags, "-o", str(made), str(source)])


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


@cache
def _version(compiler: str) -> str:
    return _call([*compiler.split(), "--version"])


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationError(f"{' '.join(map(str, command))}\n{done.stderr[-6000:]}")
    return done.stdout


def complaints(
    source_name: str, name_expressions: Sequence[str], replace: Mapping[str, str] | None = None
) -> list[str]:
    """The compiler's warnings of numbers that lose bits by being stored."""
    flags = [
        "-std=c++17",
        "-S",
        "-O0",
        "-o",
        os.devnull,
        "-Wconversion",
        "-Wno-float-conversion",
        "-Wno-sign-conversion",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for file, content in _files(KERNELS / source_name, name_expressions, replace or {}).items():
            (Path(folder) / file).write_text(content)
        command = [*_compiler().split(), *flags, f"-I{HERE / 'emulation'}", f"{folder}/main.cpp"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return sorted({line.split("/")[-1] for line in done.stderr.splitlines() if "warning:" in line})


def _files(source: Path, names: Sequence[str], replace: Mapping[str, str]) -> dict[str, str]:
    """What the compiler gets for the kernels of one file: the file, all headers, and launchers."""
    files = dict(_included(source))
    for old, new in replace.items():
        if (found := sum(text.count(old) for text in files.values())) != 1:
            raise EmulationError(f"{source.name} and the headers have {found} times {old!r}, expected once")
        files = {name: text.replace(old, new) for name, text in files.items()}
    files = {name: _for_the_cpu(name, content) for name, content in files.items()}
    launchers = "\n".join(f"EMULATED_KERNEL({i}, {name})" for i, name in enumerate(names))
    files["main.cpp"] = f'#include "cuda_on_cpu.h"\n#include "{source.name}"\n{launchers}\n'
    return files


def _included(file: Path) -> Iterator[tuple[str, str]]:
    """A file and the headers of the kernels that it includes."""
    text = file.read_text()
    yield file.name, text
    for name in re.findall(r'^#include "([\w.]+)"$', text, flags=re.MULTILINE):
        if (KERNELS / name).exists():
            yield from _included(KERNELS / name)


def _built(
    source: Path, names: tuple[str, ...], sanitize: bool, defines: Mapping[str, Any], replace: Mapping[str, str]
) -> Path:
    files = _files(source, names, replace)
    flags = [*_FLAGS, *(f"-D{k}={v}" for k, v in defines.items())]
    if sanitize or os.environ.get(SANITIZE, "0") != "0":
        flags += _SANITIZERS
    headers = {p.name: p.read_text() for p in sorted((HERE / "emulation").glob("*.h"))}
    digest = hashlib.sha256(repr((files, headers, flags, _version(_compiler()))).encode()).hexdigest()
    folder = private(
        Path(os.environ.get("LBPAR_CACHE") or Path(tempfile.gettempdir()) / f"lbpar-emulated-{os.getuid()}")
    )
    name = f"emulated-{source.stem}-{digest[:16]}"
    if found := find(folder, name):
        return found
    with temporary(folder) as part:
        for file, content in files.items():
            (Path(part) / file).write_text(content)
        made = Path(part) / "made.so"
        build(Path(part) / "main.cpp", made, [*flags, f"-I{HERE / 'emulation'}"])
        return keep(folder, name, made)


def _for_the_cpu(name: str, text: str) -> str:
    """Shared variables as references to memory of the block; the lines keep their numbers."""
    count = 0

    def variable(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        kind = f"{match['name']}_shared_type"
        number = int(hashlib.sha256(name.encode()).hexdigest()[:4], 16) * 1000 + count
        return (
            f"typedef {match['type']} {kind}{match['dims']}; "
            f"{kind}& {match['name']} = emulated::shared_variable<{kind}, {number}>();"
        )

    text = _DYNAMIC.sub(lambda m: f"{m['type']}* {m['name']} = emulated::dynamic_shared<{m['type']}>();", text)
    return _SHARED.sub(variable, text)
