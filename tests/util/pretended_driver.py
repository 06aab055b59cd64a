"""The real CuPy on a pretended CUDA driver: its compiled arrays, pools, streams, events, kernels and graphs run where there is no GPU.

All that CuPy asks of CUDA goes through two of its modules, `runtime` and `driver`. Their functions are replaced (`cython_functions`) before its
other modules are imported: memory is the host's, and kernels are those of ``kernels/``, run by the emulation from the very arguments that
CuPy passes. What CuPy makes of our calls, and what it tells us, is then its own doing, and no stand-in's.

Limits: everything runs at once, in the order of calls, so that no wait that is left out shows (`fake_cupy` is for that). Nothing is compiled for a
device. cuBLAS, cuDNN and NCCL are not there. A process keeps what `install` did: ``python -m tests.util.pretended_driver MODULE:FUNCTION ARGUMENTS``
is one that imports MODULE and calls FUNCTION with the machine and its arguments.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from typing import Any

import numpy as np

from tests.cuda.emulator import Emulator
from tests.util.cython_functions import kept, replace

ALIGNMENT, GUARD, POISON = 512, 64, 0xFF
"""Bytes on whose multiples memory begins, bytes behind it that nobody may write, and what it holds before it is written and when it was given
back: no number, in every type of floats."""

# Numbers of CUDA's errors, kinds of copies and attributes.
_INVALID_VALUE, _OUT_OF_MEMORY, _INVALID_HANDLE = 1, 2, 400
_NO_CAPTURE, _NOT_WHILE_CAPTURING, _CAPTURE_INVALID = 401, 900, 901
_FROM_HOST, _TO_HOST = 1, 2
_ATTRIBUTES = {20: 0, 75: 9, 76: 0, 115: 1}
"""Of the device: compute mode (default), compute capability (9 and 0), whether it has pools of its own."""
_SHARED_AT_MOST = 8
"""The attribute of a kernel that says how much shared memory it may get, of which it has `_SHARED` unasked."""
_SHARED = 48 << 10


@dataclass
class Block:
    """Memory of the device."""

    whole: np.ndarray
    start: int
    nbytes: int

    @classmethod
    def of(cls, nbytes: int) -> Block:
        whole = np.full(nbytes + GUARD + ALIGNMENT, POISON, np.uint8)
        return cls(whole, -whole.ctypes.data % ALIGNMENT, nbytes)

    @property
    def address(self) -> int:
        return int(self.whole.ctypes.data) + self.start

    def clear(self) -> None:
        self.whole[self.start : self.start + self.nbytes] = POISON

    def written(self, start: int) -> bool:
        """Whether anything was, from so many bytes on to the end of the guard."""
        return bool((self.whole[self.start + start : self.start + self.nbytes + GUARD] != POISON).any())


@dataclass
class Stream:
    """A queue, all of whose work has been done, or what is recorded of it."""

    recorded: list[Callable[[], object]] | None = None
    invalid: bool = False


@dataclass
class Machine:
    """What the device holds, and what it did.

    Attributes
    ----------
    errors : module
        CuPy's, which has its errors.
    memory : int
        Bytes that it has.
    held : int
        Bytes that were asked for and not given back.
    launches : Counter of str
        Kernels that were started or recorded, by name.
    graphs_launched : int
        How often one was.
    """

    errors: Any
    memory: int
    held: int = 0
    launches: Counter[str] = field(default_factory=Counter)
    graphs_launched: int = 0
    blocks: dict[int, Block] = field(default_factory=dict)
    given_back: list[Block] = field(default_factory=list)
    streams: dict[int, Stream] = field(default_factory=dict)

    def check(self) -> None:
        """Raise if something wrote beside its memory, or to what had been given back (which stays mapped)."""
        assert not any(b.written(b.nbytes) for b in self.blocks.values()), "something wrote behind its memory"
        assert not any(b.written(0) for b in self.given_back), "something wrote to memory that had been given back"

    def inside(self, address: int, nbytes: int) -> None:
        """Refuse what is not memory of the device."""
        if not any(a <= address and address + nbytes <= a + b.nbytes for a, b in self.blocks.items()):
            raise self.errors.CUDARuntimeError(_INVALID_VALUE)

    def stream(self, handle: int) -> Stream:
        assert handle, "work in the default stream"
        return self.streams[handle]

    def put(self, handle: int, work: Callable[[], object]) -> None:
        """Do some work of a stream, or record it."""
        stream = self.stream(handle)
        if stream.recorded is None:
            work()
        elif stream.invalid:
            raise self.errors.CUDARuntimeError(_CAPTURE_INVALID)
        else:
            stream.recorded.append(work)

    def ask(self, handle: int) -> None:
        """The host wants to know how far a stream is."""
        stream = self.stream(handle)
        if stream.recorded is not None:
            stream.invalid = True
            raise self.errors.CUDARuntimeError(_NOT_WHILE_CAPTURING)


class _Thread(threading.local):
    device = 0


class Runtime:
    """What CuPy's module `runtime` asks of CUDA, under its names."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._thread, self._handles = machine, _Thread(), count(0x1000)
        self._pinned, self._times = dict[int, np.ndarray](), dict[int, float]()
        self._graphs = dict[int, list[Callable[[], object]]]()

    def _ensure_context(self) -> None:
        """There is nothing to set up."""

    def getDeviceCount(self) -> int:
        return 1

    def getDevice(self) -> int:
        return self._thread.device

    def setDevice(self, device: int) -> None:
        assert device == 0
        self._thread.device = device

    def driverGetVersion(self) -> int:
        return 12090

    def memGetInfo(self) -> tuple[int, int]:
        return self._machine.memory - self._machine.held, self._machine.memory

    def deviceGetAttribute(self, attribute: int, device: int) -> int:
        return _ATTRIBUTES[attribute]

    def deviceGetPCIBusId(self, device: int) -> str:
        return f"0000:{device:02x}:00.0"

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        return {"name": b"Pretended", "major": 9, "minor": 0, "multiProcessorCount": 4}

    def malloc(self, nbytes: int) -> int:
        if self._machine.held + nbytes > self._machine.memory:
            raise self._machine.errors.CUDARuntimeError(_OUT_OF_MEMORY)
        block = Block.of(nbytes)
        self._machine.held += nbytes
        self._machine.blocks[block.address] = block
        return block.address

    def free(self, address: int) -> None:
        block = self._machine.blocks.pop(address)
        assert not block.written(block.nbytes), "something wrote behind its memory"
        block.clear()
        self._machine.held -= block.nbytes
        self._machine.given_back.append(block)

    def hostAlloc(self, nbytes: int, flags: int) -> int:
        piece = np.full(nbytes, POISON, np.uint8)
        self._pinned[piece.ctypes.data] = piece
        return int(piece.ctypes.data)

    def freeHost(self, address: int) -> None:
        del self._pinned[address]

    def memcpyAsync(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        if kind != _TO_HOST:
            self._machine.inside(to, nbytes)
        if kind != _FROM_HOST:
            self._machine.inside(source, nbytes)
        self._machine.put(stream, lambda: ctypes.memmove(to, source, nbytes))

    def memsetAsync(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self._machine.inside(address, nbytes)
        self._machine.put(stream, lambda: ctypes.memset(address, value, nbytes))

    def streamCreateWithFlags(self, flags: int) -> int:
        handle = next(self._handles)
        self._machine.streams[handle] = Stream()
        return handle

    def streamCreateWithPriority(self, flags: int, priority: int) -> int:
        return self.streamCreateWithFlags(flags)

    def streamDestroy(self, stream: int) -> None:
        del self._machine.streams[stream]

    def streamSynchronize(self, stream: int) -> None:
        self._machine.ask(stream)

    def streamQuery(self, stream: int) -> int:
        self._machine.ask(stream)
        return 0

    def streamWaitEvent(self, stream: int, event: int, *flags: int) -> None:
        assert event in self._times, "an event that was not recorded"
        self._machine.stream(stream)

    def eventCreateWithFlags(self, flags: int) -> int:
        return next(self._handles)

    def eventDestroy(self, event: int) -> None:
        self._times.pop(event, None)

    def eventRecord(self, event: int, stream: int) -> None:
        self._machine.stream(stream)
        self._times[event] = time.perf_counter()

    def eventSynchronize(self, event: int) -> None:
        assert event in self._times, "an event that was not recorded"

    def eventQuery(self, event: int) -> int:
        self.eventSynchronize(event)
        return 0

    def eventElapsedTime(self, start: int, end: int) -> float:
        if not {start, end} <= self._times.keys():
            raise self._machine.errors.CUDARuntimeError(_INVALID_HANDLE)
        return (self._times[end] - self._times[start]) * 1e3

    def streamBeginCapture(self, stream: int, *mode: int) -> None:
        assert self._machine.stream(stream).recorded is None, "a capture in a capture"
        self._machine.streams[stream] = Stream(recorded=[])

    def streamIsCapturing(self, stream: int) -> bool:
        return stream != 0 and self._machine.stream(stream).recorded is not None

    def streamEndCapture(self, stream: int) -> int:
        ended, self._machine.streams[stream] = self._machine.stream(stream), Stream()
        if ended.recorded is None:
            raise self._machine.errors.CUDARuntimeError(_NO_CAPTURE)
        if ended.invalid:
            raise self._machine.errors.CUDARuntimeError(_CAPTURE_INVALID)
        return self._graph(ended.recorded)

    def graphInstantiate(self, graph: int) -> int:
        return self._graph(self._graphs[graph])

    def graphLaunch(self, graph: int, stream: int) -> None:
        self._machine.graphs_launched += 1
        for work in self._graphs[graph]:
            self._machine.put(stream, work)

    def graphDestroy(self, graph: int) -> None:
        del self._graphs[graph]

    def graphExecDestroy(self, graph: int) -> None:
        del self._graphs[graph]

    def _graph(self, work: list[Callable[[], object]]) -> int:
        handle = next(self._handles)
        self._graphs[handle] = work
        return handle


class Driver:
    """What CuPy's module `driver` asks of CUDA, under its names: kernels."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._handles = machine, count(0x1000)
        self._modules, self._functions = dict[int, dict[str, Any]](), dict[int, tuple[Emulator, str]]()
        self._emulators, self._shared = dict[tuple[str, ...], Emulator](), dict[int, int]()

    def ctxGetCurrent(self) -> int:
        return 1

    def moduleLoadData(self, binary: bytes) -> int:
        handle = next(self._handles)
        self._modules[handle] = json.loads(binary)
        return handle

    def moduleUnload(self, module: int) -> None:
        del self._modules[module]

    def moduleGetFunction(self, module: int, name: str) -> int:
        """By its name in the binary."""
        file, names = self._modules[module]["file"], self._modules[module]["names"]
        key, handle = (file, *names.values()), next(self._handles)
        if key not in self._emulators:
            self._emulators[key] = Emulator(file, list(names.values()))
        self._functions[handle] = self._emulators[key], names[name]
        return handle

    def funcGetAttribute(self, attribute: int, function: int) -> int:
        assert attribute == _SHARED_AT_MOST
        return self._shared.get(function, _SHARED)

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        assert attribute == _SHARED_AT_MOST
        self._shared[function] = value

    def launchKernel(
        self, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int, stream: int, arguments: int, extra: int
    ) -> None:  # fmt: skip
        """As CUDA does, take copies of the arguments, for the caller lets go of them."""
        emulator, name = self._functions[function]
        assert shared <= self._shared.get(function, _SHARED), f"{name}: {shared} bytes of shared memory"
        sizes = [abs(size) for size in emulator.sizes(name)]
        given = (ctypes.c_void_p * len(sizes)).from_address(arguments)
        held = [np.frombuffer(ctypes.string_at(at, n), np.uint8) for at, n in zip(given, sizes, strict=True) if at]
        assert len(held) == len(sizes), f"{name}: an argument is missing"
        self._machine.launches[name] += 1
        grid, block = (gx, gy, gz), (bx, by, bz)
        self._machine.put(stream, lambda: emulator.launch_at(name, grid, block, [a.ctypes.data for a in held], shared))


class Program:
    """In the place of CuPy's compiler: what it makes says which kernels of which file there are, under other names, as a compiler's."""

    def __init__(
        self,
        src: str,
        name: str = "",
        headers: Iterable[str] = (),
        include_names: Iterable[str] = (),
        name_expressions: Iterable[str] | None = None,
        method: str = "ptx",
    ) -> None:
        self._source, self._names = src, tuple(name_expressions or ())

    def compile(self, options: Iterable[str] = (), log_stream: Any = None) -> tuple[bytes, dict[str, str]]:
        if not self._source:  # CuPy asks for the compiler's version so
            return b"// pretended\n", {}
        found = re.match(r"// kernels/(\w+\.cu)\n", self._source)
        assert found, "the first line of a source names its file"
        mangled = {name: f"_Z{i}{re.sub('[^a-z0-9]', '_', name)}" for i, name in enumerate(self._names)}
        binary = {"file": found[1], "names": {m: name for name, m in mangled.items()}}
        return json.dumps(binary).encode(), mangled


def install(memory: int = 1 << 30) -> Machine:
    """Let CuPy, which nobody has imported yet, find a device with so much memory."""
    assert not {"cupy", "cupy_backends"} & sys.modules.keys(), "CuPy is already there"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # one that is there stays out of it
    cache = tempfile.TemporaryDirectory(prefix="lbpar-cupy-")
    os.environ["CUPY_CACHE_DIR"] = cache.name
    runtime = import_module("cupy_backends.cuda.api.runtime")
    machine = Machine(runtime, memory)
    kept.append(cache)
    replace(runtime, Runtime(machine))
    replace(import_module("cupy_backends.cuda.api.driver"), Driver(machine))
    import_module("cupy.cuda.compiler").__dict__["_NVRTCProgram"] = Program
    return machine


def main() -> None:
    from tests.util import pretended_driver

    call, *arguments = sys.argv[1:]
    module, _, function = call.partition(":")
    machine = pretended_driver.install()
    getattr(import_module(module), function)(machine, *arguments)
    machine.check()


if __name__ == "__main__":
    main()
