"""Ranks that read other data or were asked for other things do not start, and all say which rank and what."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lbpar import api
from lbpar.config.run_file import parse_run
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.writer import Split, write
from lbpar.errors import ConfigError
from lbpar.layout.grid import Grid
from lbpar.transport.base import Transport
from lbpar.transport.virtual import VirtualWorld

RUN = """
model: {input: [5, 4, 2], layers: [{op: conv, filters: 4, kernel: 3}, {op: flatten}, {op: linear, features: 3}]}
train: {batch: 6, epochs: 1}
parallel: {strategy: data}
engine: {name: numpy, threads: 1}
"""


def on_ranks(job: Callable[[Transport], object], procs: int = 3) -> list[str | None]:
    """What each of some virtual ranks is told."""

    def rank(transport: Transport) -> str | None:
        try:
            job(transport)
        except ConfigError as error:
            return str(error)
        return None

    return VirtualWorld(Grid.of(procs)).run(rank)


def refused(job: Callable[[Transport], object], procs: int = 3) -> str:
    told = on_ranks(job, procs)
    assert told[0] is not None and told == [told[0]] * procs
    return told[0]


@pytest.mark.parametrize(
    ("usual", "odd", "said"),
    [
        ([], ["train.batch=3"], "train.batch: rank 1 has 3, but rank 0 has 6."),
        (["run.out=a"], ["run.out=b", "run.trace=true"], "run.out: rank 1 has 'b', but rank 0 has 'a'."),
        ([], ["run.checkpoint=null"], "run.checkpoint.every_epochs: rank 1 has nothing, but rank 0 has 1."),
        ([], ["run.checkpoint.keep=2"], "run.checkpoint.keep: rank 1 has 2, but rank 0 has 3."),
        ([], ["run.metrics.csv=true"], "run.metrics.csv: rank 1 has True, but rank 0 has False."),
        ([], ["engine.progress=block"], "engine.progress: rank 1 has 'block', but rank 0 has 'auto'."),
        ([], ["data.augment.crop_pad=1"], "data.augment.crop_pad: rank 1 has 1, but rank 0 has 0."),
        (
            [],
            ["train.early_stop={patience: 1, metric: loss}"],
            "train.early_stop: rank 1 has nothing, but rank 0 has None.",
        ),
    ],
)
def test_other_run_files(usual: list[str], odd: list[str], said: str) -> None:
    def job(transport: Transport) -> None:
        api.train(parse_run(RUN, odd if transport.rank == 1 else usual), transport=transport)

    assert said in refused(job)


def test_the_odd_one_is_the_one_that_differs_from_most() -> None:
    def job(transport: Transport) -> None:
        api.train(parse_run(RUN, ["train.seed=5"] if transport.rank == 0 else []), transport=transport)

    assert refused(job).startswith("train.seed: rank 0 has 5, but rank 1 has 0.")


def test_other_options(tmp_path: Path) -> None:
    run = parse_run(RUN, [f"run.out={tmp_path}"])

    def writes(transport: Transport) -> None:
        api.train(run, transport=transport, write=transport.rank != 2)

    def resumes(transport: Transport) -> None:
        api.train(run, transport=transport, write=True, resume=transport.rank == 2)

    assert refused(writes).startswith("write: rank 2 has False, but rank 0 has True.")
    assert refused(resumes).startswith("resume: rank 2 has True, but rank 0 has False.")
    assert not list(tmp_path.iterdir())


def test_other_initial_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = iter(range(3))
    shapes = api.build_graph(parse_run(RUN)).params()
    monkeypatch.setattr(
        "lbpar.train.evaluator.load_weights",
        lambda model: {n: np.full(p.shape, float(next(ranks) == 2)) for n, p in shapes.items() if n == "conv1.weight"},
    )
    told = refused(lambda transport: api.train(parse_run(RUN), transport=transport))
    assert re.match(r"initial weights: rank \d has another one than rank \d\.", told)


def _data(
    path: Path, n: int = 40, attributes: dict[str, Any] | None = None, change: Any = None, shape: Any = (5, 4, 2)
) -> Path:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((n, *shape)), np.arange(n) % 3
    if change:
        change(x, y)
    write(path, [Split("", x, y)], classes=3)
    with h5py.File(path, "r+") as file:
        file["x"].attrs.update(attributes or {})
    return path


def _pixel(x: np.ndarray, y: np.ndarray) -> None:
    x[20, 2, 2, 0] += 1


def _label(x: np.ndarray, y: np.ndarray) -> None:
    y[33] = (y[33] + 1) % 3


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"n": 41}, "number of samples: rank 1 has 41, but rank 0 has 40."),
        ({"attributes": {"std": 2.0}}, "scale, mean and std: rank 1 has "),
        ({"change": _pixel}, "content: rank 1 has another one than rank 0."),
        ({"change": _label}, "content: rank 1 has another one than rank 0."),
    ],
)
def test_copies_of_data_that_differ(tmp_path: Path, split: str, theirs: dict[str, Any], said: str) -> None:
    for name in ("0", "1", "2", "train"):
        _data(tmp_path / f"{name}.h5", **(theirs if name == "1" else {}))

    def job(transport: Transport) -> None:
        fields = {"train": tmp_path / "train.h5"} | {split: tmp_path / f"{transport.rank}.h5"}
        api.train(parse_run(RUN, [f"data.{name}={path}" for name, path in fields.items()]), transport=transport)

    if split == "test" and "attributes" in theirs:
        assert on_ranks(job) == [None] * 3  # test data are read with the training data's
    else:
        assert refused(job).startswith(f"data.{split}: {said}")


def test_equal_copies_may_lie_anywhere(tmp_path: Path) -> None:
    def job(transport: Transport) -> None:
        train, test = (_data(tmp_path / f"{transport.rank}{split}.h5") for split in ("train", "test"))
        with api.train(parse_run(RUN, [f"data.train={train}", f"data.test={test}"]), transport=transport) as trained:
            assert len(trained.records) == 1

    assert on_ranks(job) == [None] * 3


def test_other_samples_to_predict_or_evaluate(tmp_path: Path) -> None:
    for rank in range(2):
        _data(tmp_path / f"{rank}.h5", change=_pixel if rank else None)

    def job(ask: Callable[[api.Trained, int], object]) -> Callable[[Transport], None]:
        def run(transport: Transport) -> None:
            ask(api.train(parse_run(RUN), transport=transport), transport.rank)

        return run

    x = np.zeros((4, 5, 4, 2))
    assert refused(job(lambda t, r: t.predict(x[: 4 - r])), 2).startswith(
        "predict: shape and type: rank 1 has ((3, 5, 4, 2)"
    )
    assert refused(job(lambda t, r: t.predict(x + r)), 2).startswith("predict: samples: rank 1 has another one than")
    assert refused(job(lambda t, r: t.predict(x, normalised=r == 1)), 2).startswith(
        "predict: normalised: rank 1 has True"
    )
    other = job(lambda t, r: t.evaluate(Hdf5Dataset(tmp_path / f"{r}.h5", "test", classes=3)))
    assert refused(other, 2).startswith("evaluate: content: rank 1 has another one than rank 0.")


@pytest.mark.parametrize("shape", [(5, 4, 2), (70, 60, 50, 1)])
def test_a_glance_is_small_and_spread_over_the_file(tmp_path: Path, shape: tuple[int, ...]) -> None:
    data = Hdf5Dataset(_data(tmp_path / "a.h5", shape=shape))
    x, y = data.glance(samples=8, elements=2500)
    assert len(x) == (40 if shape[0] == 5 else 8) and x[0].size <= 2500 and len(y) == 40
    with h5py.File(tmp_path / "a.h5") as file:
        np.testing.assert_array_equal(x[-1], file["x"][39] if shape[0] == 5 else file["x"][39, 34:35, 5:55])
