"""How much memory there is, whether a program can fit at all, and what a process that has started may do without."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from contextlib import suppress
from math import prod
from pathlib import Path

from lbpar.engine.base import Engine
from lbpar.errors import EngineError
from lbpar.program.steps import Program
from lbpar.text import human_bytes

SCRATCH = 8 << 20
"""Bytes for what kernels of a device write between two of them, such as partial sums, and for rounding arrays' sizes up: without them an array
that was foretold finds no piece that is large enough."""


def node_memory() -> int:
    """Bytes that this process could get at most: the node's, or what a container, a batch system or ``ulimit -v`` leaves of it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    with suppress(OSError, IndexError):
        group = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().rsplit("::", 1)[1].strip().lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):
                limits.append(int((folder / "memory.max").read_text()))
    return min(limits)


def check_room(program: Program, engine: Engine) -> None:
    """Raise EngineError if one process alone would need more memory than its node, or its GPU, has."""
    room, item = engine.capacity or node_memory(), engine.dtype.itemsize
    if 3 * sum(prod(b.layout.local_shape(0)) * item for b in program.buffers.values()) < room:
        return  # however long each array lived, and were it packed and received, too
    from lbpar.cost.memory import memory

    halves = engine.activations.itemsize == 2
    found = memory(program, engine.activations.name, "sgd", halves=halves, copies=engine.volume_copies)
    needed = found.peak - found.reading - found.overhead
    if needed > room:
        name, size = next(iter(found.largest.items()))
        raise EngineError(
            f"memory: one process needs at least {human_bytes(needed)} (the largest array is {name} with {human_bytes(size)}), but "
            f"there are {human_bytes(room)} on this {'GPU' if engine.capacity else 'node'}; use more processes and split larger layers, a smaller batch, or a smaller network."
        )


def reserve_arrays(engine: Engine, program: Program, rank: int, optimizer: str) -> None:
    """Let an engine that takes memory in one stretch do so, as much as a rank's arrays are foretold to need in training."""
    if engine.reserves:
        from lbpar.cost.memory import memory_of_rank

        halves = engine.activations.itemsize == 2
        found = memory_of_rank(
            program, rank, engine.activations.name, optimizer, halves=halves, copies=engine.volume_copies
        )
        engine.reserve(found.arrays + SCRATCH)


_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-.p \S+ \S+ [1-9]\d* .*")
_DONTNEED = 4  # of Linux' madvise


def leave_libraries() -> None:
    """Let go of the pages of libraries that this process has only read so far; those that it needs again come back by themselves.

    Loading a library runs code all over it, and Linux puts the neighbours of every page that is touched into the process, too: of oneDNN, 11 MB
    before the first call. All of it counts as each process' own where tools, and batch systems with memory limits, add up what is
    resident. Does nothing where there is no ``/proc/self/smaps``.
    """
    mine: list[tuple[int, int]] = []
    with suppress(OSError), open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
        found = None
        for line in lines:
            if line[0] in "0123456789abcdef":
                found = _MAPPING.match(line)
            elif (
                found and line.startswith("Anonymous:") and line.split()[1] == "0"
            ):  # what was written to would be lost
                mine.append((int(found[1], 16), int(found[2], 16)))
    if mine:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for start, end in mine:  # a refusal harms nothing
            madvise(start, end - start, _DONTNEED)
