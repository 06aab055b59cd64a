"""Ranks of a real job that were asked for different things are all refused before they wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lbpar import api
from lbpar.calibrate.command import main as calibrate
from lbpar.errors import ConfigError
from lbpar.transport.launch import connect
from tests.mpi.test_api import RUN
from tests.util.mpi import collective_assert

pytestmark = pytest.mark.mpi


def last() -> bool:
    from mpi4py import MPI

    return bool(MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (lambda: api.verify(api.load_run(RUN), seed=int(last())), "seed: rank "),
        (lambda: api.verify(api.load_run(RUN, ["train.loss=bce"] * last())), "train.loss.name: rank "),
        (lambda: api.verify(api.load_run(RUN), random_plans=-int(last())), "random_plans: rank "),
        (lambda: api.train(api.load_run(RUN, ["parallel.strategy=spatial"] * last())), "parallel.strategy: rank "),
        (lambda: api.train(api.load_run(RUN), write=last()), "write: rank "),
        (lambda: api.evaluate(api.load_run(RUN, ["train.batch=2"] * last())), "train.batch: rank "),
        (lambda: calibrate(["--out", "m.yaml", "--quick", "--repeats", str(1 + last())]), "--repeats: rank "),
    ],
)
def test_nothing_starts(job: Callable[[], object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    monkeypatch.chdir(tmp_path)
    with collective_assert(MPI.COMM_WORLD), pytest.raises(ConfigError, match=f"^{said}"):
        job()


def test_checked_on_some_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    monkeypatch.setenv("LBPAR_CHECKED", str(int(last())))
    with collective_assert(MPI.COMM_WORLD), pytest.raises(Exception, match="LBPAR_CHECKED"):
        connect()
