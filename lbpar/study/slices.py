"""Planes of test samples, and what the network makes of them: what a person looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.dataset import Dataset
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
    """

    sample: int
    depth: int | None
    image: Array
    truth: Array
    prediction: Array
    classes: int | None


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
        data = Subset(evaluator.test, range(min(3, len(evaluator.test))) if samples is None else samples)
        space, out = data.sample_shape[:-1], evaluator.output_shape(data.sample_shape)
        labels = data.classes is not None
        if len(space) < 2 or out[:-1] != space or data.target_shape != (space if labels else out):
            raise ConfigError(
                f"pictures: got samples of shape {data.sample_shape} with targets of shape {data.target_shape}, expected a target per "
                "pixel or voxel."
            )
        found = [_begun(data, i, out) for i in range(len(data))] if transport.rank == 0 else []
    for where, part in evaluator.parts(data):
        if part is not None:
            for row, own in enumerate(part, where[0].start):
                _put(found[row], where[1:], own)
    for one in found:
        one.prediction = one.prediction.argmax(-1) if labels else one.prediction[..., 0]
    return found if transport.rank == 0 else None


def _begun(data: Subset, i: int, out: tuple[int, ...]) -> Slice:
    """All of a slice but what is predicted, which has room for all channels."""
    depth = _fullest(data, i) if len(data.sample_shape) == 4 else None
    at, labels = np.array([i]), data.classes is not None
    image = data.read(at, (*_plane(data.sample_shape[:-1], depth), ((0, 1),)))
    box = _plane(data.target_shape, depth) if labels else (*_plane(data.target_shape[:-1], depth), ((0, 1),))
    flat, truth = out[-3:-1], data.read_targets(at, box)
    number = int(data.numbers[i])
    return Slice(number, depth, image.reshape(flat), truth.reshape(flat), np.zeros(out[-3:]), data.classes and out[-1])


def _plane(space: tuple[int, ...], depth: int | None) -> Box:
    box = whole(space)
    return box if depth is None else (((depth, depth + 1),), *box[1:])


def _fullest(data: Dataset, i: int) -> int:
    planes = data.target_shape[0]
    if data.classes is None:
        return planes // 2
    counts = [np.count_nonzero(data.read_targets(np.array([i]), _plane(data.target_shape, d))) for d in range(planes)]
    return int(np.argmax(counts))


def _put(one: Slice, inner: Sequence[slice], part: Array) -> None:
    """Take from a part of a prediction what belongs to the plane."""
    if one.depth is not None:
        first = inner[0] if inner else slice(0, len(part))
        if not first.start <= one.depth < first.stop:
            return
        part, inner = part[one.depth - first.start], inner[1:]
    one.prediction[tuple(inner)] = part
