"""Say what an HDF5 dataset holds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from math import prod
from pathlib import Path

from lbpar.config.paths import as_path
from lbpar.config.plan_file import PlanFile, load_plan_file
from lbpar.data.box import touched
from lbpar.data.chunks import advice, whole_chunks
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.targets import check_targets
from lbpar.errors import DataError
from lbpar.layout.runs import Box, block, box_size

_MOST = 20  # classes that are listed


def describe(
    path: str | Path, x: str | Sequence[str] = "x", y: str | Sequence[str] = "y", plan: str | Path | None = None
) -> str:
    """Return a few lines about each split of a file; labels are checked on the way.

    Parameters
    ----------
    path : str or Path
    x, y : str or sequence of str
        Names of the datasets of samples and targets: of several inputs and targets, each of them.
    plan : str or Path, optional
        A plan file: also say what a process of it must read of each sample.

    Raises
    ------
    DataError
        What `Hdf5Dataset` refuses.
    ConfigError
        The plan file cannot be read.
    """
    path, xs, ys = as_path(path), *([n] if isinstance(n, str) else list(n) for n in (x, y))
    split_plan = None if plan is None else load_plan_file(plan)
    lines = [f"{path}: {os.path.getsize(path):,} bytes" if os.path.isfile(path) else f"{path}"]
    for split in splits_of(path, xs[0]):
        where = f"{path}:/{split}" if split else path
        number = 0
        for name in xs:
            data = Hdf5Dataset(where, split, x=name, y=None)
            number = _same_number(data, name, number)
            called = f"{name}: " if len(xs) > 1 else ""
            first = f"  /{split}: {len(data):,} samples " if name == xs[0] else "    "
            lines.append(f"{first}{called}{_shape(data.sample_shape)}, {data.storage}")
            lines += [f"    {told}" for told in [whole_chunks(data)] if told]
            lines += [f"    {told}" for told in _with_plan(data, split_plan)]
        for name in ys:
            data = Hdf5Dataset(where, split, x=xs[0], y=name)
            called = f"{name}: " if len(ys) > 1 else ""
            lines += [f"    {called * (i == 0)}{line}" for i, line in enumerate(_targets(data))]
    return "\n".join(lines)


def _same_number(data: Hdf5Dataset, name: str, number: int) -> int:
    """Refuse inputs of different numbers of samples."""
    if number and len(data) != number:
        raise DataError(f"{data.name}: '{name}' has {len(data)} samples, expected {number} as the first input.")
    return len(data)


def _targets(data: Hdf5Dataset) -> Iterator[str]:
    with closing(data):
        top = check_targets(data, skip=True)
        spoilt = len(data.own_spoilt(range(len(data)), targets=True))
    if top < 0:
        yield f"targets {_shape(data.target_shape)}, real numbers" + (
            f", not finite in {spoilt} samples, which training can leave out (`data.nan: skip`)" if spoilt else ""
        )
        return
    what = f"one per voxel {_shape(data.target_shape)}" if data.target_shape else "one per sample"
    classes, counts = top + 1 if data.classes is None else data.classes, data.count_labels()
    yield f"labels {what}, {_occurring(sorted(counts), classes, data.classes is not None)}"
    if not data.target_shape:
        first = range(min(classes, _MOST))
        shown = [f"{data.class_names[c]} {counts[c]}" if data.class_names else str(counts[c]) for c in first]
        yield f"samples per class {' '.join(shown)}{' ...' if classes > _MOST else ''}"


def _with_plan(data: Hdf5Dataset, plan: PlanFile | None) -> Iterator[str]:
    """What a process reads of each sample, where the plan's first layer is split in space."""
    space, names = data.sample_shape[:-1], "DHW"[4 - len(data.sample_shape) :] if len(data.sample_shape) > 2 else ""
    if plan is None or not names:
        return
    loops = next(iter(plan.ops.values()), {})
    parts: dict[str, int] = {
        d: n if isinstance(n, int) else prod(plan.grid[a] for a in n) for d, n in loops.items() if d in names
    }
    spans = (block(0, e, parts.get(d, 1), 0) for d, e in zip(names, space, strict=True))
    box: Box = (*((span,) for span in spans), ((0, data.sample_shape[-1]),))
    split = ", ".join(f"{d} in {n}" for d, n in parts.items() if n > 1)
    if not split:
        yield "by this plan, processes read whole samples"
    else:
        said = advice(data, box, f"a process that has a block of it ({split})")
        read = 1.0 if data.chunks is None else touched(data.chunks, data.sample_shape, box) / max(1, box_size(box))
        much = f"{read:.2g} times its block" if read >= 1.5 else "little more than its block"
        yield said or f"by this plan ({split}), a process reads {much}"


def _occurring(labels: list[int], classes: int, said: bool) -> str:
    """How many classes there are, or, where not all of them occur, which do."""
    if len(labels) == classes:
        return f"{classes} classes"
    shown = ", ".join(map(str, labels[:_MOST])) + (", ..." if len(labels) > _MOST else "")
    text = f"{len(labels)} values: {shown}" + (f" (of {classes} classes)" if said else "")
    if len(labels) > 1 and labels[-1] == 255 > labels[-2] + 1:
        text += (
            "; 255 often stands for 'no class': `train: {loss: {name: cross_entropy, ignore_index: 255}}` leaves it out"
        )
    return text


def splits_of(path: Path, x: str) -> list[str]:
    """Groups that hold samples, the usual ones first, and the root if it holds some."""
    import h5py

    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            found = [n for n, o in file.items() if isinstance(o, h5py.Group) and x in o]
            root = [""] if x in file or not found else []
    except (OSError, KeyError, RuntimeError, ValueError):
        return [""]  # opening it says what is wrong
    return root + sorted(found, key=lambda n: (n != "train", n != "test"))


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "()"
