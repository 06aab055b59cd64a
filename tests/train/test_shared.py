"""Training runs of networks whose layers share parameters: on any ranks, from checkpoints, and beside PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lbpar.api import verify
from lbpar.config.run_file import RunConfig
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.errors import PlanError
from lbpar.inference import export
from lbpar.layout.grid import Grid
from lbpar.program.plan import Plan
from lbpar.runtime.binding import MicroBatch
from lbpar.runtime.optim.rules import SGD
from lbpar.runtime.worker import Worker
from lbpar.train.job import run, start
from lbpar.train.setup import build_graph, build_plan
from lbpar.train.trainer import Trainer
from lbpar.transport.base import Transport
from lbpar.transport.single import SingleTransport
from lbpar.transport.virtual import VirtualWorld
from tests.util.graphs import shared_network
from tests.util.run import random_state, samples
from tests.util.training import assert_same, run_file, train, whole

TEXT = """
model:
  input: [6, 5, 4]
  layers:
    - {op: conv, filters: 4, kernel: 3, pad: 1, bias: false, name: one}
    - {op: norm, name: norm1}
    - {op: relu, name: relu1}
    - {op: max_pool, kernel: 2, name: pool}
    - {op: conv, filters: 4, kernel: 3, pad: 1, bias: false, name: two, share: one}
    - {op: norm, name: norm2, share: norm1}
    - {op: relu, name: relu2}
    - {op: global_avg_pool, name: mean}
    - {op: linear, features: 4, name: fc}
    - {op: linear, features: 4, name: last, share: fc}
data: {train: synthetic, test: synthetic, samples: 14}
train: {batch: 6, epochs: 2, seed: 3, optimizer: {name: lars, lr: 0.05, momentum: 0.9, weight_decay: 0.01}}
engine: {name: numpy, dtype: float64, threads: 1}
"""

PLANS = {
    "data": (2, ["parallel.strategy=data"]),
    "mixed": (
        4,
        [
            "parallel.strategy=data",
            "parallel.layers={one: {N: 2, H: 2}, two: {F: 2, C: 2}, norm2: {C: 4}, last: {F: 4}}",
        ],
    ),
    "accumulated": (3, ["parallel.strategy=spatial", "train.accumulate=2"]),
    "stages": (2, ["parallel.stages=2", "parallel.stage={mean: 1}", "parallel.micro_batches=2", "train.accumulate=2"]),
    "delayed": (2, ["parallel.stages=2", "parallel.stage={mean: 1}", "parallel.schedule=delayed"]),
}


@pytest.mark.parametrize("name", PLANS)
def test_any_plan_gives_what_one_rank_gives(name: str) -> None:
    """Norms of layers (LARS), weight decay and momentum see one parameter."""
    procs, changed = PLANS[name]
    if name in ("stages", "delayed"):  # statistics of micro-batches, and old weights: the check of its own
        found = verify(run_file([*changed, "train.batch=4"], TEXT), procs=procs, random_plans=1)
        assert found.worst < 1e-10
        return
    accumulated = [c for c in changed if c.startswith("train")]
    got = train(run_file(changed, TEXT), procs)
    assert_same(got, train(run_file(accumulated, TEXT)))
    assert {n.rpartition(".")[0] for n in got.tensors} == {"one", "norm1", "fc"}


def test_stages_with_delayed_gradients_do_not_share() -> None:
    config = run_file(["parallel.stages=2", "parallel.stage={last: 1, fc: 0}", "parallel.schedule=delayed"], TEXT)
    with pytest.raises(
        PlanError, match="last is in stage 1, but shares parameters with fc of stage 0, which with delayed gradients"
    ):
        build_plan(config, build_graph(config), 2)


def test_a_checkpoint_is_read_on_other_stages(tmp_path: Path) -> None:
    """Weights that two stages use are saved once, and exported once."""
    pytest.importorskip("h5py")
    text = TEXT.replace("norm, name", "relu, name").replace(", share: norm1", "")
    plain = train(run_file([], text))
    fields = [f"run.out={tmp_path / 'run'}", "run.progress=none", "run.checkpoint={every_epochs: 1}"]
    stages = ["parallel.stages=2", "parallel.stage={pool: 0, two: 1}", "parallel.micro_batches=2"]
    for resume, more in ((False, [*stages, "train.epochs=1"]), (True, ["parallel.strategy=filter"])):
        config = run_file([*fields, *more], text)

        def rank(transport: Transport, config: RunConfig = config, resume: bool = resume) -> Trainer:
            trainer, goes_on = start(config, transport=transport, resume=resume)
            run(trainer, goes_on, 0.0)
            return trainer

        trainers = VirtualWorld(Grid((2,))).run(rank)
    for name, array in plain.tensors.items():
        np.testing.assert_allclose(whole(trainers)[name], array, atol=1e-9 * np.abs(array).max(), err_msg=name)
    assert export(["--run", str(tmp_path / "run"), "--out", str(tmp_path / "net.npz")]) == 0
    with np.load(tmp_path / "net.npz") as weights:
        assert set(weights) == {"one.weight", "fc.weight", "fc.bias"}


def test_updates_are_those_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    from tests.util.torch_graph import step

    graph, rng = shared_network(norm=False), np.random.default_rng(0)
    feeds, state = samples(graph, 3, rng), random_state(graph, rng)
    worker = Worker(graph, Plan(Grid()), NumpyEngine(np.float64), SingleTransport(), weights=state)
    rule = SGD(0.05, momentum=0.9, weight_decay=0.1)
    executor = worker.executor(3)
    executor.on_update = lambda params, grads: rule.step(params, grads, None, None)
    rule.engine = worker.engine
    rule.init_state(worker.state)
    tensors = {n: torch.nn.Parameter(torch.tensor(a)) for n, a in state.items()}
    theirs = torch.optim.SGD(tensors.values(), 0.05, momentum=0.9, weight_decay=0.1)
    for i in range(2):
        worker.run({b: feeds[s] for b, s in executor.program.feeds.items()}, 3, "reduce", MicroBatch(0, i))
        grads = step(graph, feeds, {n: t.detach().numpy() for n, t in tensors.items()}).grad
        for name, t in tensors.items():
            t.grad = torch.tensor(grads[name])
        theirs.step()
    for name, t in tensors.items():
        np.testing.assert_allclose(worker.state[name], t.detach().numpy(), rtol=1e-9, atol=1e-12, err_msg=name)
