"""Launches of convolutions, whole, of rims and grouped (``kernels/convolution.cu``, ``rims.cu``, ``grouped.cu``), from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lbpar.engine.base import LocalWindow, Window
from lbpar.engine.cupy.launch_gemm import Operand, gemm
from lbpar.engine.cupy.tiles import (
    MAX_ROWS,
    MOST_BLOCKS,
    Card,
    Choice,
    Divisor,
    Job,
    Launch,
    Math,
    Record,
    choose,
    divisor,
    shape,
    shared_bytes,
    sum_splits,
    vector,
)
from lbpar.errors import EngineError

_AXIS = np.dtype(
    [
        (name, "i8")
        for name in ("source", "target", "kernel", "stride", "dilation", "pad", "origin", "extent", "spacing", "reach")
    ]
    + [("positions", Divisor, 2), ("taps", Divisor, 2)]
)
WindowSizes = np.dtype(
    [("axis", _AXIS, 3), ("samples", "i8"), ("groups", "i8"), ("channels", Divisor)]
    + [(name, "i8") for name in ("columns", "depth", "splits", "add", "relu", "vectors")]
)
MOST_RIMS = 8
_RIM = np.dtype([("first_block", "i8"), ("origin", "i8", 3), ("extent", "i8", 3), ("positions", Divisor, (3, 2))])
RimSizes = np.dtype([("window", WindowSizes), ("count", "i8"), ("rims", _RIM, MOST_RIMS)])

Box = Sequence[tuple[int, int]]
"""First output, and one past the last, along each spatial dimension."""


@dataclass(frozen=True)
class Geometry:
    """A convolution with its window in three dimensions, whichever pass.

    Attributes
    ----------
    inner, outer : extents of x and of y
    channels, filters : per group
    """

    samples: int
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    win: tuple[LocalWindow, ...]
    groups: int
    channels: int
    filters: int
    taps: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", math.prod(d.kernel for d in self.win))

    @classmethod
    def of(cls, samples: int, inner: Sequence[int], outer: Sequence[int], win: Window, groups: int, channels: int, filters: int) -> Geometry:  # fmt: skip
        """From one to three spatial dimensions; channels and filters of all groups."""
        missing = 3 - len(win)
        ones = (1,) * missing
        return cls(
            samples, (*ones, *inner), (*ones, *outer), (LocalWindow(1),) * missing + tuple(win), groups,
            channels // groups, filters // groups,
        )  # fmt: skip

    @property
    def x_size(self) -> int:
        return self.samples * math.prod(self.inner) * self.groups * self.channels

    @property
    def y_size(self) -> int:
        return self.samples * math.prod(self.outer) * self.groups * self.filters

    @property
    def w_size(self) -> int:
        return self.groups * self.filters * self.taps * self.channels

    @property
    def pointwise(self) -> bool:
        """Whether output o reads exactly input o, with all channels."""
        return (
            self.groups == 1
            and self.inner == self.outer
            and all(d == LocalWindow(1, 1, d.dilation, 0) for d in self.win)
        )

    @property
    def deep(self) -> bool:
        """Whether all three dimensions are convolved."""
        return self.inner[0] != 1 or self.outer[0] != 1 or self.win[0].kernel != 1 or self.win[0].pad != 0

    def index(self, card: Card) -> str:
        """Type of offsets: 32 bits if all of them fit, those of taps outside of arrays included."""
        x = y = self.samples
        for d, inner, outer in zip(self.win, self.inner, self.outer, strict=True):
            span = (d.kernel - 1) * d.dilation
            x = x * inner + max(abs(d.pad), abs((outer - 1) * d.stride - d.pad), span)
            y = y * outer + inner + abs(d.pad) + d.kernel * d.dilation
        k = self.taps * max(self.channels, self.filters)
        largest = max(x * self.groups * self.channels, y * self.groups * self.filters, self.w_size, 2 * k, 2 * x, 2 * y)
        return "i32" if largest + 2 * MAX_ROWS <= card.int_limit else "i64"


def window_sizes(g: Geometry, adjoint: bool, origin: Sequence[int], extents: Sequence[int], **others: Any) -> Record:
    """The struct of sizes: ``adjoint`` for the data pass; origin and extents are those of the box that is written."""
    source, target = (g.outer, g.inner) if adjoint else (g.inner, g.outer)
    record = np.zeros((), WindowSizes)
    for a, d in enumerate(g.win):
        spacing = d.stride // math.gcd(d.stride, d.dilation) if adjoint else 1
        record["axis"][a] = (
            source[a], target[a], d.kernel, d.stride, d.dilation, d.pad, origin[a], extents[a], spacing, spacing * d.dilation // d.stride,
            _positions(d, adjoint, extents[a]), [divisor(t) for t in (d.kernel // spacing + adjoint, d.kernel // spacing)],
        )  # fmt: skip
    record["samples"], record["groups"] = g.samples, g.groups
    record["channels"] = divisor(g.filters if adjoint else g.channels)
    record["columns"] = g.channels if adjoint else g.filters
    for name, value in others.items():
        record[name] = value
    return record


def _positions(d: LocalWindow, adjoint: bool, extent: int) -> list[tuple[int, int, int]]:
    """Along an axis of a box: of the first phases of a stride, and of the others."""
    whole = extent // d.stride
    return [divisor(whole + 1), divisor(whole)] if adjoint else [divisor(extent)] * 2


def conv_forward(
    math_: Math,
    card: Card,
    g: Geometry,
    bias: bool = False,
    relu: bool = False,
    add: bool = False,
    box: Box | None = None,
) -> Job:
    """``y = relu(x * w + b)``, or added to y; of y only ``box``, if one is given."""
    origin, extents = _box(g.outer, box)
    positions = g.samples * math.prod(extents)
    if positions * g.groups * g.filters == 0:
        return Job()
    b = "b" if bias else ""
    if thin(g):
        return _grouped(math_, card, g, False, ("y", "x", "w", b), box=(origin, extents), relu=relu, add=add)
    if g.pointwise and box is None:
        left, right = Operand("x", True, g.channels), Operand("w", True, g.channels)
        return gemm(math_, card, positions, g.filters, g.channels, left, right, "y", b, relu, beta=float(add))
    k, vectors = _depth(math_, card, g, False)
    cut = choose(math_, card, positions, g.filters, k, g.groups, g.y_size if box is None else None)
    sizes = window_sizes(
        g, False, origin, extents, depth=cut.depth, splits=cut.splits, add=add, relu=relu,
        vectors=vector(card, math_, g.filters) == 16 // math_.element_bytes,
    )  # fmt: skip
    grid = (-(-positions // cut.rows) * -(-g.filters // cut.columns), g.groups, cut.splits)
    return _tiled("conv_forward", math_, g.index(card), cut, vectors, grid, (True, True), ("y", "x", "w", b), sizes, g.y_size,
                  g.groups * g.filters, relu, add)  # fmt: skip


def conv_backward_data(math_: Math, card: Card, g: Geometry, add: bool = False, box: Box | None = None) -> Job:
    """``dx`` of a convolution, or only a ``box`` of it; also the forward pass of a transposed one."""
    origin, extents = _box(g.inner, box)
    if g.x_size * math.prod(extents) == 0:
        return Job()
    if g.pointwise and box is None:
        left, right = Operand("dy", True, g.filters), Operand("w", False, g.channels)
        rows = g.samples * math.prod(g.inner)
        return gemm(math_, card, rows, g.channels, g.filters, left, right, "dx", beta=float(add))
    phases, steps = _phases(g, True)
    if thin(g):
        return _grouped(math_, card, g, True, ("dx", "dy", "w", ""), box=(origin, extents), add=add)
    positions = g.samples * math.prod(-(-n // s) for n, s in zip(extents, steps, strict=True))
    k, vectors = _depth(math_, card, g, True)
    cut = choose(math_, card, positions, g.channels, k, g.groups * phases, g.x_size if box is None else None)
    sizes = window_sizes(
        g, True, origin, extents, depth=cut.depth, splits=cut.splits, add=add,
        vectors=vector(card, math_, g.channels) == 16 // math_.element_bytes,
    )  # fmt: skip
    grid = (-(-positions // cut.rows) * -(-g.channels // cut.columns), g.groups, phases * cut.splits)
    return _tiled("conv_backward_data", math_, g.index(card), cut, vectors, grid, (True, False), ("dx", "dy", "w"), sizes, g.x_size,
                  g.groups * g.channels, False, add)  # fmt: skip


def _phases(g: Geometry, adjoint: bool) -> tuple[int, list[int]]:
    """Into how many phases the targets of a pass fall, and along each axis."""
    steps = [d.stride if adjoint else 1 for d in g.win]
    if (phases := math.prod(steps)) > MOST_BLOCKS:
        raise EngineError(
            f"engine.name: cupy: strides {steps} make {phases} phases, at most {MOST_BLOCKS} are possible."
        )
    return phases, steps


def _depth(math_: Math, card: Card, g: Geometry, adjoint: bool) -> tuple[int, tuple[int, int]]:
    """The most k that a target of a pass sums over, and elements of both operands that can be copied at once."""
    if not adjoint:
        k = g.taps * g.channels
        return k, (vector(card, math_, g.channels), vector(card, math_, k))
    taps = math.prod(-(-d.kernel * math.gcd(d.stride, d.dilation) // d.stride) for d in g.win)
    return taps * g.filters, (vector(card, math_, g.filters), vector(card, math_, g.channels))


def conv_backward_weights(math_: Math, card: Card, g: Geometry, add: bool = False) -> Job:
    """``dw`` of a convolution."""
    if g.w_size == 0:
        return Job()
    if thin(g):
        return _grouped_weights(math_, card, g, add)
    positions = g.samples * math.prod(g.outer)
    if g.pointwise:
        left, right = Operand("dy", False, g.filters), Operand("x", False, g.channels)
        return gemm(math_, card, g.filters, g.channels, positions, left, right, "dw", beta=float(add))
    columns = g.taps * g.channels
    cut = choose(math_, card, g.filters, columns, positions, g.groups, g.w_size)
    vectors = vector(card, math_, g.filters), vector(card, math_, g.channels)
    sizes = window_sizes(
        g, False, (0, 0, 0), g.outer, depth=cut.depth, splits=cut.splits, add=add,
        vectors=vector(card, math_, columns) == 16 // math_.element_bytes,
    )  # fmt: skip
    grid = (-(-g.filters // cut.rows) * -(-columns // cut.columns), g.groups, cut.splits)
    return _tiled("conv_backward_weights", math_, g.index(card), cut, vectors, grid, (False, False), ("dw", "dy", "x"), sizes, g.w_size,
                  columns, False, add)  # fmt: skip


def conv_rims(
    math_: Math,
    card: Card,
    g: Geometry,
    boxes: Sequence[Box],
    bias: bool = False,
    relu: bool = False,
    add: bool = False,
) -> Job:
    """`conv_forward` of several boxes that do not overlap, in one launch."""
    return _rims(math_, card, g, False, boxes, ("y", "x", "w", "b" if bias else ""), relu=relu, add=add)


def conv_data_rims(math_: Math, card: Card, g: Geometry, boxes: Sequence[Box], add: bool = False) -> Job:
    """`conv_backward_data` of several boxes that do not overlap, in one launch."""
    return _rims(math_, card, g, True, boxes, ("dx", "dy", "w", ""), add=add)


def _rims(
    math_: Math, card: Card, g: Geometry, adjoint: bool, boxes: Sequence[Box], arrays: tuple[str, ...], **others: Any
) -> Job:
    """A pass for several boxes: blocks of threads find theirs by the number of its first block."""
    whole, size, columns = (g.inner, g.x_size, g.channels) if adjoint else (g.outer, g.y_size, g.filters)
    parts = [part for part in (_box(whole, box) for box in boxes) if math.prod(part[1])]
    assert len(parts) <= MOST_RIMS
    if not parts or not size:
        return Job()
    phases, steps = _phases(g, adjoint)
    rows = [g.samples * math.prod(-(-n // s) for n, s in zip(extents, steps, strict=True)) for _, extents in parts]
    if thin(g):
        width = _width(math_, card, g)
        blocks = [-(-_threads(g, r, columns, width) // 256) for r in rows]
        file, threads, shared, groups = "grouped.cu", 256, 0, 1
        name = f"conv_grouped_rims<{math_.element}, {g.index(card)}, {_flag(adjoint)}, {width}>"
        sizes = window_sizes(g, adjoint, (0, 0, 0), whole, depth=0, splits=1, **others)
    else:
        k, vectors = _depth(math_, card, g, adjoint)
        cut = choose(math_, card, max(rows), columns, k, g.groups * phases * len(parts), None)
        blocks = [-(-r // cut.rows) * -(-columns // cut.columns) for r in rows]
        file, threads, shared, groups = "rims.cu", cut.threads, shared_bytes(math_, cut, True, not adjoint), g.groups
        name = f"conv{'_data' * adjoint}_rims<{math_.name}, {g.index(card)}, {shape(cut, vectors)}>"
        arrays = arrays[:3] if adjoint else arrays
        sizes = window_sizes(
            g, adjoint, (0, 0, 0), whole, depth=cut.depth, splits=1,
            vectors=vector(card, math_, columns) == 16 // math_.element_bytes, **others,
        )  # fmt: skip
    record, first = np.zeros((), RimSizes), 0
    record["window"], record["count"] = sizes, len(parts)
    for rim, (origin, extents), n in zip(record["rims"], parts, blocks, strict=False):
        rim["first_block"], rim["origin"], rim["extent"] = first, origin, extents
        rim["positions"] = [_positions(d, adjoint, extent) for d, extent in zip(g.win, extents, strict=True)]
        first += n
    return Job((Launch(file, name, (first, groups, phases), (threads, 1, 1), shared, arrays, record),))


# -- few channels per group ------------------------------------------------------------------------------------------------------


def thin(g: Geometry) -> bool:
    """Whether tiles would lie idle, whose columns are the channels or filters of one group: these convolutions have kernels of their own."""
    return g.groups > 1 and (max(g.channels, g.filters) <= 4 or g.groups > MOST_BLOCKS)


def _grouped(math_: Math, card: Card, g: Geometry, adjoint: bool, arrays: tuple[str, ...], **others: Any) -> Job:
    origin, extents = others.pop("box")
    phases, steps = _phases(g, adjoint)
    positions = g.samples * math.prod(-(-n // s) for n, s in zip(extents, steps, strict=True))
    width = _width(math_, card, g)
    sizes = window_sizes(g, adjoint, origin, extents, depth=0, splits=1, **others)
    name = f"conv_grouped<{math_.element}, {g.index(card)}, {_flag(adjoint)}, {width}>"
    threads = _threads(g, positions, g.channels if adjoint else g.filters, width)
    return Job((Launch("grouped.cu", name, (-(-threads // 256), 1, phases), (256, 1, 1), 0, arrays, sizes),))


def _width(math_: Math, card: Card, g: Geometry) -> int:
    """Neighbouring channels that a thread has."""
    return vector(card, math_, g.groups) if g.channels == g.filters == 1 else 1


def _threads(g: Geometry, positions: int, columns: int, width: int) -> int:
    """A thread has four positions."""
    return -(-positions // 4) * (g.groups * columns // width)


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _grouped_weights(math_: Math, card: Card, g: Geometry, add: bool) -> Job:
    positions, pairs, chunks = g.samples * math.prod(g.outer), g.groups * g.filters * g.channels, -(-g.taps // 8)
    blocks = -(-pairs // 32) * chunks
    wanted = min(
        -(-4 * card.processors // blocks),
        -(-positions // 256),
        card.workspace // (g.w_size * math_.sum_bytes),
        MOST_BLOCKS,
    )
    depth = -(-positions // max(1, wanted))
    splits = max(1, -(-positions // max(1, depth)))
    sizes = window_sizes(g, False, (0, 0, 0), g.outer, depth=depth, splits=splits, add=add)
    name = f"conv_grouped_weights<{math_.element}, {g.index(card)}>"
    whole = splits == 1
    arrays = ("dw", "" if whole else "workspace", "dy", "x")
    first = Launch("grouped.cu", name, (-(-pairs // 32), chunks, splits), (32, 8, 1), 0, arrays, sizes)
    if whole:
        return Job((first,))
    second = sum_splits(math_, "dw", "", g.w_size, g.taps * g.channels, splits, False, 1.0, float(add))
    return Job((first, second), splits * g.w_size * math_.sum_bytes)


def _box(whole: tuple[int, ...], box: Box | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Origin and extents of a box in three dimensions."""
    if box is None:
        return (0, 0, 0), whole
    sides = [(0, 1)] * (3 - len(box)) + list(box)
    return tuple(start for start, _ in sides), tuple(max(0, stop - start) for start, stop in sides)


def _tiled(
    kernel: str,
    math_: Math,
    index: str,
    cut: Choice,
    vectors: tuple[int, int],
    grid: tuple[int, int, int],
    along_k: tuple[bool, bool],
    arrays: tuple[str, ...],
    sizes: Record,
    count: int,
    columns: int,
    relu: bool,
    add: bool,
) -> Job:
    """The launch of a kernel of ``convolution.cu``, and that of the sum over its splits."""
    whole = cut.splits == 1
    out, left, right, *bias = arrays
    pointers = (out, "" if whole else "workspace", left, right, *(b if whole else "" for b in bias))
    first = Launch(
        "convolution.cu",
        f"{kernel}<{math_.name}, {index}, {shape(cut, vectors)}>",
        grid,
        (cut.threads, 1, 1),
        shared_bytes(math_, cut, *along_k),
        pointers,
        sizes,
    )
    if whole:
        return Job((first,))
    second = sum_splits(math_, out, bias[0] if bias else "", count, columns, cut.splits, relu, 1.0, float(add))
    return Job((first, second), cut.splits * count * math_.sum_bytes)
