"""Read this rank's block of a batch: exactly what each program input needs here, ghosts included."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from lbpar.graph.graph import TARGET
from lbpar.layout.runs import Box, indices
from lbpar.program.steps import Program

Array = Any


class Samples(Protocol):
    """What feeds are read from; a dataset is one."""

    def read(self, samples: np.ndarray, box: Box) -> np.ndarray:
        """Boxes of the given samples' inputs."""

    def read_targets(self, samples: np.ndarray, box: Box) -> np.ndarray:
        """Boxes of the given samples' targets."""


def read_feeds(
    program: Program, rank: int, dataset: Samples, samples: np.ndarray, dtype: np.dtype[Any]
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
    """
    out: dict[str, Array] = {}
    same: dict[tuple[object, ...], Array] = {}
    for buffer, source in program.feeds.items():
        held = program.buffers[buffer]
        if not held.layout.holds(rank):
            continue
        box = held.layout.box(rank)
        key = (source, held.first, box)
        if key not in same:
            read = dataset.read_targets if source == TARGET else dataset.read
            block = read(samples[held.first + indices(box[0])], box[1:])
            same[key] = np.ascontiguousarray(block, dtype if block.dtype.kind == "f" else None)
        out[buffer] = same[key]
    return out
