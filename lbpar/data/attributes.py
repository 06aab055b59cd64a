"""What the attributes of a dataset say, however its writer stored them: numbers, one-element arrays, lists."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.errors import DataError


def find_attribute(name: str, *holders: Any) -> Any:
    """The attribute of the first of some HDF5 objects that has one of that name, or None."""
    return next((h.attrs[name] for h in holders if name in h.attrs), None)


def as_numbers(value: Any, name: str, where: str, most: int = 1) -> NDArray[np.float64] | None:
    """A number, or up to ``most``, one per channel, as a flat array; None stays None.

    Raises
    ------
    DataError
        Something else, another number of numbers, or one that is not finite.
    """
    if value is None:
        return None
    numbers = np.asarray(value)
    if numbers.dtype.kind not in "iuf":
        raise DataError(f"{where}: attribute '{name}' is {_shown(value)}, expected numbers.")
    numbers = numbers.astype(np.float64).reshape(-1)
    if numbers.size not in (1, most):
        expected = "1" if most == 1 else f"1 or {most}"
        raise DataError(f"{where}: attribute '{name}' has {numbers.size} numbers, expected {expected}.")
    if not np.isfinite(numbers).all():
        raise DataError(f"{where}: attribute '{name}' is {_shown(value)}, expected finite numbers.")
    return numbers


def as_classes(value: Any, where: str) -> tuple[int | None, tuple[str, ...]]:
    """Number of classes and their names (none where only the number is given) from an attribute ``classes``.

    Raises
    ------
    DataError
        Neither a whole number above 0 nor a list of different names.
    """
    if value is None:
        return None, ()
    given = np.asarray(value)
    if given.dtype.kind in "iuf" and given.size == 1 and given.item() >= 1 and given.item() == int(given.item()):
        return int(given.item()), ()
    if given.ndim == 1 and given.size:
        names = [n.decode("utf-8", "replace") if isinstance(n, bytes) else n for n in given.tolist()]
        if all(isinstance(n, str) for n in names) and len(set(names)) == len(names):
            return len(names), tuple(names)
    raise DataError(
        f"{where}: attribute 'classes' is {_shown(value)}, expected how many there are, or a list of their names, all different."
    )


def as_label_range(value: Any) -> tuple[int, int] | None:
    """The least and the highest label from an attribute ``label_range``; None where it is missing or something else."""
    given = np.asarray(() if value is None else value)
    return (int(given[0]), int(given[1])) if given.shape == (2,) and given.dtype.kind in "iu" else None


def _shown(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, np.ndarray | np.generic) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
