"""How much memory there is, and whether a program can fit at all: asked before anything is allocated."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from math import prod
from pathlib import Path

import numpy as np

from lbpar.errors import EngineError
from lbpar.program.steps import Program
from lbpar.text import human_bytes


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


def check_room(program: Program, dtype: str) -> None:
    """Raise EngineError if one process alone would need more memory than its node has."""
    room, item = node_memory(), np.dtype(dtype).itemsize
    if 3 * sum(prod(b.layout.local_shape(0)) * item for b in program.buffers.values()) < room:
        return  # however long each array lived, and were it packed and received, too
    from lbpar.cost.memory import memory

    found = memory(program, dtype, "sgd")
    needed = found.peak - found.reading - found.overhead
    if needed > room:
        name, size = next(iter(found.largest.items()))
        raise EngineError(
            f"memory: one process needs at least {human_bytes(needed)} (the largest array is {name} with {human_bytes(size)}), but "
            f"there are {human_bytes(room)} on this node; use more processes and split larger layers, a smaller batch, or a smaller network."
        )
