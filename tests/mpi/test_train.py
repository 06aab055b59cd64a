"""Training under MPI gives the run of one rank, also after a restart on other ranks and with every optimizer."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar.layout.grid import Grid
from lbpar.layout.runs import indices
from lbpar.train.setup import build_graph, build_plan
from lbpar.train.trainer import Trainer
from lbpar.transport.checked import CheckedTransport
from lbpar.transport.mpi import MpiTransport
from tests.util.mpi import collective_assert
from tests.util.training import Ran, measured, run_file, train

pytestmark = pytest.mark.mpi

STRATEGIES = ("data", "spatial", "filter", "channel", "stationary-w")


@pytest.fixture
def transport() -> Iterator[MpiTransport]:
    t = MpiTransport()
    yield t
    t.close()


@pytest.fixture
def shared(transport: MpiTransport) -> Iterator[Path]:
    """A directory that all ranks see."""
    path = Path(transport.bcast(tempfile.mkdtemp() if transport.rank == 0 else None))
    yield path
    transport.barrier()
    if transport.rank == 0:
        shutil.rmtree(path, ignore_errors=True)


def trainer(transport: MpiTransport, *changes: str) -> Trainer:
    config = run_file(changes)
    graph = build_graph(config)
    plan = build_plan(config, graph, transport.size)
    assert plan.grid == transport.grid == Grid.of(transport.size)
    return Trainer(config, graph, plan, CheckedTransport(transport))


def assert_blocks(t: Trainer, records: list[dict[str, Any]], want: Ran) -> None:
    """What was measured, and this rank's blocks, are those of the run on one rank."""
    with collective_assert(t.transport):
        for got, record in zip(records, want.records, strict=True):
            for key, value in record.items():
                np.testing.assert_allclose(measured(got)[key], value, rtol=1e-9, err_msg=key)
        for name, block in {**t.worker.state, **t.optimizer.state_dict()}.items():
            box = t.worker.layouts[name.rpartition("/")[0] if "/" in name else name].box(t.transport.rank)
            whole = want.tensors[name]
            part = whole[np.ix_(*(indices(runs) for runs in box))]
            np.testing.assert_allclose(block, part, rtol=0, atol=1e-9 * np.abs(whole).max(), err_msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_strategy_gives_the_run_of_one_rank(transport: MpiTransport, strategy: str) -> None:
    t = trainer(transport, f"parallel.strategy={strategy}")
    assert_blocks(t, list(t.train()), train(run_file()))


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_norms_are_those_of_whole_parameters(transport: MpiTransport, name: str) -> None:
    changes = [f"train.optimizer={{name: {name}, lr: 0.01}}", "train.clip_norm=0.5", "train.accumulate=2"]
    t = trainer(transport, *changes, "parallel.strategy=stationary-w")
    assert_blocks(t, list(t.train()), train(run_file(changes)))


@pytest.mark.parametrize("batch", [1, 5])
def test_batches_that_leave_ranks_without_samples(transport: MpiTransport, batch: int) -> None:
    changes = [f"train.batch={batch}", "train.max_steps=5"]
    t = trainer(transport, *changes, "parallel.strategy=data")
    assert_blocks(t, list(t.train()), train(run_file(changes)))


def test_a_checkpoint_of_all_ranks_is_read_under_another_plan(transport: MpiTransport, shared: Path) -> None:
    first = trainer(transport, "parallel.strategy=filter")
    records = [first.train_epoch()]
    first.save(shared)
    second = trainer(transport, "parallel.strategy=data")
    assert second.resume(shared)
    assert_blocks(second, [*records, *second.train()], train(run_file()))


@pytest.mark.parametrize("choice", ["local", "sample"])
def test_norms_with_statistics_of_their_own(transport: MpiTransport, choice: str) -> None:
    """The run of as many virtual ranks under the same plan."""
    changes = ["parallel.strategy=data", f"parallel.norm={choice}"]
    assert_blocks(
        trained := trainer(transport, *changes), list(trained.train()), train(run_file(changes), transport.size)
    )


@pytest.mark.parametrize("change", ["parallel.reschedule=6", "train.optimizer={name: lars, lr: 0.05, momentum: 0.9}"])
def test_delayed_gradients_are_those_of_virtual_ranks(transport: MpiTransport, change: str) -> None:
    """Ranks run apart, as far as messages allow: nothing looks whether all come."""
    stages = transport.size
    changes = [change] if stages > 1 or "reschedule" not in change else []
    changes += ["parallel.schedule=delayed", f"parallel.stages={stages}", "parallel.strategy=data", "data.samples=38"]
    config = run_file([*changes, "train.epochs=2"])
    graph = build_graph(config)
    plan = build_plan(config, graph, stages)
    t = Trainer(config, graph, plan, MpiTransport(grid=plan.grid))
    assert_blocks(t, list(t.train()), train(config, stages))
    t.transport.close()
