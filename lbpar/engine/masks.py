"""Selecting elements by a mask without a branch per element: np.where is ten times slower on irregular masks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lbpar.engine.base import Array

_INTEGERS = {2: np.int16, 4: np.int32, 8: np.int64}


def keep_where(mask: npt.NDArray[np.bool_], values: Array) -> Array:
    """values where mask, else +0 (also where values is not finite); a new array, shapes equal."""
    integer = _INTEGERS[values.dtype.itemsize]
    kept = np.empty(values.shape, dtype=integer)
    np.negative(mask.view(np.int8), out=kept, casting="unsafe")  # all bits set where mask
    kept &= values.view(integer)
    return kept.view(values.dtype)


def set_where(mask: npt.NDArray[np.bool_], target: Array, value: int) -> None:
    """target[mask] = value, in place, for small integers."""
    change = value - target
    change *= mask
    target += change
