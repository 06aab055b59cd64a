"""Training by executor and optimizer alone, without the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lbpar.engine.base import Engine
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.graph.graph import Graph
from lbpar.layout.grid import Grid
from lbpar.plan.strategies import strategy_plan
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.steps import Program
from lbpar.runtime.executor import Executor
from lbpar.runtime.initial import initial_state
from lbpar.runtime.optim.rules import SGD
from lbpar.transport.base import Transport
from lbpar.transport.single import SingleTransport
from tests.util.run import local_feeds, random_plan, samples

BATCH, STEPS = 7, 30


def batches(graph: Graph, count: int = STEPS, batch: int = BATCH) -> list[dict[str, np.ndarray]]:
    """Different samples for every step; each class has a pattern of its own, so that there is something to learn."""
    rng = np.random.default_rng(11)
    pattern = rng.standard_normal((32, *graph.inputs[0].op.shape))  # type: ignore[attr-defined]
    out = []
    for _ in range(count):
        feeds = samples(graph, batch, rng)
        feeds["input"] = 0.7 * feeds["input"] + pattern[feeds["target"]]
        out.append(feeds)
    return out


def five_plans(graph: Graph, grid: Grid, batch: int = BATCH) -> dict[str, Plan]:
    """Samples, space, channels and filters, and two mixtures that differ from layer to layer."""
    plans = {name: strategy_plan(name, graph, grid, batch) for name in ("data", "spatial", "stationary-w")}
    rng = np.random.default_rng(grid.size)
    return plans | {f"mixed{i}": random_plan(graph, batch, grid, rng, idle=0.1) for i in (1, 2)}


class Rank:
    """One rank's training: state, optimizer and executor."""

    def __init__(
        self, program: Program, graph: Graph, transport: Transport, seed: int = 5, engine: Engine | None = None
    ) -> None:
        engine = engine or NumpyEngine(np.float64)
        self.program, self.rank = program, transport.rank
        self.state = initial_state(graph.params(), program.params, self.rank, seed, np.dtype(engine.dtype))
        kinds = {k: p.kind for k, p in graph.params().items()}
        self.optimizer = SGD(0.05, momentum=0.9, weight_decay=1e-3, kinds=kinds)
        self.executor = Executor(program, engine, transport, self.state)
        self.executor.micro_batch.seed = seed
        self.executor.on_update = self.optimizer.step

    def train(self, feeds: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
        """Loss of every step."""
        losses = []
        for step, global_feeds in enumerate(feeds):
            self.executor.micro_batch.number = step
            results = self.executor.run(local_feeds(self.program, self.rank, global_feeds, self.executor.engine.dtype))
            losses.append(float(results["loss"]))
        return np.array(losses)


def train_alone(graph: Graph, feeds: Sequence[Mapping[str, np.ndarray]], batch: int = BATCH) -> tuple[np.ndarray, Rank]:
    """The loss curve and final state of one rank."""
    rank = Rank(lower(graph, Plan(Grid(), {}), batch), graph, SingleTransport())
    return rank.train(feeds), rank
