"""Random numbers by counter: a pure function of (key, index), so any part of a global array can be made alone.

The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014). It is integer arithmetic, so all machines and NumPy versions agree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def make_key(*parts: int) -> int:
    """Mix whole numbers (seed, epoch, purpose, ...) into one 64-bit key; the order of parts matters."""
    key = 0
    for part in parts:
        key = _scalar_mix((key + _GAMMA + (part & _MASK)) & _MASK)
    return key


def bits(key: int, index: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Return 64 random bits per index.

    Parameters
    ----------
    key : int
        From `make_key`.
    index : array of int
        Any shape; non-negative.
    """
    z = index.astype(np.uint64)
    z *= np.uint64(_GAMMA)
    z += np.uint64(key)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def uniform(key: int, index: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return a number in [0, 1) per index, float64, with 53 random bits."""
    return (bits(key, index) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def integers(key: int, index: NDArray[np.integer], below: int) -> NDArray[np.int64]:
    """Return a whole number in [0, below) per index, int64; the bias is below ``below`` / 2⁶⁴."""
    return (bits(key, index) % np.uint64(below)).astype(np.int64)


def _scalar_mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
