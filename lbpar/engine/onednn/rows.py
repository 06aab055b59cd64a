"""Kernels on a matrix of rows (positions, C), run tile by tile so that intermediate results stay in the cores' caches.

Used where there is no compiler for the passes of ``kernels/``: three to six times as fast as NumPy.

Normalisation has no primitive for its distributed form, where sums of several ranks meet between two halves. Batch
normalisation on a tile gives the sums of the tile (and writes its other result into a tile of scratch memory); tiles are merged in
float64. Within a tile oneDNN accumulates in float32 about the tile's own mean, so a mean far from zero does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lbpar.engine import norm
from lbpar.engine.base import Array, Float64Array
from lbpar.engine.onednn import cdef
from lbpar.engine.onednn.library import Description, DnnlContext, Primitive, dense

TILE_BYTES = 1 << 20
"""Bytes of one operand of a tile, per thread: a few operands fit a core's second-level cache."""

_WIDE = 512
# Narrow matrices are read as wider ones, (rows/k, k*C): fewer float32 additions per column, and full vectors.

_SPLIT = 8
# Batch normalisation shares out samples among threads, so a tile poses as this many.


class Tiling:
    """How a matrix (count, channels) is cut: ``fold`` rows side by side, then tiles of ``size`` wide rows.

    Attributes
    ----------
    columns : fold * channels
    spans : list of (byte offset, wide rows) of the tiles
    """

    def __init__(self, context: DnnlContext, count: int, channels: int) -> None:
        limit = max(1, _WIDE // channels)
        self.fold = next(k for k in range(limit, 0, -1) if count % k == 0)
        self.context, self.count, self.channels, self.columns = context, count, channels, self.fold * channels
        wide = count // self.fold
        size = max(_SPLIT, TILE_BYTES * context.max_threads() // (4 * self.columns) // _SPLIT * _SPLIT)
        self.spans = [(4 * self.columns * start, min(size, wide - start)) for start in range(0, wide, size)]

    def vector(self, values: Array | Float64Array) -> Array:
        """``values`` (channels,) as float32 for the wide columns."""
        return np.tile(dense(values), self.fold)

    def narrow(self, wide: Float64Array) -> Float64Array:
        """Sum over what lies side by side: (2, columns) to (2, channels)."""
        return wide.reshape(2, self.fold, self.channels).sum(axis=1)


class _Sums(Tiling):
    """Two vectors from each tile, by a primitive of batch normalisation.

    ``_primitive`` makes it for the descriptors of a tile and of a vector; its addresses are the sources, a tile of scratch memory, the
    vectors that are the same for all tiles, and the two results.
    """

    def __init__(self, context: DnnlContext, count: int, channels: int) -> None:
        super().__init__(context, count, channels)
        vector, made = context.desc((self.columns,), (1,)), {}
        for rows in {n for _, n in self.spans}:
            split = _SPLIT if rows % _SPLIT == 0 else 1
            tile = context.activation((split, 1, rows // split, self.columns))
            made[rows] = self._primitive(context, tile, vector)
        self._steps = [(offset, made[rows]) for offset, rows in self.spans]

    def _primitive(self, context: DnnlContext, tile: Any, vector: Any) -> Primitive:
        raise NotImplementedError

    def _results(self, sources: Sequence[Array], vectors: Sequence[Array]) -> Array:
        """float32 (tiles, 2, columns)."""
        pointer, step = self.context.pointer, 4 * self.columns
        found = np.empty((len(self._steps), 2, self.columns), np.float32)
        target, starts, same = pointer(found), [pointer(a) for a in sources], [pointer(v) for v in vectors]
        scratch = self.context.area("tile", step * self.spans[0][1])
        for offset, run in self._steps:
            run(*(start + offset for start in starts), scratch, *same, target, target + step)
            target += 2 * step
        return found


class Moments(_Sums):
    """`Engine.norm_sums` of one shape: mean and biased variance of each tile, merged to sums about a shift."""

    def _primitive(self, context: DnnlContext, tile: Any, vector: Any) -> Primitive:
        return Primitive(
            context,
            "batch_normalization_forward",
            (cdef.FORWARD_TRAINING, tile, tile, 0.0, 0, context.attributes()),
            ((cdef.ARG_SRC, tile), (cdef.ARG_DST, tile), (cdef.ARG_MEAN, vector), (cdef.ARG_VARIANCE, vector)),
        )

    def __call__(self, x: Array, shift: Float64Array) -> Float64Array:
        found = self._results([x], [])
        rows = np.array([n for _, n in self.spans], np.float64)
        origin = found[0, 0, : self.channels].astype(np.float64)
        difference = found[:, 0] - np.tile(origin, self.fold)
        total = np.stack([rows @ difference, rows @ (difference * difference + found[:, 1])])
        return norm.moved(self.narrow(total), self.count, origin, shift)


class BackwardSums(_Sums):
    """sum(dy) and sum(dy * (x - mean)) of one shape."""

    def _primitive(self, context: DnnlContext, tile: Any, vector: Any) -> Primitive:
        flags = cdef.USE_GLOBAL_STATS | cdef.USE_SCALE | cdef.USE_SHIFT
        forward = (cdef.FORWARD_TRAINING, tile, tile, 0.0, flags, context.attributes())
        hint = Description(context, "batch_normalization_forward", forward)
        constants, results = (
            (cdef.ARG_MEAN, cdef.ARG_VARIANCE, cdef.ARG_SCALE),
            (cdef.ARG_DIFF_SHIFT, cdef.ARG_DIFF_SCALE),
        )
        return Primitive(
            context,
            "batch_normalization_backward",
            (cdef.BACKWARD, tile, tile, tile, 0.0, flags, hint.descriptor, context.attributes()),
            (
                *((argument, tile) for argument in (cdef.ARG_SRC, cdef.ARG_DIFF_DST, cdef.ARG_DIFF_SRC)),
                *((argument, vector) for argument in (*constants, *results)),
            ),
        )

    def __call__(self, x: Array, dy: Array, mean: Array) -> Float64Array:
        ones = np.ones(self.columns, np.float32)
        found = self._results([x, dy], [self.vector(mean), ones, ones])
        total = self.narrow(found.sum(axis=0, dtype=np.float64))
        total[1] += remainder(mean, total[0])
        return total


class Chain(Tiling):
    """``x - row``, then one step per letter, then maybe relu, on a matrix (count, channels) in one pass.

    Letters: m multiply by a row, a add a row, A add a matrix.
    """

    def __init__(self, context: DnnlContext, count: int, channels: int, steps: str, relu: bool = False) -> None:
        super().__init__(context, count, channels)
        self.steps = steps
        matrix = context.rows((count // self.fold, self.columns))
        row = context.rows((1, self.columns))
        operands = [matrix if step == "A" else row for step in steps]
        ops: list[tuple[Any, ...]] = [
            ("binary", cdef.BINARY_MUL if step == "m" else cdef.BINARY_ADD, desc)
            for step, desc in zip(steps, operands, strict=True)
        ]
        post_ops = context.post_ops(*ops, *([("eltwise", cdef.RELU, 0.0, 0.0)] if relu else []))
        self.run = Primitive(
            context,
            "binary",
            (cdef.BINARY_SUB, matrix, row, matrix, context.attributes(post_ops)),
            (
                (cdef.ARG_SRC, matrix),
                (cdef.ARG_SRC_1, row),
                (cdef.ARG_DST, matrix),
                *((cdef.ARG_POST_OP * (i + 1) | cdef.ARG_SRC_1, desc) for i, desc in enumerate(operands)),
            ),
        )

    def __call__(self, x: Array, matrices: Sequence[Array], vectors: Sequence[Array | Float64Array], y: Array) -> None:
        """``vectors``: the row subtracted first, then those of the steps; ``matrices``: those of the steps."""
        pointer = self.context.pointer
        kept = [self.vector(v) for v in vectors]
        first, *rows = map(pointer, kept)
        rest, full = iter(rows), iter(matrices)
        operands = (pointer(next(full)) if step == "A" else next(rest) for step in self.steps)
        self.run(pointer(x), first, pointer(y), *operands)


def matmul(
    context: DnnlContext,
    sizes: tuple[int, int, int],
    turned: tuple[bool, bool],
    bias: bool,
    stored: int = cdef.F32,
    result: int = cdef.F32,
) -> Primitive:
    """(m, k) @ (k, n), each of which may lie the other way round, [+ a row]: addresses left, right, result[, row].

    ``stored`` is the type of the two, ``result`` that of the third; the row is float32.
    """
    m, k, n = sizes
    a = context.desc((m, k), (1, m) if turned[0] else (k, 1), stored)
    b = context.desc((k, n), (1, k) if turned[1] else (n, 1), stored)
    c, row = context.rows((m, n), result), context.rows((1, n)) if bias else context.null
    memories = [(cdef.ARG_SRC, a), (cdef.ARG_WEIGHTS, b), (cdef.ARG_DST, c)]
    return Primitive(
        context, "matmul", (a, b, row, c, context.attributes()), [*memories, (cdef.ARG_BIAS, row)] if bias else memories
    )


def remainder(mean: Float64Array, factor: Float64Array) -> Float64Array:
    """What is to be added to ``factor * (x - float32(mean))`` to make it ``factor * (x - mean)``."""
    return (mean.astype(np.float32) - mean) * factor
