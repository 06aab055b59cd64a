"""How products are cut for the tiled kernels (``kernels/tile.cuh``), and what a launch of any of them is.

Nothing here needs CuPy or a device. A `Job` says which kernels to start, with which grid and arguments, and how large a workspace
they need; it depends on shapes, types and the card, not on arrays, so that callers keep it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

INT_LIMIT = 2**31 - 1
"""Largest offset of an element that kernels compute in 32 bits."""

TILES = ((128, 128, 64), (128, 64, 64), (64, 64, 32), (128, 32, 32))
"""Rows and columns of a block's tile, and rows of a warp's (which has 32 columns)."""

MOST_BLOCKS = 65535
"""Along the second and third dimension of a grid."""

MAX_ROWS = 128
"""The most rows of a tile: what offsets may reach beyond a result."""

Divisor = np.dtype([("value", "i8"), ("multiplier", "u4"), ("shift", "u4")])
SplitSizes = np.dtype(
    [(name, "i8") for name in ("count", "columns", "splits", "relu")] + [("alpha", "f8"), ("beta", "f8")]
)

Record: TypeAlias = npt.NDArray[np.void]
"""A struct that a kernel takes by value, as an array without dimensions."""


@dataclass(frozen=True)
class Card:
    """What launches depend on of a device.

    Attributes
    ----------
    architecture : compute capability times ten
    processors : number of streaming multiprocessors
    alignment : bytes that all addresses are multiples of
    workspace : most bytes that a job may ask for
    int_limit : largest offset for 32-bit index arithmetic
    tiles : that may be chosen, of `TILES`
    """

    architecture: int = 80
    processors: int = 108
    alignment: int = 16
    workspace: int = 256 << 20
    int_limit: int = INT_LIMIT
    tiles: tuple[tuple[int, int, int], ...] = TILES


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel: its file and name expression, its grid, and its arguments.

    ``arrays`` are the pointers in order, by the names that the job's maker gives its arguments ("y", "x", "w", …), "workspace" for
    the job's workspace and "" for null; ``sizes`` is the struct that follows them.
    """

    source: str
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arrays: tuple[str, ...]
    sizes: Record


@dataclass(frozen=True, eq=False)
class Job:
    """Launches in order, none where there is nothing to compute, and the bytes of their workspace."""

    launches: tuple[Launch, ...] = ()
    workspace_bytes: int = 0


@dataclass(frozen=True)
class Math:
    """A kind of arithmetic in ``mma.cuh``: name there and of its elements, and how fast one multiprocessor multiplies."""

    name: str
    element: str
    element_bytes: int
    sum_bytes: int
    rate: int
    """Products that a multiprocessor does in a cycle, about: compared only with the bytes that it moves in one."""


MATHS = {
    "float32": Math("float", "float", 4, 4, 64),
    "tf32": Math("tf32", "float", 4, 4, 256),
    "float16": Math("__half", "__half", 2, 4, 512),
    "bfloat16": Math("__nv_bfloat16", "__nv_bfloat16", 2, 4, 512),
    "float64": Math("double", "double", 8, 8, 64),
}
"""By the name of the element type; "tf32" for float32 arrays that may be multiplied in TF32."""

_EFFICIENCY = {128 * 128: 1.0, 128 * 64: 0.9, 64 * 64: 0.75, 128 * 32: 0.6}
"""Of a tile by its size: smaller ones read more bytes for a product."""

_BYTES_A_CYCLE = 10
"""That a multiprocessor has of the device's memory."""


@dataclass(frozen=True)
class Choice:
    """How a product is cut: tile, stages of shared memory, and parts of k with the k that each has."""

    rows: int
    columns: int
    warp_rows: int
    stages: int
    splits: int
    depth: int

    @property
    def threads(self) -> int:
        return self.rows // self.warp_rows * self.columns


def choose(math_: Math, card: Card, m: int, n: int, k: int, slices: int, result: int | None) -> Choice:
    """The cut with the shortest estimated time.

    Parameters
    ----------
    m, n, k : sizes of one product
    slices : such products in the launch
    result : elements of all results, which a split costs in workspace; None where k must stay whole
    """
    step = 64 // math_.element_bytes
    steps = max(1, -(-k // step))
    stages = 3 if card.architecture >= 80 else 2
    best: tuple[float, Choice] | None = None
    for rows, columns, warp_rows in card.tiles:
        if math_.name == "double" and rows * columns > 64 * 64 and len(card.tiles) > 1:
            continue
        tiles = max(1, -(-m // rows) * -(-n // columns) * slices)
        for splits in _split_counts(steps, tiles, card, slices, result and result * math_.sum_bytes):
            depth = -(-steps // splits)
            cycles = rows * columns * step / math_.rate / _EFFICIENCY[rows * columns]
            # a multiprocessor needs eight warps to multiply at its rate, fewer take as long as eight
            blocks = max(-(-tiles * splits // card.processors), 8 * 32 * warp_rows // (rows * columns))
            time = blocks * (depth + stages + 3) * cycles
            if splits > 1 and result:
                time += 4000 + 2 * splits * result * math_.sum_bytes / (card.processors * _BYTES_A_CYCLE)
            if best is None or time < best[0]:
                best = time, Choice(rows, columns, warp_rows, stages, splits, depth * step)
    assert best is not None
    return best[1]


def _split_counts(steps: int, tiles: int, card: Card, slices: int, part_bytes: int | None) -> Iterator[int]:
    yield 1
    if part_bytes is None:
        return
    most = min(
        steps // 4, MOST_BLOCKS // slices, card.workspace // max(1, part_bytes), -(-4 * card.processors // tiles), 512
    )
    for wanted in range(2, most + 1):
        depth = -(-steps // wanted)
        if -(-steps // depth) == wanted:  # no part is empty
            yield wanted


def vector(card: Card, math_: Math, *extents: int) -> int:
    """Elements that can be copied at once: what 16 bytes hold, if rows of these extents follow each other without gaps."""
    return math.gcd(min(16, card.alignment) // math_.element_bytes, *extents)


def shared_bytes(math_: Math, cut: Choice, a_along_k: bool, b_along_k: bool) -> int:
    size = math_.element_bytes
    step = 64 // size
    pitch = step + (4 if size == 8 else 16 // size)
    tiles = sum(
        rows * pitch if along_k else step * (rows + min(8, 32 // size))
        for rows, along_k in ((cut.rows, a_along_k), (cut.columns, b_along_k))
    )
    stores = cut.threads // 32 * 16 * 40 * math_.sum_bytes  # a warp stages 16 rows of its sums
    return max(cut.stages * tiles * size, stores)


def shape(cut: Choice, vectors: tuple[int, int]) -> str:
    return ", ".join(map(str, (cut.rows, cut.columns, cut.warp_rows, cut.stages, *vectors)))


def divisor(n: int) -> tuple[int, int, int]:
    """A `Divisor` of the kernels: dividends up to 2³¹ - 1 are divided by a multiplication and a shift."""
    shift = (max(n, 1) - 1).bit_length()
    return n, (((1 << 32) * ((1 << shift) - max(n, 1))) // max(n, 1) + 1) & 0xFFFFFFFF, shift


def record_of(dtype: np.dtype[Any], **values: Any) -> Record:
    record = np.zeros((), dtype)
    for name, value in values.items():
        record[name] = value
    return record


def sum_splits(
    math_: Math, out: str, bias: str, count: int, columns: int, splits: int, relu: bool, alpha: float, beta: float
) -> Launch:
    sizes = record_of(SplitSizes, count=count, columns=columns, splits=splits, relu=relu, alpha=alpha, beta=beta)
    grid = (min(-(-count // 256), MOST_BLOCKS), 1, 1)
    return Launch("gemm.cu", f"sum_splits<{math_.element}>", grid, (256, 1, 1), 0, (out, "workspace", bias), sizes)
