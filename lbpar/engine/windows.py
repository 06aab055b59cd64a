"""Index arithmetic of local windows, shared by convolution and pooling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from lbpar.engine.base import Array, LocalWindow, Window


def tap_slices(win: LocalWindow, tap: int, n_in: int, n_out: int) -> tuple[slice, slice]:
    """Outputs for which ``tap`` lies inside the input, and the inputs it then reads (both maybe empty)."""
    offset = tap * win.dilation - win.pad
    first = max(0, -(offset // win.stride))
    last = min(n_out, (n_in - 1 - offset) // win.stride + 1)
    if last <= first:
        return slice(0, 0), slice(0, 0)
    start = first * win.stride + offset
    return slice(first, last), slice(start, start + (last - first - 1) * win.stride + 1, win.stride)


def first_tap(win: LocalWindow, n_in: int, n_out: int) -> Array:
    """Smallest tap that lies inside the input, per output; -1 where there is none. int64 (n_out,)."""
    tap = np.full(n_out, -1, dtype=np.int64)
    for k in reversed(range(win.kernel)):
        tap[tap_slices(win, k, n_in, n_out)[0]] = k
    return tap


def read_region(x: Array, win: Window, out_spatial: Sequence[int]) -> Array:
    """The part of x (N, *S, C) that the windows of ``out_spatial`` (none 0) read, zeros where outside.

    A view where x holds all of it. Output o, tap k then reads element ``o*stride + k*dilation``.
    """
    spans = [(o - 1) * w.stride + (w.kernel - 1) * w.dilation + 1 for w, o in zip(win, out_spatial, strict=True)]
    sizes = x.shape[1:-1]
    if all(w.pad <= 0 and span - w.pad <= n for w, span, n in zip(win, spans, sizes, strict=True)):
        return x[(slice(None), *(slice(-w.pad, span - w.pad) for w, span in zip(win, spans, strict=True)))]
    region = np.zeros((x.shape[0], *spans, x.shape[-1]), dtype=x.dtype)
    source, target = [slice(None)], [slice(None)]
    for w, span, n in zip(win, spans, sizes, strict=True):
        to, start = max(0, w.pad), max(0, -w.pad)
        length = max(0, min(span - to, n - start))
        target.append(slice(to, to + length) if length else slice(0, 0))
        source.append(slice(start, start + length) if length else slice(0, 0))
    region[tuple(target)] = x[tuple(source)]
    return region


def reading(dim: LocalWindow, lo: int, hi: int, n_in: int) -> tuple[int, int]:
    """The inputs that outputs lo to hi read, at least one: the first, and one past the last."""
    first = min(max(lo * dim.stride - dim.pad, 0), n_in - 1)
    last = (hi - 1) * dim.stride + (dim.kernel - 1) * dim.dilation - dim.pad + 1
    return first, max(first + 1, min(last, n_in))


def read_by(dim: LocalWindow, lo: int, hi: int, n_out: int) -> tuple[int, int]:
    """The outputs that may read inputs lo to hi, at least one: the first, and one past the last."""
    first = min(max(-(-(lo + dim.pad - (dim.kernel - 1) * dim.dilation) // dim.stride), 0), n_out - 1)
    return first, max(first + 1, min((hi - 1 + dim.pad) // dim.stride + 1, n_out))


def blocks(shape: Sequence[int], limit: int) -> Iterator[tuple[slice, ...]]:
    """Cut an array of ``shape`` into contiguous C-order blocks of at most ``limit`` (but at least one) elements."""
    room, sizes = max(1, limit), []
    for n in reversed(shape):
        take = min(n, room)
        room = room // n if 0 < take == n else 1
        parts = -(-n // take) if take else 0
        sizes.append(-(-n // parts) if parts else 0)
    sizes.reverse()
    if math.prod(shape) == 0:
        return
    counts = [-(-n // size) for n, size in zip(shape, sizes, strict=True)]
    for where in np.ndindex(*counts):
        yield tuple(slice(i * s, min(n, (i + 1) * s)) for i, s, n in zip(where, sizes, shape, strict=True))
