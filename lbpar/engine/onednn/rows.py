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
from lbpar.engine.onednn.library import Context, Description, Primitive

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
    spans : list of (byte offset, wide rows) of the tiles
    columns : fold * channels
    """

    def __init__(self, context: Context, count: int, channels: int) -> None:
        limit = max(1, _WIDE // channels)
        fold = next(k for k in range(limit, 0, -1) if count % k == 0)
        self.count, self.channels, self.fold, self.columns = count, channels, fold, fold * channels
        wide = count // fold
        size = max(_SPLIT, TILE_BYTES * context.max_threads() // (4 * self.columns) // _SPLIT * _SPLIT)
        self.spans = [(4 * self.columns * start, min(size, wide - start)) for start in range(0, wide, size)]
        self.rows = np.array([n for _, n in self.spans], dtype=np.float64)

    def vector(self, values: Array | Float64Array) -> Array:
        """``values`` (channels,) as float32 for the wide columns."""
        return np.tile(vector32(values, self.channels, 0), self.fold)

    def narrow(self, wide: Float64Array) -> Float64Array:
        """Sum over what lies side by side: (2, columns) to (2, channels)."""
        return wide.reshape(2, self.fold, self.channels).sum(axis=1)


def _tile(context: Context, rows: int, columns: int) -> Any:
    split = _SPLIT if rows % _SPLIT == 0 else 1
    return context.activation((split, 1, rows // split, columns))


class Moments:
    """`Engine.norm_sums` of one shape: mean and biased variance of each tile, merged to sums about a shift."""

    def __init__(self, context: Context, tiling: Tiling) -> None:
        self.context, self.tiling = context, tiling
        self.scratch_bytes = 4 * tiling.columns * tiling.spans[0][1]
        vector = context.desc((tiling.columns,), (1,))
        kernels = {}
        for rows in {n for _, n in tiling.spans}:
            tile = _tile(context, rows, tiling.columns)
            kernels[rows] = Primitive(
                context,
                "batch_normalization_forward",
                (cdef.FORWARD_TRAINING, tile, tile, 0.0, 0, context.attributes()),
                ((cdef.ARG_SRC, tile), (cdef.ARG_DST, tile), (cdef.ARG_MEAN, vector), (cdef.ARG_VARIANCE, vector)),
            )
        self.steps = [(offset, kernels[rows]) for offset, rows in tiling.spans]

    def __call__(self, x: Array, shift: Float64Array) -> Float64Array:
        tiling, pointer = self.tiling, self.context.pointer
        found = np.empty((len(self.steps), 2, tiling.columns), np.float32)
        source, target, step = pointer(x), pointer(found), 4 * tiling.columns
        scratch = self.context.area("tile", self.scratch_bytes)
        for offset, run in self.steps:
            run(source + offset, scratch, target, target + step)
            target += 2 * step
        origin = found[0, 0, : tiling.channels].astype(np.float64)
        difference = found[:, 0] - np.tile(origin, tiling.fold)
        total = np.empty((2, tiling.columns))
        total[0] = tiling.rows @ difference
        difference *= difference
        difference += found[:, 1]
        total[1] = tiling.rows @ difference
        return norm.moved(tiling.narrow(total), tiling.count, origin, shift)


class BackwardSums:
    """sum(dy) and sum(dy * (x - mean)) of one shape; with ``relu``, dy is first masked by y > 0 and stored so."""

    def __init__(self, context: Context, tiling: Tiling, relu: bool) -> None:
        self.context, self.tiling = context, tiling
        self.scratch_bytes = 4 * tiling.columns * tiling.spans[0][1]
        self.ones = np.ones(tiling.columns, np.float32)
        vector = context.desc((tiling.columns,), (1,))
        flags = cdef.USE_GLOBAL_STATS | cdef.USE_SCALE | cdef.USE_SHIFT
        kernels: dict[int, tuple[Primitive, Primitive | None]] = {}
        for rows in {n for _, n in tiling.spans}:
            tile = _tile(context, rows, tiling.columns)
            forward = (cdef.FORWARD_TRAINING, tile, tile, 0.0, flags, context.attributes())
            hint = Description(context, "batch_normalization_forward", forward)
            run = Primitive(
                context,
                "batch_normalization_backward",
                (cdef.BACKWARD, tile, tile, tile, 0.0, flags, hint.descriptor, context.attributes()),
                (
                    (cdef.ARG_SRC, tile),
                    (cdef.ARG_DIFF_DST, tile),
                    (cdef.ARG_DIFF_SRC, tile),
                    (cdef.ARG_MEAN, vector),
                    (cdef.ARG_VARIANCE, vector),
                    (cdef.ARG_SCALE, vector),
                    (cdef.ARG_DIFF_SHIFT, vector),
                    (cdef.ARG_DIFF_SCALE, vector),
                ),
            )
            mask = eltwise_backward(context, cdef.RELU_FROM_DST, (rows * tiling.columns,), 0.0) if relu else None
            kernels[rows] = (run, mask)
        self.steps = [(offset, *kernels[rows]) for offset, rows in tiling.spans]

    def __call__(self, x: Array, dy: Array, mean: Array, y: Array | None, masked: Array | None) -> Float64Array:
        tiling, pointer = self.tiling, self.context.pointer
        found = np.empty((len(self.steps), 2, tiling.columns), np.float32)
        centre, ones, target, step = (
            pointer(tiling.vector(mean)),
            pointer(self.ones),
            pointer(found),
            4 * tiling.columns,
        )
        source, gradient = pointer(x), pointer(dy)
        forward, stored = (gradient, gradient) if y is None or masked is None else (pointer(y), pointer(masked))
        scratch = self.context.area("tile", self.scratch_bytes)
        for offset, run, mask in self.steps:
            if mask is not None:
                mask(gradient + offset, forward + offset, stored + offset)
            run(source + offset, stored + offset, scratch, centre, ones, ones, target, target + step)
            target += 2 * step
        total = tiling.narrow(found.sum(axis=0, dtype=np.float64))
        total[1] += remainder(mean, total[0])
        return total


def norm_apply(context: Context, rows: int, columns: int, relu: bool) -> Primitive:
    """y = (x - mean) * scale + bias [then relu]: addresses x, y, mean, ones, scale, bias."""
    tile, vector = _tile(context, rows, columns), context.desc((columns,), (1,))
    flags = cdef.USE_GLOBAL_STATS | cdef.USE_SCALE | cdef.USE_SHIFT | (cdef.FUSE_RELU if relu else 0)
    return Primitive(
        context,
        "batch_normalization_forward",
        (cdef.FORWARD_INFERENCE, tile, tile, 0.0, flags, context.attributes()),
        (
            (cdef.ARG_SRC, tile),
            (cdef.ARG_DST, tile),
            (cdef.ARG_MEAN, vector),
            (cdef.ARG_VARIANCE, vector),
            (cdef.ARG_SCALE, vector),
            (cdef.ARG_SHIFT, vector),
        ),
    )


class Chain:
    """``x - row``, then one step per letter, then maybe relu, on a matrix (count, channels) in one pass.

    Letters: m multiply by a row, a add a row, A add a matrix.
    """

    def __init__(self, context: Context, count: int, channels: int, steps: str, relu: bool = False) -> None:
        self.tiling = Tiling(context, count, channels)
        self.pointer = context.pointer
        self.steps = steps
        matrix = context.rows((count // self.tiling.fold, self.tiling.columns))
        row = context.rows((1, self.tiling.columns))
        operands = [matrix if step == "A" else row for step in steps]
        algorithms = [cdef.BINARY_MUL if step == "m" else cdef.BINARY_ADD for step in steps]
        ops: list[tuple[Any, ...]] = [("binary", a, d) for a, d in zip(algorithms, operands, strict=True)]
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

    def __call__(self, x: Array, y: Array, matrices: Sequence[Array], vectors: Sequence[Array | Float64Array]) -> None:
        """``vectors``: the row subtracted first, then those of the steps; ``matrices``: those of the steps."""
        pointer = self.pointer
        first, *rows = (pointer(self.tiling.vector(v)) for v in vectors)
        rest, full = iter(rows), iter(matrices)
        operands = (pointer(next(full)) if step == "A" else next(rest) for step in self.steps)
        self.run(pointer(x), first, pointer(y), *operands)


def norm_backward_data(context: Context, count: int, channels: int) -> Chain:
    """dx = ((x - mean) * k1 + dy + k0) * factor: vectors mean, k1, k0, factor; matrix dy."""
    return Chain(context, count, channels, "mAam")


def norm_add_relu(context: Context, count: int, channels: int) -> Chain:
    """y = relu((x - mean) * scale + bias + z): vectors mean, scale, bias; matrix z."""
    return Chain(context, count, channels, "maA", relu=True)


def eltwise_forward(context: Context, algorithm: int, shape: tuple[int, ...], alpha: float) -> Primitive:
    """Addresses x, y."""
    desc = context.rows(shape)
    return Primitive(
        context,
        "eltwise_forward",
        (cdef.FORWARD_TRAINING, algorithm, desc, desc, alpha, 0.0, context.attributes()),
        ((cdef.ARG_SRC, desc), (cdef.ARG_DST, desc)),
    )


def eltwise_backward(context: Context, algorithm: int, shape: tuple[int, ...], alpha: float) -> Primitive:
    """For algorithms that work from the forward result: addresses dy, y, dx."""
    desc = context.rows(shape)
    hint = eltwise_forward(context, algorithm, shape, alpha)
    return Primitive(
        context,
        "eltwise_backward",
        (algorithm, desc, desc, desc, alpha, 0.0, hint.descriptor, context.attributes()),
        ((cdef.ARG_DIFF_DST, desc), (cdef.ARG_DST, desc), (cdef.ARG_DIFF_SRC, desc)),
    )


def binary(context: Context, algorithm: int, shape: tuple[int, ...], more: int) -> Primitive:
    """x0 op x1 op ... of ``more + 2`` arrays of one shape: addresses x0, x1, y, x2, ..."""
    desc = context.rows(shape)
    post_ops = context.post_ops(*([("binary", algorithm, desc)] * more)) if more else None
    return Primitive(
        context,
        "binary",
        (algorithm, desc, desc, desc, context.attributes(post_ops)),
        (
            (cdef.ARG_SRC, desc),
            (cdef.ARG_SRC_1, desc),
            (cdef.ARG_DST, desc),
            *((cdef.ARG_POST_OP * (i + 1) | cdef.ARG_SRC_1, desc) for i in range(more)),
        ),
    )


def remainder(mean: Float64Array, factor: Float64Array) -> Float64Array:
    """What is to be added to ``factor * (x - float32(mean))`` to make it ``factor * (x - mean)``."""
    return (mean.astype(np.float32) - mean) * factor


def vector32(values: Array | Float64Array | None, columns: int, default: float) -> Array:
    """``values`` as float32 (columns,), or ``default`` everywhere."""
    if values is None:
        return np.full(columns, default, np.float32)
    return np.ascontiguousarray(values, dtype=np.float32)
