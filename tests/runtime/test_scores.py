"""Metrics of an evaluation: exact on every grid, in batches of different sizes, against NumPy; the watched one by name."""

from __future__ import annotations

import json
from math import isnan, sqrt

import numpy as np
import pytest

from lbpar.config.losses import METRICS
from lbpar.engine.host.label_losses import dice_of_samples, sample_counts
from lbpar.errors import ConfigError
from lbpar.graph.ops.losses import LOSSES
from lbpar.runtime.scores import scores
from lbpar.train.best import Best, EarlyStop, gain
from lbpar.train.setup import build_dataset, build_graph
from tests.util import training
from tests.util.training import run_file, train

SEGMENT = """
model: {input: [5, 4, 2], layers: [{op: conv, filters: 4, kernel: 3, pad: 1, name: last}]}
data: {train: synthetic, test: synthetic, samples: 7}
train:
  {batch: 3, epochs: 2, seed: 5, loss: {name: dice_cross_entropy, ignore_index: 2, class_weights: [1, 2, 1, 0.5]},
   evaluate: {metrics: [dice, iou, dice_per_volume, balanced_accuracy, confusion], watch: test_dice}}
engine: {name: numpy, dtype: float64}
"""
NUMBERS = """
model: {input: [3], layers: [{op: linear, features: 2, name: last}]}
data: {train: synthetic, test: synthetic, samples: 7}
train: {batch: 3, epochs: 1, loss: mse, evaluate: {metrics: [mae, rmse], watch: test_rmse}}
engine: {name: numpy, dtype: float64}
"""


@pytest.fixture(autouse=True)
def all_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"test_{m}" for m in METRICS] + ["test_dice_of", "test_iou_of", "test_dice_per_volume_of"]
    monkeypatch.setattr(training, "MEASURED", (*training.MEASURED, *names))


@pytest.mark.parametrize(
    ("procs", "plan"),
    [
        (1, "{}"),
        (3, "{strategy: spatial}"),
        (4, "{strategy: data, layers: {loss: {F: 2, H: 2}, last: {F: 4}}}"),
        (6, "{strategy: data, layers: {loss: {F: 6}}}"),
        (8, "{strategy: data}"),
    ],
)
def test_metrics_of_classes_against_numpy(procs: int, plan: str) -> None:
    ran = train(run_file([f"parallel={plan}"], SEGMENT), procs)
    config = run_file([], SEGMENT)
    data, record = build_dataset(config, build_graph(config), "test", "float64"), ran.records[-1]
    assert data is not None
    x, y = np.pad(data.read(np.arange(7)), ((0, 0), (1, 1), (1, 1), (0, 0))), data.read_targets(np.arange(7))
    w, b = ran.tensors["last.weight"], ran.tensors["last.bias"]
    z = sum(np.einsum("nhwc,fc->nhwf", x[:, i : i + 5, j : j + 4], w[:, i, j]) for i in range(3) for j in range(3)) + b
    found, known = z.argmax(-1), y != 2
    want = np.array([[(known & (y == i) & (found == j)).sum() for j in range(4)] for i in range(4)])
    assert record["test_confusion"] == want.tolist()
    assert record["test_accuracy"] == want.trace() / known.sum()
    both = want.sum(0) + want.sum(1)
    with np.errstate(invalid="ignore"):
        dice, recall = 2 * want.diagonal() / both, want.diagonal() / want.sum(1)
    assert [record["test_dice_of"][str(k)] for k in range(4)] == [None if isnan(d) else d for d in dice]
    assert record["test_dice"] == pytest.approx(np.nanmean(dice[1:]), rel=1e-15)
    assert record["test_iou_of"]["1"] == pytest.approx(dice[1] / (2 - dice[1]))
    each = per_volume(found, y, 4, 2)
    mean = [None if isnan(d) else d for d in means(each)]
    assert [record["test_dice_per_volume_of"][str(k)] for k in range(4)] == [
        d and pytest.approx(d, rel=1e-15) for d in mean
    ]
    assert record["test_dice_per_volume"] == pytest.approx(np.nanmean(means(each)[1:]), rel=1e-15)
    assert abs(record["test_dice_per_volume"] - record["test_dice"]) > 1e-3  # another number than that of all together
    assert record["test_balanced_accuracy"] == pytest.approx(np.nanmean(recall), rel=1e-15)
    assert "dice" not in record  # training measures loss and accuracy only


def per_volume(found: np.ndarray, truth: np.ndarray, classes: int, ignore: int | None = None) -> np.ndarray:
    """The Dice of each sample and class, NaN where the class is neither there nor found."""
    out = np.full((len(truth), classes), np.nan)
    for n, (a, b) in enumerate(zip(found, truth, strict=True)):
        known = np.ones(b.shape, bool) if ignore is None else b != ignore
        for k in range(classes):
            if size := ((a == k) & known).sum() + ((b == k) & known).sum():
                out[n, k] = 2 * ((a == k) & (b == k) & known).sum() / size
    return out


def means(each: np.ndarray) -> np.ndarray:
    """Over the samples that have one."""
    number = (~np.isnan(each)).sum(0)
    return np.where(number, np.nansum(each, 0) / np.maximum(number, 1), np.nan)


@pytest.mark.parametrize("procs", [1, 3])
def test_dice_per_volume_where_classes_are_missing(procs: int) -> None:
    """Of four samples, one has the class and finds half of it, one finds what is not there, two have neither."""
    truth, first = np.zeros((4, 2, 3), int), np.zeros((4, 2, 3))
    truth[0, 0, :2] = 1
    first[0, 0, 1:3], first[2, 1, 1] = -1, -1
    parts = [slice(4 * k // procs, 4 * (k + 1) // procs) for k in range(procs)]
    sums = sum(dice_of_samples(sample_counts(first[p], truth[p], 3, None)) for p in parts)
    got = scores({"volumes": sums}, 1, ("dice_per_volume",))
    assert got["dice_per_volume_of"]["1"] == 0.25 and got["dice_per_volume_of"]["2"] is None
    assert got["dice_per_volume"] == 0.25 and got["dice_per_volume_of"]["0"] == pytest.approx(
        (6 / 8 + 1 + 10 / 11 + 1) / 4
    )
    np.testing.assert_allclose(means(per_volume(-first, truth, 3))[:2], [got["dice_per_volume_of"][k] for k in "01"])


@pytest.mark.parametrize("procs", [1, 4])
def test_errors_against_numpy(procs: int) -> None:
    ran, config = train(run_file([], NUMBERS), procs), run_file([], NUMBERS)
    data = build_dataset(config, build_graph(config), "test", "float64")
    assert data is not None
    z = data.read(np.arange(7)) @ ran.tensors["last.weight"].T + ran.tensors["last.bias"]
    d, record = z - data.read_targets(np.arange(7)), ran.records[-1]
    assert record["test_mae"] == pytest.approx(np.abs(d).mean(), rel=1e-13)
    assert record["test_rmse"] == pytest.approx(sqrt((d * d).mean()), rel=1e-13)


def test_classes_that_never_occur_count_in_no_mean() -> None:
    counts = np.array([[5.0, 0.0, 0.0, 3.0], [6.0, 0.0, 0.0, 4.0], [5.0, 0.0, 1.0, 4.0]])
    got = scores({"counts": counts}, 1, ("dice", "iou", "balanced_accuracy"))
    assert got["dice_of"] == {"0": 10 / 11, "1": None, "2": 0.0, "3": 0.75} and got["dice"] == 0.375
    assert got["iou_of"] == {"0": 5 / 6, "1": None, "2": 0.0, "3": 0.6} and got["iou"] == 0.3
    assert got["balanced_accuracy"] == pytest.approx((1 + 0 + 0.75) / 3)
    assert scores({"counts": np.zeros((3, 2))}, 1, ("dice",)) == {"dice": None, "dice_of": {"0": None, "1": None}}
    json.dumps(got)


def test_the_watched_metric_is_chosen_by_name() -> None:
    def best(trainer: training.Trainer) -> list[dict[str, object]]:
        assert trainer.best is not None
        records = list(trainer.train())
        highest = max(records, key=lambda r: r["test_dice"])
        assert (trainer.best.metric, trainer.best.value) == ("test_dice", highest["test_dice"])
        assert trainer.best.epoch == highest["epoch"]
        return records

    train(run_file(["parallel.strategy=data"], SEGMENT), 2, best)
    of_one = Best("test_dice_of/1")
    of_one.update({"epoch": 1, "step": 1, "test_dice_of": {"0": 0.9, "1": 0.25}})
    of_one.update({"epoch": 2, "step": 2, "test_dice_of": {"0": 0.9, "1": None}})
    assert (of_one.value, of_one.epoch) == (0.25, 1)
    assert gain("test_rmse", 1.0, 2.0) == 1 and gain("test_iou", 1.0, 2.0) == -1
    stop = EarlyStop(run_file(["train.early_stop={patience: 1, metric: test_mae}"], NUMBERS).train.early_stop)
    for value in (2.0, 1.0, 1.5):
        stop.update({"test_mae": value})
    assert stop.stop and stop.best == 1.0


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        (
            SEGMENT,
            "train.evaluate.metrics=[mae]",
            r"metrics: got mae with loss dice_cross_entropy, expected .*dice, iou",
        ),
        (NUMBERS, "train.evaluate.metrics=[dice]", "metrics: got dice with loss mse, expected some of: mae, rmse"),
        (NUMBERS, "train.evaluate.watch=test_accuracy", "watch: test_accuracy is not measured with loss mse"),
        (
            SEGMENT,
            "train.evaluate.metrics=[iou]",
            "watch: test_dice is not measured; add dice to train.evaluate.metrics",
        ),
        (SEGMENT, "train.evaluate.watch=test_dice_of/4", "got class 4 in test_dice_of/4, expected 0 to 3"),
        (SEGMENT, "train.evaluate.watch=test_dise", "did you mean 'test_dice'"),
        (SEGMENT, "data.test=null", "watch: test_dice needs test data"),
        (SEGMENT, "train.loss={name: focal, eps: 1}", "eps"),
        (NUMBERS, "train.loss={name: mse, ignore_index: 1}", "ignore_index"),
    ],
)
def test_what_cannot_be_measured_is_refused(text: str, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(run_file([change], text))


def test_every_loss_takes_its_options_from_the_run_file() -> None:
    for kind in LOSSES:
        assert run_file([f"train.loss={kind}", "train.evaluate={}"], SEGMENT).train.loss.kind == kind
    loss = build_graph(run_file(["train.loss={name: focal, gamma: 0.5}", "train.evaluate={}"], SEGMENT)).loss
    assert loss is not None and loss.op == LOSSES["focal"](gamma=0.5)
