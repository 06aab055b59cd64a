"""Random patches for training and blended windows for whole samples: against plain NumPy, and alike on every grid."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lbpar import api, inference
from lbpar.config.data import Patches
from lbpar.data import targets
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.patches.cut import MOST, Patched, own_places
from lbpar.data.patches.sliding import shares, starts
from lbpar.errors import ConfigError, DataError
from lbpar.study.slices import slices
from lbpar.train import predict
from lbpar.train.setup import build_graph, build_plan
from lbpar.train.trainer import Trainer
from lbpar.transport.virtual import VirtualWorld
from tests.runtime.test_scores import means, per_volume
from tests.util import training
from tests.util.training import run_file, whole

RNG = np.random.default_rng(4)
X = RNG.standard_normal((5, 9, 7, 8, 2))
Y = np.zeros((5, 9, 7, 8), np.uint8)
Y[:, 6:, 2:4, 1] = 1
Y[3] = 0
RUN = """
model: {input: [4, 5, 4, 2], layers: [{op: conv, filters: 3, kernel: 3, pad: 1, name: low}, {op: relu}, {op: conv, filters: 3, kernel: 1, name: last}]}
data: {patches: {per_sample: 2, foreground: 0.5, overlap: 0.4}}
train: {batch: 4, epochs: 2, seed: 5, loss: dice_cross_entropy, optimizer: {name: sgd, lr: 0.1},
        evaluate: {metrics: [dice, confusion, dice_per_volume], watch: test_dice}}
engine: {name: numpy, dtype: float64}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "vol.h5", "w") as f:
        f["train/x"], f["train/y"], f["test/x"], f["test/y"] = X[:3], Y[:3], X[3:], Y[3:]
    return tmp_path / "vol.h5"


@pytest.fixture(autouse=True)
def all_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        training, "MEASURED", (*training.MEASURED, "test_dice", "test_confusion", "test_dice_per_volume")
    )


def train(config: Any, procs: int, job: Any) -> Any:
    """As `tests.util.training.train`, with what ranks tell each other."""
    graph = build_graph(config)
    plan = build_plan(config, graph, procs)

    def one(transport: Any) -> Any:
        trainer = Trainer.alike(config, graph, plan, transport)
        return trainer, [training.measured(r) for r in trainer.train()], job(trainer)

    ran = VirtualWorld(plan.grid).run(one)
    assert all(r[1] == ran[0][1] for r in ran)
    return whole([r[0] for r in ran]), ran[0][1], [r[2] for r in ran]


def blended(predict_window: Any, x: np.ndarray, patch: tuple[int, ...], overlap: float, channels: int) -> np.ndarray:
    """Windows of one sample, weighted and added up by plain loops."""
    total, weight = np.zeros((*x.shape[:-1], channels)), np.zeros((*x.shape[:-1], 1))
    begins = [starts(e, p, overlap) for e, p in zip(x.shape[:-1], patch, strict=True)]
    own = [np.maximum(np.exp(-0.5 * ((np.arange(p) - (p - 1) / 2) / (p / 8)) ** 2), 1e-3) for p in patch]
    gauss = own[0][:, None, None, None] * own[1][:, None, None] * own[2][:, None]
    for a in begins[0]:
        for b in begins[1]:
            for c in begins[2]:
                at = (slice(a, a + patch[0]), slice(b, b + patch[1]), slice(c, c + patch[2]))
                total[at] += gauss * predict_window(x[at])
                weight[at] += gauss
    return total / weight


def dice_and_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    """The loss of a batch."""
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    hot = np.eye(p.shape[-1])[labels]
    axes = tuple(range(labels.ndim))
    dice = (2 * (p * hot).sum(axes) + 1) / (p.sum(axes) + hot.sum(axes) + 1)
    return float(-np.log((p * hot).sum(-1)).mean() + (1 - dice).mean())


@pytest.mark.parametrize(
    ("extent", "window", "overlap"), [(9, 4, 0.4), (8, 8, 0.5), (10, 3, 0.0), (50, 16, 0.5), (5, 4, 0.9)]
)
def test_windows_cover_all_with_weights_that_add_up_to_one(extent: int, window: int, overlap: float) -> None:
    begins = starts(extent, window, overlap)
    assert begins[0] == 0 and begins[-1] == extent - window
    assert all(0 < b - a <= max(1, window * (1 - overlap)) for a, b in itertools.pairwise(begins))
    total = np.zeros(extent)
    for b, own in zip(begins, shares(extent, window, begins), strict=True):
        total[b : b + window] += own
    np.testing.assert_allclose(total, 1, rtol=1e-12)


def test_patches_are_parts_of_their_samples_around_places_that_are_not_background(file: Path) -> None:
    dataset = Hdf5Dataset(file, "train", dtype=np.float64)
    places = own_places(dataset, (0, 1))
    assert {tuple(p) for p in places[1].tolist()} == {tuple(p) for p in np.argwhere(Y[1]).tolist()}
    around = Patched(dataset, (4, 5, 4), Patches(per_sample=7, foreground=1.0), places, 3)
    assert len(around) == 21 and around.sample_shape == (4, 5, 4, 2) and around.target_shape == (4, 5, 4)
    x, y = around.read(np.arange(21)), around.read_targets(np.arange(21))
    for n in range(21):
        sample, origin = around.place(n)
        at = tuple(slice(o, o + p) for o, p in zip(origin, (4, 5, 4), strict=True))
        assert sample == n // 7 and y[n].any()
        np.testing.assert_array_equal(x[n], X[sample][at])
        np.testing.assert_array_equal(y[n], Y[sample][at])
    part = around.read(np.array([9, 2]), (((1, 3),), ((0, 2), (4, 5)), ((0, 4),), ((1, 2),)))
    np.testing.assert_array_equal(part, x[[9, 2]][:, 1:3][:, :, [0, 1, 4]][..., 1:2])
    anywhere = Patched(dataset, (4, 5, 4), Patches(per_sample=200, foreground=0.0), places, 3)
    origins = np.array([anywhere.place(n)[1] for n in range(600)])
    assert (origins.min(0) == 0).all() and (origins.max(0) == (5, 2, 4)).all()
    other = anywhere.at(1)
    assert any(anywhere.place(n) != other.place(n) for n in range(9)) and other.place(5) == anywhere.at(1).place(5)


def test_places_are_found_piece_by_piece_and_are_few(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Hdf5Dataset(file, "train")
    want = own_places(dataset, (0, 1), ignore=9)
    monkeypatch.setattr(targets, "SCAN", 7 * 8 * 2)  # two planes at a time
    got = own_places(dataset, (0, 1), ignore=9)
    assert got.keys() == want.keys()
    for i in want:
        np.testing.assert_array_equal(np.sort(got[i], 0), np.sort(want[i], 0))
    assert own_places(dataset, (0, 1), ignore=1) == {} and len(want[0]) <= MOST
    shared = [own_places(dataset, (k, 2)) for k in range(2)]
    assert sorted([*shared[0], *shared[1]]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("procs", "plan"),
    [
        (1, "{}"),
        (2, "{strategy: spatial}"),
        (3, "{strategy: data}"),
        (4, "{strategy: data, layers: {low: {F: 2, D: 2}, last: {F: 4}}}"),
    ],
)
def test_any_grid_trains_and_predicts_whole_samples_alike(
    procs: int, plan: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "PART", 100)  # windows come in parts

    def job(trainer: Trainer) -> Any:
        trainer.predict_to(tmp_path / f"{procs}.npy", Hdf5Dataset(file, "test", y=None, dtype=np.float64), labels=True)
        return trainer.predict(X[3:]), slices(trainer, [1])

    tensors, records, found = train(
        run_file([f"data.train={file}", f"data.test={file}", f"parallel={plan}"], RUN), procs, job
    )
    out = found[0][0]
    assert all(np.array_equal(f[0], out) for f in found)

    def window(x: np.ndarray) -> np.ndarray:
        wide = np.pad(x, ((1, 1), (1, 1), (1, 1), (0, 0)))
        w, d, h, v = tensors["low.weight"], *x.shape[:-1]
        y = tensors["low.bias"] + sum(
            wide[i : i + d, j : j + h, k : k + v] @ w[:, i, j, k].T
            for i in range(3)
            for j in range(3)
            for k in range(3)
        )
        return np.maximum(y, 0) @ tensors["last.weight"][:, 0, 0, 0].T + tensors["last.bias"]

    want = np.array([blended(window, x, (4, 5, 4), 0.4, 3) for x in X[3:]])
    np.testing.assert_allclose(out, want, rtol=1e-9, atol=1e-12)
    labels = want.argmax(-1)
    np.testing.assert_array_equal(np.load(tmp_path / f"{procs}.npy"), labels)
    confusion = [[int(((Y[3:] == i) & (labels == j)).sum()) for j in range(3)] for i in range(3)]
    assert records[-1]["test_confusion"] == confusion
    each = means(per_volume(labels, Y[3:], 3))
    assert records[-1]["test_dice_per_volume"] == pytest.approx(np.nanmean(each[1:]), rel=1e-12)
    held_out = Hdf5Dataset(file, "test", dtype=np.float64)
    drawn = Patched(held_out, (4, 5, 4), Patches(per_sample=2, foreground=0.5), own_places(held_out, (0, 1)), 5)
    loss = dice_and_entropy(np.array([window(x) for x in drawn.read(np.arange(4))]), drawn.read_targets(np.arange(4)))
    np.testing.assert_allclose(records[-1]["test_loss"], loss, rtol=1e-9)
    assert records[-1]["test_accuracy"] == (labels == Y[3:]).mean()
    (one,) = found[0][1]
    np.testing.assert_array_equal(one.prediction, labels[1][one.depth])
    same, _, _ = train(run_file([f"data.train={file}"], RUN.replace(", watch: test_dice", "")), 1, lambda t: None)
    for name, tensor in same.items():
        np.testing.assert_allclose(tensors[name], tensor, rtol=1e-9, atol=1e-12)


def test_the_commands_work_on_whole_volumes(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = [
        "parallel.strategy=data",
        f"run.out={tmp_path}/run",
        "run.progress=none",
        f"data.train={file}",
        f"data.test={file}",
    ]
    with api.train(run_file(out, RUN), write=True) as trained:
        want = trained.predict(X[3:])
    np.save(tmp_path / "x.npy", X[3:])
    capsys.readouterr()
    command = ["--run", f"{tmp_path}/run", "--input", f"{tmp_path}/x.npy", "--out", f"{tmp_path}/y.npy"]
    assert inference.predict(command) == 0
    assert "2 x 9 x 7 x 8 x 3" in capsys.readouterr().out
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), want, rtol=1e-12)
    assert inference.evaluate(["--run", f"{tmp_path}/run"]) == 0
    said = capsys.readouterr().out
    assert "test_dice " in said and "test_loss " in said and "taken for 2" in said
    np.save(tmp_path / "small.npy", X[3:, :3])
    with pytest.raises(DataError, match="expected at least .4, 5, 4, 2., of which patches are cut"):
        inference.predict([*command[:3], f"{tmp_path}/small.npy", "--out", f"{tmp_path}/z.npy"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.input=[4, 8, 4, 2]", "expected at least .4, 8, 4, 2., the network's input"),
        ("model.input=[4, 5, 4, 1]", "expected at least"),
        ("data.train=synthetic", "data.patches: data.train is synthetic"),
        ("model.layers=[{op: conv, filters: 3, kernel: 3, name: last}]", "expected an output per pixel or voxel"),
    ],
)
def test_what_patches_cannot_be_cut_of_is_refused(change: str, message: str, file: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        train(
            run_file([f"data.train={file}", f"data.test={file}", "train.evaluate={}", change], RUN), 1, lambda t: None
        )


def test_an_epoch_has_all_patches_of_all_samples(file: Path) -> None:
    config = run_file([f"data.train={file}"], RUN.replace(", watch: test_dice", ""))
    (trainer,) = train(config, 1, lambda t: t)[2]
    drawn = np.concatenate(list(trainer.sampler.batches(0)))
    assert sorted(drawn.tolist()) == list(range(3 * 2))  # two of each of three
    assert trainer.total_steps == 2 * 2
