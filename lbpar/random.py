"""Random numbers by global index: each is a pure function of a key and an index, however the array is split.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): ten rounds of
multiplications turn a counter (here the index) and a 64-bit key into 128 random bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MASK32 = np.uint64(0xFFFFFFFF)
SHIFT32 = np.uint64(32)
TWO, THREE = np.uint64(2), np.uint64(3)
MASK64 = (1 << 64) - 1
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
BLOCK = 1 << 12  # indices worked on at a time: the rounds' temporaries stay in a core's own cache
FOLD_DOMAIN = 1  # last counter word of `fold`, so that sub-keys never coincide with numbers drawn by index


def philox4x32(counter: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """Philox4x32-10.

    Parameters
    ----------
    counter : uint64 (4, n), each element a 32-bit word
    key : 64-bit integer, low word first

    Returns
    -------
    uint64 (4, n), each element a 32-bit word
    """
    a, b, c, d = counter.copy()
    first, second = np.empty_like(a), np.empty_like(a)
    low, high = int(key) & 0xFFFFFFFF, int(key) >> 32 & 0xFFFFFFFF
    for _ in range(ROUNDS):
        np.multiply(a, MULTIPLIERS[0], out=first)
        np.multiply(c, MULTIPLIERS[1], out=second)
        # (a, b, c, d) <- (high(second) ^ b ^ key, low(second), high(first) ^ d ^ key, low(first)), without new arrays
        np.right_shift(second, SHIFT32, out=a)
        a ^= b
        a ^= np.uint64(low)
        np.right_shift(first, SHIFT32, out=c)
        c ^= d
        c ^= np.uint64(high)
        np.bitwise_and(second, MASK32, out=b)
        np.bitwise_and(first, MASK32, out=d)
        low, high = (low + KEY_STEPS[0]) & 0xFFFFFFFF, (high + KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack([a, b, c, d])


def fold(key: int, *values: int) -> int:
    """Derive a 64-bit sub-key: ``fold(seed, layer, step)``.

    The order of the values matters, and ``fold(fold(k, a), b) == fold(k, a, b)``. Values are taken modulo 2**64.
    """
    key = int(key)
    for value in values:
        whole = int(value) & MASK64
        counter = np.array([[whole & 0xFFFFFFFF], [whole >> 32], [0], [FOLD_DOMAIN]], dtype=np.uint64)
        words = philox4x32(counter, key)
        key = int(words[0, 0]) | int(words[1, 0]) << 32
    return key & MASK64


def bits(key: int, index: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """64 random bits per index.

    Parameters
    ----------
    key : 64-bit integer
    index : integers, any shape, not negative

    Returns
    -------
    uint64, index's shape
    """
    flat = _flat(index)
    result = np.empty(flat.size, np.uint64)
    for start in range(0, flat.size, BLOCK):
        words = _words(key, flat[start : start + BLOCK])
        result[start : start + BLOCK] = words[0] << SHIFT32 | words[1]
    return result.reshape(np.shape(index))


def integers(key: int, index: npt.ArrayLike, below: int) -> npt.NDArray[np.int64]:
    """A whole number in [0, below) per index; the bias is under ``below`` / 2⁶⁴."""
    return (bits(key, index) % np.uint64(below)).astype(np.int64)


def uniform(key: int, index: npt.ArrayLike) -> Floats:
    """Uniform in the open interval (0, 1), 52 bits fine, float64 in index's shape.

    All draws of one key are from the same bits: fold a key for each purpose.
    """
    flat = _flat(index)
    result = np.empty(flat.size)
    for start in range(0, flat.size, BLOCK):
        words = _words(key, flat[start : start + BLOCK])
        result[start : start + BLOCK] = _open_interval(words[0], words[1])
    return result.reshape(np.shape(index))


def uniform32(key: int, index: npt.ArrayLike) -> Floats:
    """Uniform in (0, 1), 32 bits fine, for bulk use such as dropout: four indices share a counter.

    Index i takes word ``i % 4`` of the bits of counter ``i // 4``; runs of four aligned indices cost one evaluation.
    float64 in index's shape.
    """
    flat = _flat(index)
    groups = flat.reshape(-1, 4) if flat.size % 4 == 0 else None
    aligned = groups is not None and bool((groups == (groups[:, :1] & ~THREE) + np.arange(4, dtype=np.uint64)).all())
    counters = groups[:, 0] >> TWO if groups is not None and aligned else flat >> TWO
    result = np.empty((counters.size, 4) if aligned else counters.size)
    for start in range(0, counters.size, BLOCK):
        part = slice(start, start + BLOCK)
        words = _words(key, counters[part])
        chosen = words.T if aligned else np.take_along_axis(words, (flat[part] & THREE).astype(np.int64)[None], 0)[0]
        result[part] = (chosen.astype(np.float64) + 0.5) * 2.0**-32
    return result.reshape(np.shape(index))


def normal(key: int, index: npt.ArrayLike) -> Floats:
    """Standard normal (Box-Muller, one number per index), float64 in index's shape."""
    flat = _flat(index)
    result = np.empty(flat.size)
    for start in range(0, flat.size, BLOCK):
        words = _words(key, flat[start : start + BLOCK])
        radius = np.sqrt(-2.0 * np.log(_open_interval(words[0], words[1])))
        result[start : start + BLOCK] = radius * np.cos(2 * np.pi * _open_interval(words[2], words[3]))
    return result.reshape(np.shape(index))


def outer_sum(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """The sum of one number per dimension, for all places: flat indices of a block from those along each dimension."""
    total = np.zeros((1,) * len(parts), np.int64)
    for d, part in enumerate(parts):
        total = total + part.reshape((-1,) + (1,) * (len(parts) - d - 1))
    return total


def _flat(index: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(index, dtype=np.int64).reshape(-1).view(np.uint64)


def _words(key: int, index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    zero = np.zeros_like(index)
    return philox4x32(np.stack([index & MASK32, index >> SHIFT32, zero, zero]), key)


def _open_interval(high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]) -> Floats:
    """26 bits of each word; the half keeps 0 and 1 out and still fits a float64's 53 bits."""
    whole = (high >> np.uint64(6)) << np.uint64(26) | low >> np.uint64(6)
    return (whole.astype(np.float64) + 0.5) * 2.0**-52
