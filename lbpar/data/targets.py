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
    skip: bool = False,
) -> int:
    """Read targets, a few million at a time, and refuse those out of range; labels whose range the file tells, only if that does not fit.

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
    skip : bool
        Real targets may be other than finite: their samples are left out.

    Returns
    -------
    int
        The largest label that was read, -1 if there is none.

    Raises
    ------
    DataError
        Names the first target out of range, its sample, and what to do.
    """
    top = -1
    for start, one, there in dataset.alike(own_range(dataset, share)):
        known = getattr(one, "label_range", None)
        if known is not None and limits is None and 0 <= known[0] <= known[1] <= _highest(dataset, classes):
            top = max(top, known[1])
            continue
        for first, part, _ in alike_targets(one, there):
            at = start + first - there.start
            top = max(top, check_part(dataset, part, range(at, at + len(part)), classes, limits, ignore, skip))
    return top


def check_part(
    dataset: Any,
    part: Array,
    samples: Sequence[int] | Array,
    classes: int | None = None,
    limits: tuple[float, float] | None = None,
    ignore: int | None = None,
    skip: bool = False,
) -> int:
    """The same for targets that were read, or a part of them, of samples of the given numbers."""
    most_label = _highest(dataset, classes)
    labels = limits is None and is_label(part)
    low, high = (0, most_label) if labels else limits or (-inf, inf)
    excused = labels and ignore is not None
    counted = part
    if excused or (skip and part.dtype.kind == "f"):
        counted = part[part != ignore if excused else np.isfinite(part)]
    if not counted.size:
        return -1
    least, most = counted.min(), counted.max()  # NaN if there is one
    if not (low <= least and most <= high) or isinf(least) or isinf(most):
        fits = (part >= low) & (part <= high) & np.isfinite(part)
        if excused:
            fits |= part == ignore
        elif skip:
            fits |= ~np.isfinite(part)
        place = np.argwhere(~fits)[0]
        name = getattr(dataset, "target_name", "")
        where = f"in sample {samples[int(place[0])]}" + (f" of '{name}'" if name else "")
        wanted = _classes(dataset, most_label) if labels else _numbers(high)
        raise DataError(
            f"{dataset.name}: got the {'label' if labels else 'target'} {part[tuple(place)]} {where}, expected {wanted}"
        )
    return int(most) if labels else -1


def target_pieces(dataset: Any, share: tuple[int, int] = (0, 1)) -> Iterator[tuple[int, Array]]:
    """Yield a share of all targets as (first sample, targets, or a part of them, of some samples)."""
    for start, one, there in dataset.alike(own_range(dataset, share)):
        for at, part, _ in alike_targets(one, there):
            yield start + at - there.start, part


def alike_targets(dataset: Any, samples: range) -> Iterator[tuple[int, Array, int]]:
    """Yield targets of samples of one size as (first sample, targets, or a part of them, of some samples, where that part begins)."""
    stored = getattr(dataset, "stored_targets", None)
    for rows, *space in cuts((len(samples), *dataset.target_shape), SCAN, whole=stored is None):
        some = samples[rows]
        part = stored(slice(some.start, some.stop), *space) if stored else dataset.read_targets(np.array(some))
        if part.size:
            yield some.start, part, space[0].start if space and stored else 0


def own_range(dataset: Any, share: tuple[int, int]) -> range:
    """Numbers of the k-th of n parts of the samples."""
    k, n = share
    return range(*(len(dataset) * i // n for i in (k, k + 1)))


def _highest(dataset: Any, classes: int | None) -> float:
    """The highest label that fits a network and the dataset."""
    return min((c - 1 for c in (dataset.classes, classes) if c is not None), default=inf)


def _classes(dataset: Any, highest: float) -> str:
    names: Sequence[str] = getattr(dataset, "class_names", ())
    named = f": {', '.join(names[:10])}" if names else ""
    allowed = "0 or more" if isinf(highest) else f"0 to {highest} ({highest + 1} classes{named})"
    return f"{allowed}. Correct the labels or the network's number of classes."


def _numbers(high: float) -> str:
    if isinf(high):
        return "a finite number. Fill the gaps, or leave such samples out (data.nan: skip)."
    return f"0 to {high:g}: the loss takes probabilities. Store masks as 0 and 1, or take another loss."
