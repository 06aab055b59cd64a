"""Rotation, scaling and elastic bending: each place takes the value of another one, of which a block reads the region it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, cos, floor, prod, radians, sin

import numpy as np
from numpy.typing import NDArray

from lbpar.config.augment import Elastic
from lbpar.data.augment.changed import Array, ByBlock, one
from lbpar.layout.runs import Box
from lbpar.random import fold, outer_sum, uniform

_PIECE = 1 << 18
"""Places worked on at a time."""
_SLACK = 1e-6
"""More than what rounding may do to a place, in voxels."""


class Warped(ByBlock):
    """Samples that are turned, enlarged and bent about their middle, in one interpolation.

    Images and real targets per voxel are interpolated linearly, labels are those of the nearest voxel. What a place takes its value
    from is the same arithmetic on global indices in any block. A patch takes from the sample around it.
    """

    def _read_targets(self, samples: NDArray[np.int64], box: Box) -> Array:
        return self._blocks(samples, box, True) if self.targets_move else super()._read_targets(samples, box)

    def _block(self, n: int, spans: list[tuple[int, int]], rest: Box, targets: bool) -> Array:
        matrix, field = self._matrix(n), self._field(n)
        if matrix is None and field is None:
            return self._original(n, spans, rest, targets)
        matrix = np.eye(len(spans)) if matrix is None else matrix
        around, sample, origin = self._source.around(n)
        middle = [(e - 1) / 2 for e in self._space]
        bounds = affine_bounds(matrix, middle, spans, field.most if field else 0.0)
        region = []
        for (lo, hi), o, extent in zip(bounds, origin, around.extents(sample), strict=True):
            first = min(max(floor(lo) + o, 0), extent - 1)
            region.append((first, max(min(ceil(hi) + 1 + o, extent), first + 1)))
        read = around.read_targets if targets else around.read
        values = read(np.array([sample]), (*(one(s) for s in region), *rest))[0]
        # From the sample's indices to those of what was read.
        offset = [o - lo for o, (lo, _) in zip(origin, region, strict=True)]
        return self._taken(values, offset, spans, matrix, middle, field, targets and self.classes is not None)

    def _taken(
        self,
        values: Array,
        offset: list[int],
        spans: list[tuple[int, int]],
        matrix: Array,
        middle: list[float],
        field: Field | None,
        labels: bool,
    ) -> Array:
        from scipy.ndimage import map_coordinates

        dims = len(spans)
        out = np.empty((*(hi - lo for lo, hi in spans), *values.shape[dims:]), values.dtype)
        channels = values.reshape(*values.shape[:dims], -1), out.reshape(*out.shape[:dims], -1)
        mode = "nearest" if self._augment.border == "nearest" else "grid-constant"
        for piece in _pieces(spans):
            places = affine_places(matrix, middle, piece)
            if field is not None:
                for place, moved in zip(places, field.displacements(piece), strict=True):
                    place += moved
            for place, o in zip(places, offset, strict=True):
                place += o
            rows = slice(piece[0][0] - spans[0][0], piece[0][1] - spans[0][0])
            for c in range(channels[0].shape[-1]):
                map_coordinates(
                    channels[0][..., c], places, channels[1][rows][..., c], 0 if labels else 1, mode, prefilter=False
                )
        return out

    def _matrix(self, n: int) -> Array | None:
        """From places of sample n to those of the original, both counted from the middle; None if that is no change."""
        dims, rotate = len(self._space), self._augment.rotate
        axes = [] if rotate is None else ["DHW".index(a) for a in rotate.axes] if dims == 3 else [0]
        angles, factors = self._drawn("rotate", n, len(axes)), self._drawn("scale", n)
        if not angles and not factors:
            return None
        matrix = np.eye(dims)
        for axis, angle in zip(axes, angles, strict=bool(angles)):
            matrix = rotation(dims, axis, angle) @ matrix
        return matrix / (factors[0] if factors else 1.0)

    def _field(self, n: int) -> Field | None:
        elastic = self._augment.elastic
        if elastic is None or not self._chosen("elastic", n):
            return None
        return Field(elastic, self._space, fold(self._key("elastic"), 1, n))


def rotation(dims: int, axis: int, degrees: float) -> Array:
    """Turn the plane across an axis of volumes, from its first dimension to its second; pictures have one plane."""
    a, b = (0, 1) if dims == 2 else tuple(d for d in range(3) if d != axis)
    c, s = cos(radians(degrees)), sin(radians(degrees))
    matrix = np.eye(dims)
    matrix[[a, a, b, b], [a, b, a, b]] = c, -s, s, c
    return matrix


def affine_places(matrix: Array, middle: Sequence[float], spans: Sequence[tuple[int, int]]) -> Array:
    """Where the places of a block take from, (dimensions, *block)."""
    from_middle = [np.arange(lo, hi) - m for (lo, hi), m in zip(spans, middle, strict=True)]
    # Sums of one product per dimension in this order, so that blocks agree to the last bit.
    return np.stack([_sum(row, from_middle) + m for row, m in zip(matrix, middle, strict=True)])


def _sum(row: Array, parts: Sequence[Array]) -> Array:
    total = np.zeros((1,) * len(parts))
    for d, (factor, part) in enumerate(zip(row, parts, strict=True)):
        total = total + (factor * part).reshape((-1,) + (1,) * (len(parts) - d - 1))
    return total


def affine_bounds(
    matrix: Array, middle: Sequence[float], spans: Sequence[tuple[int, int]], displacement: float
) -> list[tuple[float, float]]:
    """Smallest and largest place in each dimension that a block takes from, with displacements up to a size."""
    corners = np.array([[lo - m, hi - 1 - m] for (lo, hi), m in zip(spans, middle, strict=True)])
    ends = np.sort(matrix[:, :, None] * corners, axis=-1).sum(axis=1)
    more = displacement + _SLACK
    return [(lo + m - more, hi + m + more) for (lo, hi), m in zip(ends.tolist(), middle, strict=True)]


def _pieces(spans: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Some planes of a block at a time."""
    (first, last), *others = spans
    step = max(1, _PIECE // prod(hi - lo for lo, hi in others))
    for lo in range(first, last, step):
        yield [(lo, min(lo + step, last)), *others]


class Field:
    """Displacements of all places: uniform cubic B-splines through nodes that are drawn by their global index.

    The splines' weights are positive with a sum of 1: no displacement exceeds those of the nodes.

    Parameters
    ----------
    elastic : Elastic
    space : sequence of int
        Extents of the sample.
    key : int
    """

    def __init__(self, elastic: Elastic, space: Sequence[int], key: int) -> None:
        self.most, self._spacing, self._key = elastic.displacement, elastic.spacing, key
        self._nodes = [floor((e - 1) / self._spacing) + 4 for e in space]

    def displacements(self, spans: Sequence[tuple[int, int]]) -> Iterator[Array]:
        """Of the places of a block, dimension by dimension."""
        taps = [_taps(np.arange(lo, hi) / self._spacing) for lo, hi in spans]
        first = [int(node[0]) for node, _ in taps]
        counts = [int(node[-1]) + 4 - f for (node, _), f in zip(taps, first, strict=True)]
        strides = [prod(self._nodes[d + 1 :]) for d in range(len(spans))]
        index = outer_sum([(f + np.arange(n)) * s for f, n, s in zip(first, counts, strides, strict=True)])
        for d in range(len(spans)):
            values = self.most * (2 * uniform(fold(self._key, d), index) - 1)
            for axis, ((node, weights), f) in enumerate(zip(taps, first, strict=True)):
                shape = (-1,) + (1,) * (len(spans) - axis - 1)
                values = sum(  # type: ignore[assignment]
                    np.take(values, node - f + k, axis) * w.reshape(shape) for k, w in enumerate(weights)
                )
            yield values


def _taps(t: Array) -> tuple[NDArray[np.int64], Array]:
    """The first of four nodes that each place lies between, and their weights."""
    node = np.floor(t).astype(np.int64)
    t = t - node
    return node, np.stack([(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3]) / 6
