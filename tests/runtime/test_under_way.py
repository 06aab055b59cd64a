"""Batches under way: which rate they are given, and in which order they leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.plan import Pipeline, Plan
from lbpar.runtime.binding import MicroBatch
from lbpar.runtime.optim.rules import SGD
from lbpar.runtime.under_way import Entered, UnderWay
from lbpar.runtime.worker import Worker, norms_over_ranks
from lbpar.transport.virtual import VirtualWorld
from tests.util.run import local_feeds, samples

STAGES = 3


class Noting(SGD):
    """Notes the rates that it is given."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.given: list[float] = []

    def step(self, params: Any, grads: Any, lr: Any = None, norms: Any = None) -> None:
        self.given.append(lr)


@pytest.mark.parametrize("reschedule", [None, 4])
def test_batches_leave_in_order_and_stages_are_given_their_rates(reschedule: int | None) -> None:
    g = GraphBuilder(input=(3,))
    x = g.input
    for i in range(STAGES):
        x = g.linear(x, 3, name=f"fc{i}")
    graph = g.build(x).with_loss(LOSSES["mse"]())
    stages = {n.name: min(i, STAGES - 1) for i, n in enumerate(graph.ops)}
    plan, rng = Plan(Grid((STAGES,)), {}, Pipeline((0,), stages, "delayed")), np.random.default_rng(0)
    feeds, world = samples(graph, 4, rng), VirtualWorld(plan.grid)

    def one(transport: Any) -> tuple[list[float], list[int], list[int]]:
        worker, rule = Worker(graph, plan, NumpyEngine(np.float64), transport), Noting()
        block = local_feeds(worker.executor(4).program, transport.rank, feeds)
        under_way = UnderWay(worker, rule, norms_over_ranks(worker.layouts, transport, worker.engine), reschedule)
        counts, left = [], []
        for i in range(8):
            entering = Entered(block, 4, MicroBatch(0, i), 0.5 * (i + 1)) if i < 6 else None
            done = under_way.go(entering, None)
            counts.append(len(under_way))
            if done is not None:
                assert done.result is not None and np.isfinite(done.result.loss)
                left.append(done.micro_batch.number)
        return rule.given, counts, left

    for place, (rates, counts, left) in enumerate(world.run(one)):
        assert counts == [1, 2, 2, 2, 2, 2, 1, 0] and left == [*range(6)]
        age = STAGES - 1 - place
        powers = [max(0.0, 1 - i / 4) if reschedule else 0.0 for i in range(6)]
        assert rates == pytest.approx([0.5 * (i + 1) / (1 + age) ** p for i, p in enumerate(powers)])
