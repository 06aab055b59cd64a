"""The pretended devices: memory with its addresses, the scheduler of all streams, what was asked of them."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.util.queues import POISON, Scheduler, poison

GUARD = 64
"""Bytes behind every block that nobody may write."""

ALIGNMENT = 512


class CUDARuntimeError(RuntimeError):
    """As CuPy's, with the name of the error in its text."""


class CUDADriverError(RuntimeError):
    """As CuPy's, of the interface by which kernels are launched."""


class Block:
    """Bytes at an address, of a device or pinned on the host. They stay mapped, so that late work finds poison there."""

    def __init__(self, whole: np.ndarray, start: int, nbytes: int, kind: str) -> None:
        self.whole, self.data = whole, whole[start : start + nbytes + GUARD]
        self.address, self.nbytes, self.kind = self.data.ctypes.data, nbytes, kind
        self.used = nbytes

    @property
    def end(self) -> int:
        """Where the next one begins, if there is one in the same memory."""
        return self.address + len(self.data)

    def clear(self, used: int) -> None:
        """Nobody refers to its first so many bytes any more; raise if those behind have changed."""
        if (self.data[used:] != POISON).any():
            raise AssertionError(f"something wrote behind a block of {used} bytes")
        poison(self.data)


class Machine:
    """What one test's devices hold.

    Attributes
    ----------
    devices : int
        How many there are.
    missing : str
        "", or what a call finds amiss: "driver", "device".
    memory : int
        Bytes of each device.
    exclusive : bool
        It takes one process at a time.
    broken : set of str
        What the device leaves out, for tests of tests: "record", "wait", "synchronize".
    """

    def __init__(self, devices: int = 1) -> None:
        self.scheduler = Scheduler()
        self.devices, self.missing, self.memory, self.held = devices, "", 1 << 30, 0
        self._threads = threading.local()
        self.capability, self.exclusive = (9, 0), False
        self.broken: set[str] = set()
        self.launches: dict[str, int] = {}
        self._addresses: list[int] = []
        self._blocks: list[Block] = []
        self._given_back: list[Block] = []
        self.on_launch: Callable[[str, Any], None] | None = None

    @property
    def device(self) -> int:
        """That of the calling thread: the first until it takes another."""
        return getattr(self._threads, "device", 0)

    @device.setter
    def device(self, device: int) -> None:
        self._threads.device = device

    def block(self, nbytes: int, kind: str) -> Block:
        """New memory."""
        if kind == "device":
            if self.held + nbytes > self.memory:
                raise MemoryError(nbytes)
            self.held += nbytes
        whole = np.empty(nbytes + GUARD + ALIGNMENT, np.uint8)
        poison(whole)
        return self._placed(Block(whole, -whole.ctypes.data % ALIGNMENT, nbytes, kind))

    def free(self, address: int) -> None:
        """Memory of the device that begins there, and is in one piece, is somebody else's from now on."""
        found = self.find(address, 0)
        assert found is not None and found[0].address == address
        self.held -= found[0].nbytes
        self._forget(found[0])
        self._given_back.append(found[0])

    def cut(self, block: Block, nbytes: int) -> tuple[Block, Block]:
        """Two blocks in the place of one, the first of so many bytes."""
        start, length = block.address - block.whole.ctypes.data, nbytes + GUARD
        self._forget(block)
        first = self._placed(Block(block.whole, start, nbytes, block.kind))
        return first, self._placed(Block(block.whole, start + length, block.nbytes - length, block.kind))

    def joined(self, first: Block, second: Block) -> Block:
        """One block in the place of two that follow each other."""
        self._forget(first)
        self._forget(second)
        start = first.address - first.whole.ctypes.data
        return self._placed(Block(first.whole, start, first.nbytes + GUARD + second.nbytes, first.kind))

    def _placed(self, block: Block) -> Block:
        at = bisect_right(self._addresses, block.address)
        self._addresses.insert(at, block.address)
        self._blocks.insert(at, block)
        return block

    def _forget(self, block: Block) -> None:
        at = bisect_right(self._addresses, block.address) - 1
        assert self._blocks[at] is block
        del self._addresses[at], self._blocks[at]

    def find(self, address: int, nbytes: int) -> tuple[Block, np.ndarray] | None:
        """The block in which so many bytes lie, and those bytes; None for memory that is not of CUDA."""
        at = bisect_right(self._addresses, address) - 1
        if at < 0 or address >= self._addresses[at] + len(self._blocks[at].data):
            return None
        block, start = self._blocks[at], address - self._addresses[at]
        if start + nbytes > block.used:
            raise CUDARuntimeError("cudaErrorInvalidValue: beyond the end of a block")
        return block, block.data[start : start + nbytes]

    def check(self) -> None:
        """What every call of CUDA finds first."""
        if self.missing == "driver":
            raise CUDARuntimeError(
                "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
            )
        if self.missing == "device" or not self.devices:
            raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")


_machine = Machine()


def machine() -> Machine:
    """The machine of the test that runs."""
    return _machine


def new_machine(devices: int = 1) -> Machine:
    """A machine that holds nothing yet."""
    global _machine
    _machine = Machine(devices)
    return _machine
