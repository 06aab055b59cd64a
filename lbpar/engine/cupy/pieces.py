"""Boxes that are copied or added, as launches of ``kernels/pack.cu``: many boxes in one, in units as large as alignment allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np

DIMS = 5
TILE = 1024  # units of a block of THREADS
THREADS = 256
COUNTS = (1, 24)  # pieces that a kernel takes
INDEX_LIMIT = 2**31 - 1
UNITS = {1: "u8", 2: "u16", 4: "u32", 8: "uint2", 16: "uint4"}

_PIECE = [("to", "u8"), ("source", "u8"), ("extent", "i8", DIMS), ("to_step", "i8", DIMS), ("from_step", "i8", DIMS)]
_PIECES = {count: np.dtype([("piece", np.dtype(_PIECE), count), ("first_tile", "i8", count + 1)]) for count in COUNTS}
_ROWS = np.dtype([("of", "u8", DIMS), ("written", "i8")])

Launch = tuple[str, int, list[Any]]
"""Name of a kernel, blocks of `THREADS`, arguments."""


@dataclass(frozen=True)
class Box:
    """Copied from one place to another: addresses, and per dimension the extent and both strides in bytes."""

    to: int
    source: int
    shape: tuple[int, ...]
    to_strides: tuple[int, ...]
    from_strides: tuple[int, ...]


def dense(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Strides of a C-contiguous array, in bytes."""
    strides = [itemsize]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(n, 1))
    return tuple(strides[: len(shape)])


def moves(boxes: Sequence[Box], itemsize: int, limit: int = INDEX_LIMIT) -> Iterator[Launch]:
    """Launches that copy boxes of elements of so many bytes; what is written must not overlap."""
    sizes = [size for size in UNITS if size % itemsize == 0 or itemsize % size == 0]
    for unit, pieces in _by_unit(boxes, itemsize, sizes).items():
        yield from _launches(f"move_pieces<{UNITS[unit]}", pieces, limit)


def sums(boxes: Sequence[Box], kind: str, itemsize: int, limit: int = INDEX_LIMIT) -> Iterator[Launch]:
    """Launches that add boxes of elements of type ``kind`` to others; what is written must not overlap."""
    for unit, pieces in _by_unit(boxes, itemsize, (itemsize, 16)).items():
        yield from _launches(f"add_pieces<{kind}, {unit // itemsize}", pieces, limit)


def rows(
    box: Box, lists: Sequence[int], written: bool, add: str | None, itemsize: int, limit: int = INDEX_LIMIT
) -> Iterator[Launch]:
    """A launch that copies one box, or adds elements of type ``add``, with the rows of some dimensions listed.

    ``lists`` holds an address of int64 on the device per dimension, 0 for none; they select on the side that is written, or on
    the other.
    """
    size = prod(box.shape)
    if size == 0:
        return
    lead = DIMS - len(box.shape)
    assert lead >= 0
    piece, which = np.zeros((), _PIECE), np.zeros((), _ROWS)
    piece["to"], piece["source"] = box.to, box.source
    piece["extent"] = (1,) * lead + box.shape
    for side, strides in (("to_step", box.to_strides), ("from_step", box.from_strides)):
        piece[side][lead:] = [stride // itemsize for stride in strides]
    which["of"][lead:], which["written"] = lists, written
    index = "i32" if size <= limit else "i64"
    name = f"add_rows<{add}, {index}>" if add else f"move_rows<{UNITS[itemsize]}, {index}>"
    yield name, min(-(-size // THREADS), 1 << 16), [piece, which]


_Piece = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _by_unit(boxes: Sequence[Box], itemsize: int, sizes: Sequence[int]) -> dict[int, list[_Piece]]:
    """Boxes that are not empty, in units of the largest of ``sizes`` that each allows."""
    result: dict[int, list[_Piece]] = {}
    for box in boxes:
        if prod(box.shape) == 0:
            continue
        dims = _joined(box, itemsize)
        alignment = gcd(16, box.to, box.source, dims[-1][0], *(step for dim in dims[:-1] for step in dim[1:]))
        unit = max(size for size in sizes if alignment % size == 0)
        steps = [(n, to // unit, source // unit) for n, to, source in dims[:-1]] + [(dims[-1][0] // unit, 1, 1)]
        result.setdefault(unit, []).append((box.to, box.source, *_columns(steps)))
    return result


def _joined(box: Box, itemsize: int) -> list[tuple[int, int, int]]:
    """Extents and strides of both sides; dimensions that follow each other in memory are one. The last counts single bytes."""
    dims = [(itemsize, 1, 1)]
    for n, to, source in reversed(list(zip(box.shape, box.to_strides, box.from_strides, strict=True))):
        size, to_step, from_step = dims[0]
        if n == 1:
            continue
        if (to, source) == (size * to_step, size * from_step):
            dims[0] = n * size, to_step, from_step
        else:
            dims.insert(0, (n, to, source))
    return dims


def _columns(dims: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    padded = [(1, 0, 0)] * (DIMS - len([d for d in dims if d[0] > 1])) + [d for d in dims if d[0] > 1]
    assert len(padded) == DIMS, "a piece of more than five dimensions"
    extents, to, source = zip(*padded, strict=True)
    return extents, to, source


def _launches(start: str, pieces: Sequence[_Piece], limit: int) -> Iterator[Launch]:
    for first in range(0, len(pieces), COUNTS[-1]):
        part = pieces[first : first + COUNTS[-1]]
        count = next(c for c in COUNTS if len(part) <= c)
        struct = np.zeros((), _PIECES[count])
        struct["piece"][: len(part)] = part
        sizes = [prod(extents) for _, _, extents, _, _ in part]
        tiles = np.cumsum([0, *(-(-size // TILE) for size in sizes)])
        struct["first_tile"][: len(tiles)] = tiles
        struct["first_tile"][len(tiles) :] = tiles[-1]
        index = "i32" if max(sizes) <= limit else "i64"
        yield f"{start}, {index}, {count}>", int(tiles[-1]), [struct]
