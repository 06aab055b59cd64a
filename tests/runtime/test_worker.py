"""One rank's share of a network: executors are made once, results are the same on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.program.plan import Plan
from lbpar.runtime.binding import MicroBatch
from lbpar.runtime.worker import Worker
from lbpar.transport.single import SingleTransport
from lbpar.transport.virtual import VirtualTransport, VirtualWorld
from tests.util.late import LateEngine
from tests.util.queues import Scheduler
from tests.util.run import local_feeds


def network() -> Graph:
    g = GraphBuilder((4, 4, 2))
    x = g.relu(g.norm(g.conv(g.input, 4, 3, pad=1, name="c"), name="n"))
    return g.build(g.linear(g.global_avg_pool(x), 3, name="fc")).with_loss(CrossEntropy())


def feeds(batch: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"input": rng.standard_normal((batch, 4, 4, 2)), "target": rng.integers(0, 3, batch)}


def test_ranks_agree_with_one_on_loss_and_hits() -> None:
    def step(transport: VirtualTransport, plan: Plan) -> tuple[float, float | None, int]:
        worker = Worker(network(), plan, NumpyEngine(np.float64), transport, seed=3)
        mine = local_feeds(worker.executor(4).program, transport.rank, feeds())
        result = worker.run(mine, 4)
        assert result.samples == 4 and result.top5 is None  # of three classes
        return result.loss, result.top1, result.positions

    alone = step(SingleTransport(), Plan(Grid(), {}))  # type: ignore[arg-type]
    plan = Plan(Grid((2,)), {"c": {"H": (0,)}, "fc": {"F": (0,)}})
    for loss, top1, positions in VirtualWorld(plan.grid).run(lambda t: step(t, plan)):
        assert loss == pytest.approx(alone[0], rel=1e-12)
        assert (top1, positions) == alone[1:]


def test_executors_are_made_once_and_share_state() -> None:
    worker = Worker(network(), Plan(Grid(), {}), NumpyEngine(np.float64), SingleTransport(), seed=3)
    assert worker.executor(4) is worker.executor(4)
    assert worker.executor(4, "evaluate") is not worker.executor(4)
    assert worker.executor(4, "evaluate").state is worker.executor(2).state is worker.state


@pytest.mark.parametrize("late", [False, True])
def test_the_first_layer_that_is_not_finite_is_named(late: bool) -> None:
    engine: Any = LateEngine(Scheduler()) if late else NumpyEngine(np.float64)
    worker = Worker(network(), Plan(Grid(), {}), engine, SingleTransport(), seed=3)
    mine = local_feeds(worker.executor(4).program, 0, feeds())
    worker.run(mine, 4)
    micro_batch = MicroBatch(3)
    assert worker.first_bad_layer(mine, 4, micro_batch) is None
    engine.copy(engine.from_host(np.array([np.inf])), out=worker.state["n.weight"][:1])
    assert worker.first_bad_layer(mine, 4, micro_batch) == "n"
    next(a for a in mine.values() if a.ndim == 4)[0, 0, 0, 0] = np.nan
    assert worker.first_bad_layer(mine, 4, micro_batch) == "input"


def test_given_weights_replace_drawn_ones() -> None:
    weights = {"fc.bias": np.array([1.0, 2.0, 3.0])}
    worker = Worker(network(), Plan(Grid(), {}), NumpyEngine(np.float64), SingleTransport(), weights=weights)
    worker.executor(4)
    np.testing.assert_array_equal(worker.state["fc.bias"], weights["fc.bias"])
    assert worker.weights is None
