"""Planes of test samples, and what the network makes of them: what a person looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.dataset import Dataset
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.subset import Subset
from lbpar.errors import ConfigError
from lbpar.layout.runs import Box, whole
from lbpar.train.evaluator import Evaluator
from lbpar.transport.together import together

Array = NDArray[Any]


@dataclass
class Slice:
    """A plane (H, W) of one sample.

    Attributes
    ----------
    sample, depth : int
        Its number, and that of the plane; None in two dimensions.
    image : array
        The first channel, as the network is given it.
    truth, prediction : array
        Labels, or the first channel of real numbers.
    classes : int or None
        Number of labels.
    voxel : tuple of float, optional
        Height and width of a voxel in mm, where the file says how its volumes lie: H is then the way forward, and W the way up.
    """

    sample: int
    depth: int | None
    image: Array
    truth: Array
    prediction: Array
    classes: int | None
    voxel: tuple[float, float] | None = None


def slices(evaluator: Evaluator, samples: Sequence[int] | None = None) -> list[Slice] | None:
    """The plane of each test sample (default: of the first three) that has most labels that are not 0 (of real targets: the middle one), on rank 0.

    No rank holds a whole prediction. Collective over all ranks.

    Raises
    ------
    ConfigError
        There are no test data, or no target per pixel or voxel.
    DataError
        There is no such sample.
    """
    transport = evaluator.transport
    with together(transport):
        if evaluator.test is None:
            raise ConfigError("data.test: not given; pictures are of test samples.")
        shown = range(min(3, len(evaluator.test))) if samples is None else samples
        given = evaluator.test.map(lambda _, one: Subset(one, shown))
        data = given.part(evaluator.graph.compared[evaluator.graph.output][0])
        assert isinstance(data, Subset)
        space, out = data.sample_shape[:-1], evaluator.output_shape(data.sample_shape)
        labels = data.classes is not None
        if len(space) < 2 or out[:-1] != space or data.target_shape != (space if labels else out):
            raise ConfigError(
                f"pictures: got samples of shape {data.sample_shape} with targets of shape {data.target_shape}, expected a target per "
                "pixel or voxel."
            )
        found = [_begun(data, i, out[-1]) for i in range(len(data))] if transport.rank == 0 else []
    for name, where, part in evaluator.parts(given):
        if part is not None and name == evaluator.graph.output:
            for row, own in enumerate(part, where[0].start):
                _put(found[row], where[1:], own)
    for one in found:
        one.prediction = one.prediction.argmax(-1) if labels else one.prediction[..., 0]
    return found if transport.rank == 0 else None


def _begun(data: Subset, i: int, channels: int) -> Slice:
    """All of a slice but what is predicted, which has room for all channels."""
    space = data.extents(i)
    depth = _fullest(data, i) if len(space) == 3 else None
    at, box, first = np.array([i]), _plane(space, depth), ((0, 1),)
    image = data.read(at, (*box, first))
    flat, truth = space[-2:], data.read_targets(at, box if data.classes is not None else (*box, first))
    number = int(data.numbers[i])
    predicted = np.zeros((*flat, channels))
    shown, voxel = (image.reshape(flat), truth.reshape(flat)), _voxel(data, i)
    return Slice(number, depth, *shown, predicted, data.classes and channels, voxel)


def _voxel(data: Subset, i: int) -> tuple[float, float] | None:
    _, file, there = next(data.alike(range(i, i + 1)))
    beside = file.beside("affine") if isinstance(file, Hdf5Dataset) else None
    if beside is None:
        return None
    height, width = np.sqrt((beside[0][there[0], :3, 1:3] ** 2).sum(axis=0)).tolist()
    return height, width


def _plane(space: tuple[int, ...], depth: int | None) -> Box:
    box = whole(space)
    return box if depth is None else (((depth, depth + 1),), *box[1:])


def _fullest(data: Dataset, i: int) -> int:
    space = data.extents(i)
    if data.classes is None:
        return space[0] // 2
    counts = [np.count_nonzero(data.read_targets(np.array([i]), _plane(space, d))) for d in range(space[0])]
    return int(np.argmax(counts))


def _put(one: Slice, inner: Sequence[slice], part: Array) -> None:
    """Take from a part of a prediction what belongs to the plane."""
    if one.depth is not None:
        first = inner[0] if inner else slice(0, len(part))
        if not first.start <= one.depth < first.stop:
            return
        part, inner = part[one.depth - first.start], inner[1:]
    one.prediction[tuple(inner)] = part
