"""Convolution and its two gradients in NumPy: blocks of unrolled windows (im2col) times a matrix.

One core, `forward`, serves two of the three: the gradient for the input of a strided convolution falls into
``stride`` interleaved phases per dimension, each of them a convolution of stride 1 with a part of the mirrored
filters, so nothing is scattered and no zero is multiplied. Blocks keep the unrolled copy in cache-sized pieces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from lbpar.engine.base import Array, LocalWindow, Window
from lbpar.engine.device import Index
from lbpar.engine.windows import blocks, read_region, tap_slices

BLOCK_BYTES = 1 << 21
"""Size of one block of unrolled windows: a few of them fit a core's last-level cache."""

MIN_ROWS = 128
"""Fewest rows of a block, so that the matrix product still pays for packing the filters."""

Tap: TypeAlias = tuple[Index, Index, Index]
"""A tap, the outputs that it contributes to and the inputs that it reads there, each with one entry per dimension."""


def forward(x: Array, w: Array, b: Array | None, win: Window, groups: int, out_spatial: Sequence[int]) -> Array:
    """See `Engine.conv_forward`."""
    features, width = w.shape[0], w.shape[-1]
    y = np.empty((x.shape[0], *out_spatial, features), dtype=x.dtype)
    if y.size == 0:
        return y
    if x.size == 0 or w.size == 0:
        y[...] = 0 if b is None else b
    elif width == 1 and groups > 1:
        _depthwise_forward(x, w, b, win, y)
    elif groups == 1 and is_pointwise(win, x.shape[1:-1], out_spatial):
        np.matmul(x.reshape(-1, width), w.reshape(features, width).T, out=y.reshape(-1, features))
        if b is not None:
            y += b
    else:
        filters = w.reshape(groups, features // groups, -1).transpose(0, 2, 1)
        for where, columns in _unrolled(x, win, groups, out_spatial):
            part = y[where]  # contiguous: blocks are cut in C order
            rows = part.reshape(-1, features)
            if groups == 1:
                np.matmul(columns[0], filters[0], out=rows)
            else:
                rows.reshape(-1, groups, features // groups)[...] = np.matmul(columns, filters).transpose(1, 0, 2)
            if b is not None:
                rows += b
    return y


def backward_data(dy: Array, w: Array, win: Window, groups: int, in_spatial: Sequence[int]) -> Array:
    """See `Engine.conv_backward_data`."""
    width = w.shape[-1]
    dx = np.zeros((dy.shape[0], *in_spatial, groups * width), dtype=dy.dtype)
    if dx.size == 0 or dy.size == 0:
        return dx
    features = w.shape[0] // groups
    # (G, F/G, *K, C/G) -> (G, C/G, *K, F/G): the filters of the adjoint, before mirroring
    adjoint = np.swapaxes(w.reshape(groups, features, *w.shape[1:]), 1, -1)
    adjoint = adjoint.reshape(groups * width, *w.shape[1:-1], features)
    phases = [_phases(dim, n) for dim, n in zip(win, in_spatial, strict=True)]
    for combination in itertools.product(*phases):
        where = tuple(slice(start, None, dim.stride) for (start, _, _), dim in zip(combination, win, strict=True))
        taps = tuple(tap for _, tap, _ in combination)
        part = np.ascontiguousarray(adjoint[(slice(None), *taps)])
        windows = tuple(window for _, _, window in combination)
        sizes = [len(range(n)[step]) for n, step in zip(in_spatial, where, strict=True)]
        piece = forward(dy, part, None, windows, groups, sizes)
        if piece.shape == dx.shape:
            return piece  # stride 1: the only phase
        dx[(slice(None), *where)] = piece
    return dx


def backward_weights(x: Array, dy: Array, win: Window, groups: int, out: Array | None = None) -> Array:
    """See `Engine.conv_backward_weights`."""
    features, channels = dy.shape[-1], x.shape[-1]
    kernel = tuple(dim.kernel for dim in win)
    width = channels // groups
    dw = np.zeros((groups, features // groups, math.prod(kernel) * width), dtype=x.dtype)
    if dw.size == 0 or x.size == 0 or dy.size == 0:
        pass
    elif width == 1 and groups > 1:
        return _depthwise_backward_weights(x, dy, win, groups)
    elif groups == 1 and is_pointwise(win, x.shape[1:-1], dy.shape[1:-1]):
        np.matmul(dy.reshape(-1, features).T, x.reshape(-1, channels), out=dw[0])
    else:
        for where, columns in _unrolled(x, win, groups, dy.shape[1:-1]):
            rows = dy[where].reshape(-1, groups, features // groups)
            dw += np.matmul(rows.transpose(1, 2, 0), columns)
    return dw.reshape(features, *kernel, width)


def is_pointwise(win: Window, in_spatial: Sequence[int], out_spatial: Sequence[int]) -> bool:
    """Whether output position o reads exactly input position o."""
    return tuple(in_spatial) == tuple(out_spatial) and all(
        dim.kernel == 1 and dim.stride == 1 and dim.pad == 0 for dim in win
    )


def _unrolled(
    x: Array, win: Window, groups: int, out_spatial: Sequence[int]
) -> Iterator[tuple[tuple[slice, ...], Array]]:
    """Blocks of output positions (index of (N, *out)) with their windows, (groups, positions, taps * C/groups).

    The windows lie in one buffer that the next block overwrites.
    """
    region = read_region(x, win, out_spatial)
    kernel = tuple(dim.kernel for dim in win)
    width = x.shape[-1] // groups
    sample, *steps, element = region.strides
    windows = as_strided(
        region,
        (groups, x.shape[0], *out_spatial, *kernel, width),
        (
            width * element,
            sample,
            *(step * dim.stride for step, dim in zip(steps, win, strict=True)),
            *(step * dim.dilation for step, dim in zip(steps, win, strict=True)),
            element,
        ),
        writeable=False,
    )
    length = math.prod(kernel) * width
    limit = max(MIN_ROWS, BLOCK_BYTES // (groups * length * element))
    buffer = np.empty(groups * length * min(limit, x.shape[0] * math.prod(out_spatial)), dtype=x.dtype)
    for where in blocks((x.shape[0], *out_spatial), limit):
        part = windows[(slice(None), *where)]
        columns = buffer[: part.size].reshape(part.shape)
        np.copyto(columns, part)
        yield where, columns.reshape(groups, -1, length)


def _phases(dim: LocalWindow, n_in: int) -> list[tuple[int, slice, LocalWindow]]:
    """Phases of the adjoint of one window dimension that have any taps.

    Inputs ``start + m*stride`` receive from the taps k with ``k*dilation = start + pad (mod stride)``, which are
    evenly spaced: ``k = k0 + j*q``. Output ``o = m + c - j*(q*dilation/stride)``, with
    ``c = (start + pad - k0*dilation)/stride``, so mirroring j leaves a window of stride 1 over dy.

    Returns
    -------
    list of (start, taps in mirrored order, window over dy)
    """
    found = []
    spacing = dim.stride // math.gcd(dim.stride, dim.dilation)
    for start in range(min(dim.stride, n_in)):
        k0 = next((k for k in range(dim.kernel) if (start + dim.pad - k * dim.dilation) % dim.stride == 0), None)
        if k0 is None:
            continue
        count = len(range(k0, dim.kernel, spacing))
        last = k0 + (count - 1) * spacing
        dilation = spacing * dim.dilation // dim.stride
        pad = (count - 1) * dilation - (start + dim.pad - k0 * dim.dilation) // dim.stride
        taps = slice(last, k0 - 1 if k0 else None, -spacing)
        found.append((start, taps, LocalWindow(count, 1, dilation, pad)))
    return found


def _taps(win: Window, in_spatial: Sequence[int], out_spatial: Sequence[int]) -> Iterator[Tap]:
    """Every tap with the output and input slices where it lies inside, skipping taps that never do."""
    for tap in np.ndindex(*(dim.kernel for dim in win)):
        pairs = [tap_slices(*four) for four in zip(win, tap, in_spatial, out_spatial, strict=True)]
        if all(out.stop > out.start for out, _ in pairs):
            yield tap, tuple(out for out, _ in pairs), tuple(read for _, read in pairs)


def _depthwise_forward(x: Array, w: Array, b: Array | None, win: Window, y: Array) -> None:
    """One input channel per group: a matrix product would be a row of dot products, so add up tap by tap."""
    samples, channels = x.shape[0], x.shape[-1]
    per_channel = w.shape[0] // channels
    split = y.reshape(*y.shape[:-1], channels, per_channel)
    split[...] = 0 if b is None else b.reshape(channels, per_channel)
    taps = list(_taps(win, x.shape[1:-1], y.shape[1:-1]))
    scratch = np.empty(split.shape[1:], dtype=x.dtype)
    for n in range(samples):
        for tap, out, read in taps:
            factor = w[(slice(None), *tap, 0)].reshape(channels, per_channel)
            target = split[(n, *out)]
            product = scratch[tuple(slice(0, size) for size in target.shape)]
            # repeated along the last spatial dimension, so that NumPy's inner loop runs over more than the channels
            row = np.broadcast_to(factor, target.shape[-3:]).copy()
            np.multiply(x[(n, *read)][..., None], row, out=product)
            target += product


def _depthwise_backward_weights(x: Array, dy: Array, win: Window, groups: int) -> Array:
    per_channel = dy.shape[-1] // groups
    dw = np.zeros((groups, per_channel, *(dim.kernel for dim in win)), dtype=x.dtype)
    split = dy.reshape(*dy.shape[:-1], groups, per_channel)
    taps = list(_taps(win, x.shape[1:-1], dy.shape[1:-1]))
    for n in range(x.shape[0]):
        for tap, out, read in taps:
            product = x[(n, *read)][..., None] * split[(n, *out)]
            product = product.reshape(-1, groups * per_channel)
            # a product with ones sums in blocks, faster and with less rounding than sum(axis=0)
            total = np.ones(len(product), dtype=x.dtype) @ product
            dw[(slice(None), slice(None), *tap)] += total.reshape(groups, per_channel)
    return dw.reshape(groups * per_channel, *dw.shape[2:], 1)
