"""Read this rank's block of a batch: exactly what each program input needs here, ghosts included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from lbpar.layout.runs import Box, box_size, indices
from lbpar.program.steps import Program

Array = Any


class Samples(Protocol):
    """What feeds are read from; a dataset is one."""

    def part(self, source: str) -> Samples:
        """What holds one of the network's inputs, or a target."""

    def read(self, samples: np.ndarray, box: Box) -> np.ndarray:
        """Boxes of the given samples' inputs."""

    def read_targets(self, samples: np.ndarray, box: Box) -> np.ndarray:
        """Boxes of the given samples' targets."""


def read_feeds(
    program: Program,
    rank: int,
    dataset: Samples,
    samples: np.ndarray,
    dtype: np.dtype[Any],
    look: Callable[[str, Array, np.ndarray], object] | None = None,
) -> dict[str, Array]:
    """This rank's arrays for all feeds of a program.

    Parameters
    ----------
    program : Program
        Of as many samples as given.
    rank : int
    dataset : Samples
        Read by hyperslab; an empty block reads nothing.
    samples : (n,) int64
        Global sample indices of the batch.
    dtype : dtype
        Of real numbers: the engine's, whatever the dataset returns.
    look : callable, optional
        Is shown what is read of each target: its name, the block, and the numbers of its samples.
    """
    out: dict[str, Array] = {}
    targets = {n.name for n in program.graph.targets}
    same: dict[tuple[object, ...], Array] = {}
    for buffer, source in program.feeds.items():
        held = program.buffers[buffer]
        if not held.layout.holds(rank):
            continue
        box = held.layout.box(rank)
        key = (source, held.first, box)
        if key not in same:
            one = dataset.part(source)
            read = one.read_targets if source in targets else one.read
            numbers = samples[held.first + indices(box[0])]
            block = read(numbers, box[1:])
            if look is not None and source in targets:
                look(source, block, numbers)
            same[key] = np.ascontiguousarray(block, dtype if block.dtype.kind == "f" else None)
        out[buffer] = same[key]
    return out


def boxes(program: Program, rank: int) -> dict[str, Box]:
    """What a rank reads of each sample for one of its inputs, by name; of several feeds of one, the largest."""
    names, found = {n.name for n in program.graph.samples}, dict[str, Box]()
    for buffer, source in program.feeds.items():
        layout = program.buffers[buffer].layout
        if source in names and layout.holds(rank):
            found[source] = max(layout.box(rank)[1:], found.get(source, ()), key=lambda b: box_size(b) if b else 0)
    return found
