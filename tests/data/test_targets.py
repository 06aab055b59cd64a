"""Targets out of the range of a loss are found before training, in files and in a caller's data, on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lbpar.data import targets
from lbpar.data.dataset import Dataset
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.normalise import Normalisation
from lbpar.data.targets import check_targets
from lbpar.data.writer import Split, write
from lbpar.errors import DataError
from lbpar.train.setup import build_graph, build_plan
from lbpar.train.trainer import Trainer
from lbpar.transport.base import Transport
from lbpar.transport.virtual import VirtualWorld
from tests.util.training import run_file

N = 8
X = np.random.default_rng(0).standard_normal((N, 4, 6, 2)).astype(np.float32)
LABELS = np.arange(N) % 3
MASKS = (X[..., :1] > 0).astype(np.float32)


@dataclass
class Memory(Dataset):
    """A caller's own data."""

    y: np.ndarray
    classes: int | None = None
    name: str = "mine"
    normalisation: Normalisation = field(default_factory=Normalisation)

    def __post_init__(self) -> None:
        self.sample_shape, self.target_shape = X.shape[1:], self.y.shape[1:]

    def __len__(self) -> int:
        return len(self.y)

    def _box(self, a, samples, box):
        return a[np.ix_(samples, *(np.concatenate([np.arange(*r) for r in runs]) for runs in box))]

    def _read(self, samples, box):
        return self._box(X, samples, box)

    def _read_targets(self, samples, box):
        return self._box(self.y, samples, box)


def spoilt(y: np.ndarray, sample: int, value: float) -> np.ndarray:
    out = np.array(y, float if isinstance(value, float) else y.dtype)
    out[(sample, *(-1,) * (y.ndim - 1))] = value
    return out


CASES = {
    "labels": ("cross_entropy", 3, spoilt(LABELS, 5, 3), r"label 3 in sample 5.*expected 0 to 2 \(3 classes\)"),
    "negative": ("cross_entropy", 3, spoilt(LABELS, 0, -1), r"label -1 in sample 0.*expected 0 to 2 \(3 classes\)"),
    "voxels": ("dice", 3, spoilt(np.zeros((N, 4, 6), int), 7, 255), r"label 255 in sample 7.*0 to 2"),
    "masks of 255": ("bce", 1, 255 * MASKS, r"target 255\.0 in sample 0.*0 to 1.*Store masks as 0 and 1"),
    "below 0": ("bce", 1, spoilt(MASKS, 6, -0.5), r"target -0\.5 in sample 6.*0 to 1"),
    "not a number": ("bce", 1, spoilt(MASKS, 6, np.nan), r"target nan in sample 6.*0 to 1"),
    "gaps": ("mse", 1, spoilt(MASKS, 4, np.nan), r"target nan in sample 4.*a finite number\. Fill the gaps"),
    "infinite": ("mse", 1, spoilt(MASKS, 4, -np.inf), r"target -inf in sample 4.*a finite number"),
}
FITS = {
    "cross_entropy": (3, LABELS),
    "dice": (3, np.zeros((N, 4, 6), int)),
    "bce": (1, MASKS),
    "mse": (1, 1e6 * MASKS - 7),
}


def config(loss: str, outputs: int, path: Path, per_voxel: bool):
    tail = "" if per_voxel else ", {op: global_avg_pool}"
    return run_file(
        [f"train.loss={loss}", f"data.train={path}"],
        f"""
        model: {{input: [4, 6, 2], layers: [{{op: conv, filters: {outputs}, kernel: 1}}{tail}]}}
        train: {{batch: 4}}
        engine: {{name: numpy, dtype: float64}}
        """,
    )


def everywhere(config, procs: int, job) -> None:
    """On every virtual rank."""
    graph = build_graph(config)
    plan = build_plan(config, graph, procs)

    def one(transport: Transport) -> None:
        job(lambda make: make(config, graph, plan, transport))

    VirtualWorld(plan.grid).run(one)


@pytest.mark.parametrize("procs", [1, 3])
@pytest.mark.parametrize(("loss", "outputs", "y", "words"), CASES.values(), ids=CASES.keys())
def test_targets_that_a_loss_cannot_take(
    tmp_path: Path, loss: str, outputs: int, y: np.ndarray, words: str, procs: int
) -> None:
    bad, good = tmp_path / "bad.h5", tmp_path / "good.h5"
    write(bad, [Split("train", X, y)])
    with pytest.raises(DataError, match=f"bad.h5:/train: got the {words}"):
        everywhere(config(loss, outputs, bad, y.ndim > 1), procs, lambda make: make(Trainer.alike))
    write(good, [Split("train", X, FITS[loss][1])])
    mine = Memory(y, outputs if loss in ("cross_entropy", "dice") else None)
    with pytest.raises(DataError, match=f"mine: got the {words}"):
        everywhere(config(loss, outputs, good, y.ndim > 1), procs, lambda make: make(Trainer).evaluate(mine))


@pytest.mark.parametrize(("loss", "outputs", "y"), [(k, *v) for k, v in FITS.items()], ids=FITS.keys())
def test_targets_that_fit(tmp_path: Path, loss: str, outputs: int, y: np.ndarray) -> None:
    write(tmp_path / "a.h5", [Split("train", X, y)])
    everywhere(config(loss, outputs, tmp_path / "a.h5", y.ndim > 1), 3, lambda make: make(Trainer.alike).train_epoch())


@pytest.mark.parametrize(
    ("loss", "outputs", "y", "words"),
    [
        ("cross_entropy", 3, np.eye(3)[LABELS], r"shape \(3,\) per sample, expected \(\).*one-hot labels.*y\.argmax\(-1\)"),
        ("cross_entropy", 3, np.float64(LABELS), r"real numbers, expected whole-number labels of 3 classes\. Store them as integers"),
        ("cross_entropy", 3, np.float64(LABELS)[:, None], r"Store them without the last dimension, y\[\.\.\., 0\]"),
        ("bce", 1, LABELS % 2, r"expected \(1,\)\. Store them with a dimension for the one output, y\[\.\.\., None\], as floating"),
        ("bce", 3, LABELS, r"expected \(3,\)\. For labels take the loss cross_entropy or dice; for 3 outputs"),
        ("mse", 3, np.zeros((N, 2)), r"shape \(2,\) per sample, expected \(3,\)\. Change the network's output, or the targets"),
    ],
)  # fmt: skip
def test_targets_of_another_shape_or_type(tmp_path: Path, loss: str, outputs: int, y: np.ndarray, words: str) -> None:
    write(tmp_path / "a.h5", [Split("train", X, y)])
    with pytest.raises(DataError, match=words):
        everywhere(config(loss, outputs, tmp_path / "a.h5", False), 1, lambda make: make(Trainer.alike))


def test_ranks_read_a_part_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "SCAN", 2)
    seen: list[int] = []
    data = Memory(LABELS, 3)
    data.read_targets = lambda samples, box=None: (seen.extend(samples), LABELS[samples])[1]  # type: ignore[method-assign]
    assert max(check_targets(data, share=(k, 3)) for k in range(3)) == 2
    assert seen == list(range(N))
    assert check_targets(Memory(np.zeros((0, 2))), limits=(-inf, inf), share=(1, 2)) == -1


def test_the_label_that_is_ignored_may_lie_outside() -> None:
    y = np.array([[[0, 1], [255, 1]], [[255, 255], [255, 255]]], np.uint8)

    data = Memory(y, 256, "d")
    assert check_targets(data, 2, ignore=255) == 1
    with pytest.raises(DataError, match=r"the label 255 in sample 0.*expected 0 to 1"):
        check_targets(data, 2)
    y[0, 0, 0] = 7
    with pytest.raises(DataError, match=r"the label 7 in sample 0.*expected 0 to 1"):
        check_targets(data, 2, ignore=255)


@pytest.mark.parametrize("procs", [1, 2])
@pytest.mark.parametrize(
    ("loss", "outputs", "y", "words"), [CASES[n] for n in ("labels", "negative", "voxels", "below 0", "gaps")]
)
def test_without_the_check_training_begins_at_once_and_ends_at_the_batch_that_has_it(
    tmp_path: Path, loss: str, outputs: int, y: np.ndarray, words: str, procs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "bad.h5", [Split("train", X, y)])
    given = config(loss, outputs, tmp_path / "bad.h5", y.ndim > 1)
    unchecked = given.model_copy(update={"data": given.data.model_copy(update={"check_labels": False})})
    monkeypatch.setattr(Hdf5Dataset, "stored_targets", None)  # by which all are read
    begun = []

    def job(make: Any) -> None:
        trainer = make(Trainer.alike)
        begun.append(trainer)
        list(trainer.train())

    with pytest.raises(DataError, match=f"bad.h5:/train: got the {words}"):
        everywhere(unchecked, procs, job)
    assert len(begun) == procs


def test_without_the_check_patches_and_whole_samples_are_looked_at(tmp_path: Path) -> None:
    """By the number of the sample, not of the patch; a label that counts nowhere may be there."""
    x, y = np.zeros((4, 9, 8, 1), np.float32), np.zeros((4, 9, 8), np.uint8)
    y[2, 4, 4] = 9
    write(tmp_path / "a.h5", [Split("train", x, y), Split("test", x, y)])
    text = """
    model: {input: [5, 4, 1], layers: [{op: conv, filters: 3, kernel: 1}]}
    data: {patches: {per_sample: 9, foreground: 0}, check_labels: false}
    train: {batch: 9, loss: dice_cross_entropy, epochs: 2}
    engine: {name: numpy, dtype: float64}
    """
    where = [f"data.train={tmp_path}/a.h5", "train.epochs=9"]
    with pytest.raises(DataError, match="a.h5:/train: got the label 9 in sample 2, expected 0 to 2"):
        everywhere(run_file(where, text), 2, lambda make: list(make(Trainer.alike).train()))
    loss = "train.loss={name: dice_cross_entropy, ignore_index: 9}"
    everywhere(run_file([*where, loss], text), 2, lambda make: list(make(Trainer.alike).train()))
    other = tmp_path / "b.h5"
    write(other, [Split("train", x, np.zeros_like(y)), Split("test", x + 1, y)])
    where = [f"data.train={other}", f"data.test={other}"]
    with pytest.raises(DataError, match="b.h5:/test: got the label 9 in sample 2, expected 0 to 2"):
        everywhere(run_file(where, text), 2, lambda make: list(make(Trainer.alike).train()))


def test_labels_whose_range_the_file_tells_are_not_read_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that somebody wrote there later is refused when its batch is read."""
    paths = [tmp_path / f"{name}.h5" for name in ("as written", "changed", "without")]
    for path in paths:
        write(path, [Split("train", X, LABELS)])
    with h5py.File(paths[0]) as file:
        assert file["train/y"].attrs["label_range"].tolist() == [0, 2]
        assert "label_range" not in file["train/x"].attrs
    for path in paths[1:]:
        with h5py.File(path, "a") as file:
            file["train/y"][5] = 7
            if path == paths[2]:
                del file["train/y"].attrs["label_range"]
    runs = [config("cross_entropy", 3, path, False) for path in paths]
    with pytest.raises(DataError, match=r"label 7 in sample 5.*expected 0 to 2"):
        everywhere(runs[2], 2, lambda make: make(Trainer.alike))
    monkeypatch.setattr(Hdf5Dataset, "stored_targets", None)  # by which all are read
    everywhere(runs[0], 2, lambda make: make(Trainer.alike).train_epoch())
    everywhere(runs[1], 2, lambda make: make(Trainer.alike))
    with pytest.raises(DataError, match=r"label 7 in sample 5.*expected 0 to 2"):
        everywhere(runs[1], 2, lambda make: make(Trainer.alike).train_epoch())
