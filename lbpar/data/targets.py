"""Targets that a loss cannot take are refused before training, not found out from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, isinf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.checks import is_label
from lbpar.data.pieces import cuts
from lbpar.errors import DataError

Array = NDArray[Any]
SCAN = 1 << 22
"""Targets read at a time."""


def check_targets(
    dataset: Any,
    classes: int | None = None,
    limits: tuple[float, float] | None = None,
    share: tuple[int, int] = (0, 1),
    ignore: int | None = None,
) -> int:
    """Read targets, a few million at a time, and refuse those out of range.

    Parameters
    ----------
    dataset : Dataset
        One that has ``stored_targets(*slices)`` is asked for these.
    classes : int, optional
        Labels must lie below it, and below the number that the dataset says.
    limits : (float, float), optional
        For a loss of real targets; infinite: any finite number. Without it, integers are labels.
    share : (int, int)
        (k, n): read the k-th of n parts of the samples only, as the k-th of n ranks that tell each other.
    ignore : int, optional
        The one label that may lie outside: positions that have it count nowhere.

    Returns
    -------
    int
        The largest label that was read, -1 if there is none.

    Raises
    ------
    DataError
        Names the first target out of range, its sample, and what to do.
    """
    limit = min((c for c in (dataset.classes, classes) if c is not None), default=None)
    top = -1
    for at, part in target_pieces(dataset, share):
        labels = limits is None and is_label(part)
        low, high = (0, inf if limit is None else limit - 1) if labels else limits or (-inf, inf)
        if labels and ignore is not None:
            counted = part[part != ignore]
            if not counted.size:
                continue
            least, most = counted.min(), counted.max()
        else:
            least, most = part.min(), part.max()  # NaN if there is one
        if not (low <= least and most <= high) or isinf(least) or isinf(most):
            fits = (part >= low) & (part <= high) & np.isfinite(part)
            if labels and ignore is not None:
                fits |= part == ignore
            place = np.argwhere(~fits)[0]
            name = getattr(dataset, "target_name", "")
            where = f"in sample {at + int(place[0])}" + (f" of '{name}'" if name else "")
            wanted = _classes(dataset, limit) if labels else _numbers(high)
            raise DataError(
                f"{dataset.name}: got the {'label' if labels else 'target'} {part[tuple(place)]} {where}, expected {wanted}"
            )
        top = max(top, int(most)) if labels else top
    return top


def target_pieces(dataset: Any, share: tuple[int, int] = (0, 1)) -> Iterator[tuple[int, Array]]:
    """Yield a share of all targets as (first sample, targets, or a part of them, of some samples)."""
    (k, n), stored = share, getattr(dataset, "stored_targets", None)
    first, last = (len(dataset) * i // n for i in (k, k + 1))
    for rows, *space in cuts((last - first, *dataset.target_shape), SCAN, whole=stored is None):
        at, end = first + rows.start, min(first + rows.stop, last)
        part = stored(slice(at, end), *space) if stored else dataset.read_targets(np.arange(at, end))
        if part.size:
            yield at, part


def _classes(dataset: Any, limit: int | None) -> str:
    names: Sequence[str] = getattr(dataset, "class_names", ())
    named = f": {', '.join(names[:10])}" if names else ""
    allowed = "0 or more" if limit is None else f"0 to {limit - 1} ({limit} classes{named})"
    return f"{allowed}. Correct the labels or the network's number of classes."


def _numbers(high: float) -> str:
    if isinf(high):
        return "a finite number. Fill the gaps, or leave such samples out."
    return f"0 to {high:g}: the loss takes probabilities. Store masks as 0 and 1, or take another loss."
