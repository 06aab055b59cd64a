"""Open the datasets that a run file names, and refuse those that do not fit its network.

train = open_dataset(config.data, "train", input_shape=(8, 8, 1), classes=10)
x = train.read(samples, box)              # (len(samples), *box_shape(box))
y = train.read_targets(samples, box)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from lbpar.config.data import DataConfig
from lbpar.data.dataset import Dataset
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.many_files import ManyFiles
from lbpar.data.named import NamedDataset
from lbpar.data.normalise import Normalisation, Normalisations
from lbpar.data.rules import Rule
from lbpar.data.synthetic import SyntheticDataset
from lbpar.data.targets import check_targets
from lbpar.data.uneven import UnevenFiles
from lbpar.errors import ConfigError, DataError
from lbpar.text import nearest

_APART = 1_000_003
"""Between seeds of synthetic inputs."""


def open_dataset(
    data: DataConfig,
    split: str = "train",
    *,
    input_shape: Sequence[int] | None = None,
    target_shape: Sequence[int] | None = None,
    classes: int | None = None,
    dtype: DTypeLike = np.float32,
    seed: int = 0,
    limits: tuple[float, float] | None = None,
    share: tuple[int, int] = (0, 1),
    like: Normalisation | None = None,
    ignore: int | None = None,
    target: bool = True,
) -> Dataset:
    """Open one split of the data of a run file. Local: every rank may call it alone.

    Parameters
    ----------
    data : DataConfig
        Section ``data`` of the run file.
    split : {"train", "test"}
        Which entry of ``data``; also the group that is used inside the file if the file has one of that name.
    input_shape : sequence of int, optional
        Shape of one sample that the network takes; another one is refused. Needed for ``synthetic``.
    target_shape : sequence of int, optional
        Shape of one target, () for a label per sample; another one is refused.
    classes : int, optional
        Number of classes of the network's output; None if targets are real numbers. Labels outside are refused.
    dtype : dtype
        float32 or float64, of what is read.
    seed : int
        Of ``synthetic`` samples.
    limits, share
        See `lbpar.data.targets.check_targets`: all targets are read once, to find those out of range.
    like : Normalisation, optional
        Mean and standard deviation to use instead of the file's: those of the training data, for all that the network sees.
    ignore : int, optional
        A label that may lie outside of the classes.
    target : bool
        Whether it has targets.

    Raises
    ------
    DataError
        The file is missing, truncated or not HDF5; a dataset is missing or has the wrong shape or type; targets are
        out of range; ``synthetic`` without ``input_shape``; the run file names no such split.
    """
    source = getattr(data, split, None) if split in ("train", "test") else None
    if source is None:
        raise DataError(f"data.{split}: not given; name an HDF5 file or `synthetic` in the run file.")
    if source == "synthetic":
        if input_shape is None:
            raise DataError(f"data.{split}: synthetic samples need the network's input shape.")
        return SyntheticDataset(
            data.samples,
            tuple(input_shape),
            tuple(target_shape or ()),
            classes,
            dtype=dtype,
            seed=2 * seed + (split == "test"),
            cache=data.cache,
        )
    x, y = _plain(data.x, "x", "input"), _plain(data.y, "y", "target") if target else None
    patches = data.patches is not None
    dataset = open_files(source, split, patches, x=x, y=y, classes=classes, dtype=dtype, cache=data.cache)
    given = None if data.normalise is None else data.normalise.model_dump()
    dataset.normalisation = dataset.normalisation.ruled(Rule.of(given), data.nan == "zero")
    if split == "test":
        _check_apart(dataset, data, x)
    if like is not None:
        dataset.normalise_like(like)
    first = share if data.check_labels else None
    check_dataset(dataset, input_shape, target_shape, classes, limits, first, ignore, data.nan == "skip")
    return dataset


def open_files(
    source: str | tuple[str, ...], split: str, uneven: bool = False, **options: Any
) -> Hdf5Dataset | UnevenFiles:
    """The samples of a file, or of several, which may be ``uneven`` in size."""
    if isinstance(source, str):
        return Hdf5Dataset(source, split, **options)
    return (UnevenFiles if uneven else ManyFiles)(source, split, **options)


def _plain(name: str | dict[str, str], field: str, what: str) -> str:
    if isinstance(name, dict):
        raise ConfigError(
            f"data.{field}: got names of several, expected one name: the network has a single {what} without a name."
        )
    return name


def open_named(
    data: DataConfig,
    split: str,
    inputs: Mapping[str, Mapping[str, Any]],
    targets: Mapping[str, Mapping[str, Any]],
    *,
    seed: int = 0,
    like: Normalisations | None = None,
    **options: Any,
) -> NamedDataset:
    """Open one split for a network with several inputs or targets. Local.

    Parameters
    ----------
    data, split
        As for `open_dataset`. ``data.x`` and ``data.y`` say which datasets are not called like the input or target. ``data.normalise`` is for inputs
        with pixels or voxels: a vector has no statistics of its own.
    inputs, targets : mapping
        For each, what `open_dataset` is to check: ``input_shape`` or ``target_shape``, ``classes``, ...
    seed, like, **options
        As for `open_dataset`; ``like`` of each input.
    """
    # Targets with pixels belong to an input with pixels, and move with it.
    first = next((name for name, wanted in inputs.items() if len(wanted["input_shape"]) > 1), next(iter(inputs)))
    vectors = {name: {"normalise": None} for name, wanted in inputs.items() if len(wanted["input_shape"]) == 1}
    if data.patches is not None:  # samples are larger: see `lbpar.data.patches.check_patches`
        inputs = {name: {} for name in inputs}
        targets = {name: {**wanted, "target_shape": None} for name, wanted in targets.items()}
    x, y = part_names(data.x, "x", inputs), part_names(data.y, "y", targets)
    opened = {
        name: open_dataset(
            data.model_copy(update={"x": x[name], **vectors.get(name, {})}),
            split,
            **wanted,
            target=False,
            seed=seed + _APART * i,
            like=None if like is None else like[name],
            **options,
        )
        for i, (name, wanted) in enumerate(inputs.items())
    }
    compared = {
        name: open_dataset(
            data.model_copy(update={"x": x[first], "y": y[name], **vectors.get(first, {})}),
            split,
            **inputs[first],
            **wanted,
            seed=seed + _APART * i,
            like=None if like is None else like[first],
            **options,
        )
        for i, (name, wanted) in enumerate(targets.items())
    }
    return NamedDataset(opened, compared)


def part_names(given: str | dict[str, str], field: str, wanted: Iterable[str]) -> dict[str, str]:
    """Which dataset each input or target is: one without a name is the given one."""
    short = {name: name.removeprefix("target/") for name in wanted}
    if isinstance(given, str):
        alone = next((n for n in short if n in ("input", "target")), None)
        if alone is None and given != field:
            raise ConfigError(
                f"data.{field}: got {given}, expected a mapping, as the names are {', '.join(short.values())}."
            )
        return {n: given if n == alone else s for n, s in short.items()}
    unknown = next((n for n in given if n not in short.values()), None)
    if unknown is not None:
        known = ", ".join(short.values())
        raise ConfigError(f"data.{field}: got {unknown!r}, {nearest(unknown, short.values())}expected some of {known}.")
    return {n: given.get(s, s) for n, s in short.items()}


def _check_apart(test: Hdf5Dataset | UnevenFiles, data: DataConfig, x: str) -> None:
    """Refuse to test on the training samples."""
    try:
        train = open_files(data.train, "train", data.patches is not None, x=x, y=None)
    except DataError:  # it may have stayed behind where a finished network is evaluated
        return
    if train.identity == test.identity:
        raise DataError(
            f"data.test: {test.name} are the training samples. Store both in groups, /train and /test, name another file or group "
            "(FILE:/GROUP), or leave data.test out."
        )


def check_dataset(
    dataset: Dataset,
    input_shape: Sequence[int] | None,
    target_shape: Sequence[int] | None,
    classes: int | None = None,
    limits: tuple[float, float] | None = None,
    share: tuple[int, int] | None = (0, 1),
    ignore: int | None = None,
    skip: bool = False,
) -> None:
    """Refuse a dataset that does not fit a network. See `open_dataset`; without ``share``, no target is read."""
    got = dataset.sample_shape
    if input_shape is not None and got != tuple(input_shape):
        hint = ""
        if sorted(got) == sorted(input_shape):
            hint = " lbpar stores channels last: ([D], H, W, C)."
        raise DataError(
            f"{dataset.name}: samples have the shape {got}, expected {tuple(input_shape)}, the network's input.{hint} "
            "Change `model` (input) or convert the data."
        )
    if target_shape is not None and dataset.target_shape != tuple(target_shape):
        raise DataError(
            f"{dataset.name}: targets have the shape {dataset.target_shape} per sample, expected {tuple(target_shape)}. "
            f"{_reshaped(dataset.target_shape, tuple(target_shape), classes)}."
        )
    if classes is not None and dataset.classes is None:
        raise DataError(
            f"{dataset.name}: targets are real numbers, expected whole-number labels of {classes} classes. Store them as integers, or "
            "train with a loss of real numbers (mse, l1, huber, bce)."
        )
    if share is None or not getattr(dataset, "has_targets", True):
        return
    with closing(dataset):
        check_targets(dataset, classes, limits, share, ignore, skip)


def _reshaped(got: tuple[int, ...], wanted: tuple[int, ...], classes: int | None) -> str:
    """What to do about targets of another shape."""
    if classes is not None and got == (*wanted, classes):
        return "These look like one-hot labels: store the number of the class instead, y.argmax(-1)"
    if got == (*wanted, 1):
        return "Store them without the last dimension, y[..., 0]"
    if wanted == (*got, 1):
        return "Store them with a dimension for the one output, y[..., None], as floating point"
    if classes is None and wanted[:-1] == got:
        return f"For labels take the loss cross_entropy or dice; for {wanted[-1]} outputs store as many real numbers"
    return "Change the network's output, or the targets"
