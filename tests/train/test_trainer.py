"""Training gives the same run on one rank and on any number of virtual ranks with any plan."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.data.sampler import Sampler
from lbpar.data.writer import Split, write
from lbpar.errors import ConfigError, TrainingError
from lbpar.train.setup import build_dataset, build_graph
from tests.util.training import PLANS, SMALL, assert_same, run_file, train

MIXED = PLANS["mixed 4"][1]

UNET = """
model: {name: unet2d, classes: 3, input: [8, 8, 1], width: 0.03, depth: 1}
data: {train: synthetic, test: synthetic, samples: 5}
train: {batch: 2, epochs: 2, optimizer: {name: adam, lr: 0.01}}
engine: {name: numpy, dtype: float64, threads: 1}
"""
COSMOFLOW = """
model: {name: cosmoflow, input: [32, 32, 32, 1], width: 0.1}
data: {train: synthetic, samples: 3}
train: {batch: 2, epochs: 1, loss: mse, optimizer: {name: sgd, lr: 0.001}}
engine: {name: numpy, dtype: float64, threads: 1}
"""


VECTORS = """
model: {input: [3], layers: [{op: linear, features: 2, name: fc}]}
data: {train: synthetic, test: synthetic, samples: 64}
train: {batch: 8, epochs: 1, loss: mse, optimizer: {name: sgd, lr: 0.001}}
engine: {name: numpy, dtype: float64}
"""


@pytest.fixture(scope="module")
def serial():
    return train(run_file())


@pytest.mark.parametrize("name", PLANS)
def test_any_plan_gives_the_same_run(name, serial):
    procs, plan = PLANS[name]
    assert_same(train(run_file(plan), procs), serial)


def test_the_run_learns_and_counts(serial):
    first, *_, last = serial.records
    assert [r["step"] for r in serial.records] == [3, 6, 9]
    assert last["loss"] < first["loss"]
    assert last["accuracy"] > first["accuracy"]
    assert all(0 <= r["test_accuracy"] <= r["test_top5"] <= 1 for r in serial.records)


@pytest.mark.parametrize(
    "options",
    [
        "{name: sgd, lr: 0.05, momentum: 0.9, nesterov: true, weight_decay: 0.01}",
        "{name: adam, lr: 0.01, weight_decay: 0.01}",
        "{name: adamw, lr: 0.01, weight_decay: 0.1}",
        "{name: lars, lr: 0.5, momentum: 0.9, weight_decay: 0.01}",
        "{name: lamb, lr: 0.01, weight_decay: 0.01}",
    ],
)
def test_optimizers_clipping_and_smoothing_do_not_see_the_grid(options):
    changes = [f"train.optimizer={options}", "train.clip_norm=0.5", "train.label_smoothing=0.1", "train.epochs=2"]
    assert_same(train(run_file([*changes, *MIXED]), 4), train(run_file(changes)))


@pytest.mark.parametrize("plan", ["spatial 4", "mixed 6"])
def test_seconds_and_bytes_are_told_of_the_same_kinds_of_step(plan):
    procs, changes = PLANS[plan]
    told = []

    def job(trainer):
        counter = trainer.transport.counter
        before = counter.total().bytes
        record = trainer.train_epoch()
        told.append((record["steps"], counter.total().bytes - before))
        return [record]

    train(run_file([*changes, "data.test=null"]), procs, job)
    assert len(told) == procs
    for steps, sent in told:
        assert "halo" in steps and "exchange" not in steps
        assert all("seconds" in s for s in steps.values())
        assert sum(s.get("bytes", 0) for s in steps.values()) == sent
    assert sum(steps["halo"].get("bytes", 0) for steps, _ in told) > 0  # not every rank has a neighbour to send to


def test_clipping_and_smoothing_matter(serial):
    for change in ("train.clip_norm=0.01", "train.label_smoothing=0.1", "train.seed=4", "train.no_decay=[]"):
        assert train(run_file([change, "train.epochs=1"])).records[0] != serial.records[0], change


WITHOUT_STATISTICS = (
    SMALL.replace("    - {op: norm}\n", "")
    .replace("    - {op: norm, name: norm1}\n", "")
    .replace("rate: 0.2", "rate: 0")
)


@pytest.mark.parametrize(("procs", "plan"), [(1, []), PLANS["mixed 4"]], ids=["serial", "mixed"])
def test_accumulating_gradients_is_a_larger_batch(procs, plan):
    big = train(run_file(text=WITHOUT_STATISTICS))
    small = train(run_file(["train.batch=4", "train.accumulate=2", *plan], WITHOUT_STATISTICS), procs)
    assert_same(small, big)


def test_accumulating_with_statistics_and_dropout_does_not_see_the_grid():
    changes = [
        "train.batch=3",
        "train.accumulate=3",
        "train.epochs=2",
    ]  # batches of 3 and a last one of 1, in groups of 3, 3, 2
    alone = train(run_file(changes))
    assert [r["step"] for r in alone.records] == [3, 6]
    assert_same(train(run_file([*changes, *MIXED]), 4), alone)


def test_a_batch_smaller_than_its_ways():
    changes = ["train.batch=2", "train.epochs=1"]
    assert_same(train(run_file([*changes, "parallel.strategy=data"]), 5), train(run_file(changes)))


def test_a_batch_larger_than_the_data():
    ran = train(run_file(["train.batch=100", "train.epochs=2", "parallel.strategy=data"]), 2)
    assert [r["step"] for r in ran.records] == [1, 2]


@pytest.mark.parametrize(
    "change", ["data.augment={flip: [W], crop_pad: 1}", "data.drop_last=true", "data.shuffle=false"]
)
def test_ways_to_read_the_data_do_not_see_the_grid(change):
    changes = [change, "train.epochs=2"]
    alone = train(run_file(changes))
    assert_same(train(run_file([*changes, *MIXED]), 4), alone)
    assert alone.records[0] != train(run_file(["train.epochs=2"])).records[0]


def test_max_steps_ends_training_and_evaluates():
    ran = train(run_file(["train.max_steps=4", "train.evaluate.every_epochs=10"]))
    assert [r["step"] for r in ran.records] == [3, 4]
    assert "test_loss" not in ran.records[0]
    assert "test_loss" in ran.records[1]


def test_the_schedule_counts_updates():
    rates = []
    config = run_file(["train.schedule={name: step, every: 1, gamma: 0.1}", "train.accumulate=2", "train.batch=4"])

    def job(trainer):
        while not trainer.done:
            trainer.train_epoch(lambda result, lr: rates.append(lr))
        return []

    train(config, job=job)
    np.testing.assert_allclose(rates, np.repeat([0.05, 0.005, 0.0005], 6))


def test_early_stop():
    stop = ["train.epochs=30", "train.optimizer.lr=1e-9"]
    ran = train(run_file([*stop, "train.early_stop={patience: 2, metric: test_loss, min_delta: 0.5}"]))
    assert len(ran.records) == 3
    with pytest.raises(ConfigError, match="needs test data"):
        train(run_file(["data.test=null", "train.early_stop={patience: 2}"]))
    with pytest.raises(ConfigError, match="accuracy is not measured with loss mse; watch test_loss"):
        train(run_file(["data.test=synthetic", "train.early_stop={patience: 2, metric: test_accuracy}"], COSMOFLOW))


def test_evaluation_against_plain_numpy():
    text = """
    model: {input: [2, 2, 1], layers: [{op: flatten}, {op: linear, features: 9, name: fc}]}
    data: {train: synthetic, test: synthetic, samples: 11}
    train: {batch: 4, epochs: 1, seed: 5}
    engine: {name: numpy, dtype: float64}
    """
    config = run_file(["parallel.strategy=filter"], text)
    ran = train(config, 2, job=lambda t: [t.train_epoch()])
    data = build_dataset(config, build_graph(config), "test", "float64")
    x, y = data.read(np.arange(11)), data.read_targets(np.arange(11))
    z = x.reshape(11, -1) @ ran.tensors["fc.weight"].T + ran.tensors["fc.bias"]
    order = np.argsort(-z, axis=1)
    record = ran.records[0]
    assert record["test_accuracy"] == np.mean(order[:, 0] == y)
    assert record["test_top5"] == np.mean((order[:, :5] == y[:, None]).any(1))
    losses = np.log(np.exp(z).sum(1)) - z[np.arange(11), y]
    np.testing.assert_allclose(record["test_loss"], losses.mean(), rtol=1e-12)


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        (UNET, "parallel={strategy: spatial}"),
        (UNET, "parallel={strategy: data, layers: {loss: {F: 2, H: 2}}}"),
        (UNET.replace("optimizer", "loss: dice, optimizer"), "parallel={strategy: filter}"),
        (COSMOFLOW, "parallel={strategy: spatial}"),
    ],
    ids=["per-voxel spatial", "per-voxel split classes", "dice filter", "3-D mse"],
)
def test_dense_and_volumetric_networks(text, plan):
    alone = train(run_file(text=text))
    assert ("accuracy" in alone.records[0]) == ("unet" in text)
    assert_same(train(run_file([plan], text), 4), alone, rtol=1e-8)


class Spoilt:
    """Synthetic samples, one of them with a value of its own."""

    def __init__(self, inner, bad, value=np.nan):
        self._inner, self._bad, self._value = inner, bad, value

    def __len__(self):
        return len(self._inner)

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def part(self, source):
        return self

    def at(self, epoch):
        return self

    def read(self, samples, box=None):
        x = self._inner.read(samples, box)
        x[samples == self._bad] = self._value
        return x


@pytest.mark.parametrize("procs", [1, 4])
def test_a_loss_that_is_not_finite_names_step_and_layer(procs):
    def job(trainer):
        def spoil(result, lr):
            trainer.worker.state["conv2.weight"][:1] = np.inf  # empty on some ranks

        return [trainer.train_epoch(spoil)]

    with pytest.raises(TrainingError, match=r"step 2: the loss is nan.* layer 'conv2' is the first that is not"):
        train(run_file(MIXED if procs == 4 else []), procs, job)
    with pytest.raises(TrainingError, match=r"step 1: the loss is nan.* layer 'conv2' is the first that is not"):
        train(run_file(["train.accumulate=3", *(MIXED if procs == 4 else [])]), procs, job)  # second batch, first step
    with pytest.raises(TrainingError, match=r"step 2: the loss is (nan|inf).* layer '\w+' is the first that is not"):
        train(run_file(["train.optimizer.lr=1e200", *(MIXED if procs == 4 else [])]), procs)


@pytest.mark.parametrize("procs", [1, 4])
def test_bad_samples_are_told_from_bad_training(procs):
    config = run_file(MIXED if procs == 4 else [])
    good = build_dataset(config, build_graph(config), "train", "float64")
    bad = int(Sampler(22, 8, 3).order(0)[12])  # in the second batch
    with pytest.raises(TrainingError, match=r"step 2: the loss is nan.*data of this batch are not finite.*bad samples"):
        train(config, procs, dataset=Spoilt(good, bad))


def test_a_gradient_that_is_not_finite_names_step_and_parameter():
    text = """
    model: {input: [2], layers: [{op: linear, features: 3, name: fc}]}
    data: {train: synthetic, samples: 4}
    train: {batch: 2, epochs: 2, clip_norm: 1.0}
    engine: {name: numpy, dtype: float64}
    """
    config = run_file(text=text)
    good = build_dataset(config, build_graph(config), "train", "float64")
    first = int(Sampler(4, 2).order(0)[0])

    def job(trainer):
        trainer.worker.state["fc.weight"][...] = (
            0  # the loss is that of equal outputs, a square of the gradient not finite
        )
        return [trainer.train_epoch()]

    with pytest.raises(TrainingError, match=r"step 1: gradient clipping: the gradient of fc.weight has norm inf"):
        train(config, 1, job, dataset=Spoilt(good, first, 1e200))


@pytest.mark.parametrize("procs", [1, 4])
def test_a_loss_that_only_grows_ends_training(procs):
    """Squares of an error that each step makes larger overflow only after many steps."""
    config = run_file(["parallel.strategy=data", "train.optimizer.lr=20"], VECTORS)
    seen = []

    def job(trainer):
        return [trainer.train_epoch(lambda result, lr: seen.append(result.loss))]

    with pytest.raises(
        TrainingError, match=r"step \d+: the loss is \d\.\d+e\+\d\d, in the first.*: training diverges\. Lower"
    ):
        train(config, procs, job)
    assert 1e4 < max(seen) < 1e8 * max(1, seen[0])


@pytest.mark.parametrize(("batch", "scale"), [(0, 1e12), (1, 3e3)])
def test_large_samples_do_not_end_training(batch, scale):
    """Neither in the first step, whose loss then tells the units, nor in a later one."""
    config = run_file(["train.optimizer.lr=1e-30"], text=VECTORS)
    good = build_dataset(config, build_graph(config), "train", "float64")
    [record] = train(config, dataset=Spoilt(good, int(Sampler(64, 8).order(0)[8 * batch]), scale)).records
    assert record["loss"] > scale**2 / 1000


@pytest.mark.parametrize("procs", [1, 4])
def test_a_network_that_answers_all_alike_is_right_about_the_first_class_only(procs):
    config = run_file(MIXED if procs == 4 else [])

    def job(trainer):
        for name in ("fc.weight", "fc.bias"):
            trainer.worker.state[name][...] = 0
        return [trainer.evaluate()]

    labels = build_dataset(config, build_graph(config), "test", "float64").read_targets(np.arange(22))
    [record] = train(config, procs, job).records
    assert record["test_accuracy"] == np.mean(labels == 0)
    assert record["test_top5"] == np.mean(labels < 5)
    assert record["test_loss"] == pytest.approx(np.log(7))


@pytest.mark.parametrize("procs", [1, 4])
def test_an_evaluation_that_is_not_finite_is_refused(procs):
    config = run_file(MIXED if procs == 4 else [])
    good = build_dataset(config, build_graph(config), "test", "float64")
    with pytest.raises(TrainingError, match=r"evaluation after step 0: the loss is nan.*data of this batch.*synthetic"):
        train(config, procs, lambda trainer: [trainer.evaluate()], Spoilt(good, 21))

    def spoil(trainer):
        trainer.worker.state["norm1.running_mean"][:1] = np.nan
        return [trainer.evaluate()]

    with pytest.raises(
        TrainingError, match=r"evaluation after step 0: the loss is nan.*'norm1' is the first that is not"
    ):
        train(config, procs, spoil)


def test_dice_counts_hits_that_early_stop_can_watch():
    stop = ["train.loss=dice", "train.early_stop={patience: 9, metric: test_accuracy}"]
    assert all("test_accuracy" in r and "test_top5" not in r for r in train(run_file(stop, UNET)).records)


@pytest.mark.parametrize("variant", ["mlperf", "spatial"])
def test_cosmoflow_learns_as_it_is(variant):
    """Initial weights and last activation of the published networks; a linear output of He's weights exploded at once."""
    model = f"{{name: cosmoflow, input: [32, 32, 32, 4], width: 0.25, variant: {variant}}}"
    config = run_file(
        [f"model={model}", "data.samples=8", "train.epochs=4", "engine.dtype=float32", "train.optimizer.momentum=0.9"],
        COSMOFLOW,
    )
    first, *_, last = (r["loss"] for r in train(config).records)
    assert last < first < 1.2**2 + 1  # targets lie between 0 and 1, outputs between -1.2 and 1.2


@pytest.mark.parametrize("procs", [1, 4])
def test_samples_that_are_far_too_large_are_blamed_and_not_the_learning_rate(procs, tmp_path):
    """One rank alone may hold them."""
    x = np.random.default_rng(0).standard_normal((22, 6, 5, 2)).astype(np.float32)
    x[5:7, 0] = 3e38
    write(tmp_path / "d.h5", [Split("train", x, np.arange(22) % 7)])
    changes = [f"data.train={tmp_path}/d.h5", "data.test=null", "engine.dtype=float32"]
    with pytest.raises(
        TrainingError, match=r"step \d: the loss is (nan|inf).*as large as 3e\+38: normalise them .data.normalise"
    ):
        train(run_file([*changes, *(MIXED if procs == 4 else [])]), procs)
