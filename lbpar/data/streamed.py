"""Statistics of a sample that comes in pieces, as often as they are asked for: no process holds all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Pieces = Callable[[], Iterator[Array]]
"""Gives the elements, a part at a time, in one dimension; they are the same whenever it is called."""
_BITS = 16
"""Of a key that are told apart in one pass."""


def moments(pieces: Pieces) -> tuple[int, float, float]:
    """Number, mean and standard deviation, in float64.

    References
    ----------
    Chan, Golub and LeVeque, as for `lbpar.data.moments.channel_moments`.
    """
    count, mean, squares = 0, 0.0, 0.0
    for piece in pieces():
        if not piece.size:
            continue
        part = piece.astype(np.float64)
        new, own = part.size, float(part.mean())
        off, both = own - mean, count + new
        squares += float(np.square(part - own).sum()) + off * off * count * new / both
        mean += off * new / both
        count = both
    return count, mean, float(np.sqrt(squares / max(1, count)))


def percentiles(pieces: Pieces, wanted: Sequence[float]) -> list[float] | None:
    """Percentiles with linear interpolation, as `numpy.percentile` has them; None of nothing.

    The order of real numbers is that of their bits, those of negative ones turned around. Each pass counts how often each value of the next
    bits occurs among the numbers that begin like one that is looked for: two passes for float32, four for float64.
    """
    seeking: dict[
        int, tuple[int, int]
    ] = {}  # of a rank, the bits that are known, and the rank among those that begin so
    number, shift, kind = 0, 0, np.dtype(np.float64)
    while not seeking or shift:
        heads = {head for head, _ in seeking.values()} or {0}
        counts = {head: np.zeros(1 << _BITS, np.int64) for head in heads}
        for piece in pieces():
            keys, kind = _keys(piece), piece.dtype
            at = shift - _BITS if seeking else 8 * kind.itemsize - _BITS
            for head, count in counts.items():
                own = keys[keys >> keys.dtype.type(shift) == head] if seeking else keys
                digits = (own >> own.dtype.type(at)) & own.dtype.type((1 << _BITS) - 1)
                count += np.bincount(digits.astype(np.int64), minlength=1 << _BITS)
        if not seeking:
            number, shift = int(counts[0].sum()), 8 * kind.itemsize
            if not number:
                return None
            below = [int(q / 100 * (number - 1)) for q in wanted]
            seeking = {rank: (0, rank) for b in below for rank in (b, min(b + 1, number - 1))}
        shift -= _BITS
        for rank, (head, left) in seeking.items():
            total = np.cumsum(counts[head])
            digit = int(np.searchsorted(total, left, side="right"))
            seeking[rank] = (head << _BITS) | digit, left - (int(total[digit - 1]) if digit else 0)
    found = {rank: _number(head, kind) for rank, (head, _) in seeking.items()}
    out = []
    for q in wanted:
        place = q / 100 * (number - 1)
        low, high = found[int(place)], found[min(int(place) + 1, number - 1)]
        out.append(low + (high - low) * (place - int(place)))
    return out


def _keys(x: Array) -> Array:
    """Whole numbers in the order of real ones of 32 or 64 bits."""
    bits: Any = x.view(np.uint32 if x.dtype.itemsize == 4 else np.uint64)
    top = bits.dtype.type(1 << (8 * x.dtype.itemsize - 1))
    return np.asarray(np.where(bits & top, ~bits, bits | top))


def _number(key: int, dtype: np.dtype[Any]) -> float:
    """The real number of a key."""
    bits = 8 * dtype.itemsize
    whole = key ^ (1 << (bits - 1)) if key >> (bits - 1) else key ^ ((1 << bits) - 1)
    return float(np.array(whole, f"u{dtype.itemsize}").view(dtype))
