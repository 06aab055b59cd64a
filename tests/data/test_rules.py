"""Samples brought to a common range by their own statistics, whichever part of them a rank reads; values that are not finite."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from lbpar.data.normalise import Normalisation
from lbpar.data.open import open_dataset
from lbpar.data.rules import Rule
from lbpar.data.shared import explored
from lbpar.data.targets import own_range
from lbpar.errors import ConfigError, DataError
from lbpar.layout.grid import Grid
from lbpar.transport.virtual import VirtualWorld
from tests.util.training import run_file, train

RNG = np.random.default_rng(4)
X = (RNG.gamma(2.0, 400.0, (7, 5, 4, 6, 2)) * (RNG.random((7, 5, 4, 6, 2)) > 0.3) - 0).astype(np.int16)
Y = (X[..., 0] > 700).astype(np.uint8)
RUN = """
model: {input: [5, 4, 6, 2], layers: [{op: conv, filters: 2, kernel: 3, pad: 1, name: last}]}
train: {batch: 3, epochs: 2, seed: 5, loss: dice_cross_entropy, optimizer: {name: sgd, lr: 0.1}}
engine: {name: numpy, dtype: float64}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "vol.h5", "w") as f:
        for split, part in (("train", slice(0, 5)), ("test", slice(5, 7))):
            f[f"{split}/x"], f[f"{split}/y"] = X[part], Y[part]
            f[f"{split}/x"].attrs["mean"] = 3.0
    return tmp_path / "vol.h5"


def expected(rule: str, x: np.ndarray) -> np.ndarray:
    """Of one channel of one sample."""
    wide = x.astype(np.float64)
    some = wide[wide != 0] if "nonzero" in rule else wide
    if rule.startswith("{name: window"):
        return (np.clip(wide, -100, 900) + 100) / 1000
    if "percentile" in rule:
        low, high = np.percentile(some, (2, 98))
        return (np.clip(wide, low, high) - low) / (high - low)
    return (wide - some.mean()) / some.std()


@pytest.mark.parametrize(
    "rule",
    [
        "zscore",
        "{name: zscore, nonzero: true}",
        "{name: percentile, low: 2, high: 98}",
        "{name: percentile, low: 2, high: 98, nonzero: true}",
        "{name: window, low: -100, high: 900}",
    ],
)
def test_each_sample_by_its_own_statistics_whatever_is_read_of_it(rule: str, file: Path) -> None:
    data = run_file([f"data.train={file}", f"data.normalise={rule}"], RUN).data
    want = np.moveaxis(np.array([[expected(rule, s[..., c]) for c in range(2)] for s in X[:5]]), 1, -1)
    dataset = open_dataset(data, "train", classes=2, dtype=np.float64)
    samples = np.array([3, 0, 4])
    part = dataset.read(samples, (((1, 3),), ((0, 4),), ((2, 3), (5, 6)), ((1, 2),)))  # before any is known whole
    np.testing.assert_allclose(part, want[samples][:, 1:3][:, :, :, [2, 5]][..., 1:2], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(dataset.read(np.arange(5)), want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("procs", "plan"), [(2, "spatial"), (3, "data"), (4, "{strategy: spatial}")])
def test_any_grid_trains_alike_and_predicts_with_the_same_rule(procs: int, plan: str, file: Path) -> None:
    changes = [f"data.train={file}", f"data.test={file}", "data.normalise=zscore"]
    plan = plan if "{" in plan else f"{{strategy: {plan}}}"
    predicted: list[np.ndarray] = []

    def job(trainer):  # type: ignore[no-untyped-def]
        assert trainer.normalisation.rule == Rule("zscore")
        records = list(trainer.train())
        predicted.append(trainer.predict(X[5:]))
        return records

    alone = train(run_file(changes, RUN), job=job)
    several = train(run_file([*changes, f"parallel={plan}"], RUN), procs, job)
    for name, tensor in alone.tensors.items():
        np.testing.assert_allclose(several.tensors[name], tensor, rtol=1e-9, atol=1e-12)
    for other in predicted[1:]:
        np.testing.assert_allclose(other, predicted[0], rtol=1e-9, atol=1e-12)
    plain = train(run_file(changes[:2], RUN))
    assert abs(plain.records[-1]["loss"] - alone.records[-1]["loss"]) > 1e-3


@pytest.mark.parametrize("procs", [1, 3, 8])
def test_each_rank_reads_its_share_of_whole_samples_and_is_told_the_others(procs: int, file: Path) -> None:
    data, world = run_file([f"data.train={file}", "data.normalise=zscore"], RUN).data, VirtualWorld(Grid((procs,)))

    def one(transport):  # type: ignore[no-untyped-def]
        dataset = open_dataset(data, "train", classes=2, dtype=np.float64)
        mine = len(dataset.own_findings(own_range(dataset, (transport.rank, procs)))[0])
        explored(dataset, transport)
        return mine, dataset.statistics

    ran = world.run(one)
    assert sum(mine for mine, _ in ran) == 5 and max(mine for mine, _ in ran) <= -(-5 // procs)
    for _, known in ran:
        assert sorted(known) == list(range(5))
        for i, own in known.items():
            np.testing.assert_allclose(own[2], X[i].mean((0, 1, 2)), rtol=1e-6)


def test_constant_samples_and_empty_backgrounds_stay_finite() -> None:
    for name in ("zscore", "percentile"):
        for nonzero in (False, True):
            rule = Rule(name, 0.5, 99.5, nonzero) if name == "percentile" else Rule(name, nonzero=nonzero)
            change = Normalisation(rule=rule)
            for value in (0.0, 7.0):
                x = np.full((1, 3, 2, 1), value, np.float32)
                assert np.isfinite(change(x, np.float32, statistics=change.statistics(x[0])[None])).all()


def test_a_rule_goes_into_a_checkpoint_and_comes_out() -> None:
    change = Normalisation(1 / 255, integers=True, rule=Rule("percentile", 1.0, 99.0), zero=True)
    assert Normalisation.of(change.state_dict()) == change
    assert Normalisation.of({"scale": 1.0, "mean": [1.0], "std": None, "integers": False}).mean == (1.0,)


def test_values_that_are_not_finite_end_the_run_or_become_zero(tmp_path: Path) -> None:
    x = X.astype(np.float32)
    x[1, 2, 2, 2, 0], x[3, 0, 0, 0, 1] = np.nan, np.inf
    with h5py.File(tmp_path / "gaps.h5", "w") as f:
        f["x"], f["y"] = x, Y
    changes = [f"data.train={tmp_path / 'gaps.h5'}", "data.normalise=zscore"]
    for change in changes, changes[:1]:  # statistics are made of whole samples, at the start
        with pytest.raises(DataError, match=r"gaps\.h5.*sample [13] has values that are not finite.*data\.nan: zero"):
            train(run_file(change, RUN))
    data = open_dataset(run_file([*changes, "data.nan=zero"], RUN).data, "train", classes=2)
    got = data.read(np.arange(7))
    assert np.isfinite(got).all() and got[1, 2, 2, 2, 0] == 0 and got[3, 0, 0, 0, 1] == 0
    known = np.delete(x[1, ..., 0].reshape(-1), np.ravel_multi_index((2, 2, 2), (5, 4, 6)))
    assert got[1, 0, 0, 0, 0] == pytest.approx((x[1, 0, 0, 0, 0] - known.mean()) / known.std(), rel=1e-5)
    train(run_file([*changes, "data.nan=zero"], RUN))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.normalise=zscor", "did you mean 'zscore'"),
        ("data.normalise={name: window, low: 5, high: 5}", "expected low below high"),
        ("data.normalise={name: percentile, high: 101}", "high"),
        ("data.nan=skipp", "nan"),
    ],
)
def test_wrong_rules_are_refused(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_file([change], RUN)
