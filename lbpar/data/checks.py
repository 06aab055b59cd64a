"""What samples and their targets must look like, in a file and before one is written."""

from __future__ import annotations

from typing import Any

from lbpar.errors import DataError


def check_samples(x: Any, y: Any, where: str, names: tuple[str, str] = ("x", "y")) -> None:
    """Refuse samples and targets that nothing could be trained with.

    Parameters
    ----------
    x, y : anything with a shape and a dtype
    where : str
        Opens the message.
    names : (str, str)
        What x and y are called there.

    Raises
    ------
    DataError
        Wrong type or shape, different numbers, or none at all.
    """
    if x.dtype.kind not in "iufb":
        raise DataError(f"{where}: '{names[0]}' has the type {x.dtype}, expected whole or real numbers.")
    if not 2 <= len(x.shape) <= 5 or 0 in x.shape[1:]:
        raise DataError(
            f"{where}: '{names[0]}' has the shape {x.shape}, expected (samples, [D], [H], [W], C): channels last, "
            "with a channel dimension even for one channel."
        )
    if y.dtype.kind not in "iufb":
        raise DataError(f"{where}: '{names[1]}' has the type {y.dtype}, expected whole or real numbers.")
    if y.shape[:1] != x.shape[:1]:
        raise DataError(
            f"{where}: '{names[1]}' has the shape {y.shape}, expected one entry per sample of '{names[0]}' ({x.shape[0]})."
        )
    if not x.shape[0]:
        raise DataError(f"{where}: '{names[0]}' holds no samples, expected at least one.")
    if is_label(y) and y.shape[1:] not in ((), x.shape[1:-1]):
        raise DataError(
            f"{where}: '{names[1]}' has the shape {y.shape}, expected labels ({x.shape[0]},), or one per voxel "
            f"{x.shape[:-1]}; store the argmax of one-hot labels, and real targets as floating point."
        )


def is_label(y: Any) -> bool:
    """Whether targets are numbers of classes rather than real numbers."""
    return y.dtype.kind in "iub"
