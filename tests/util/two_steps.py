"""Two training steps of small networks on several ranks in one process, whose engines and transports a test chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lbpar.engine.base import Engine
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.plan import Pipeline, Plan, Schedule
from lbpar.runtime.binding import MicroBatch
from lbpar.runtime.optim.base import Optimizer
from lbpar.runtime.optim.clip import clip_by_global_norm
from lbpar.runtime.optim.rules import LAMB, LARS, SGD, AdamW
from lbpar.runtime.worker import StepResult, Worker, norms_over_ranks
from lbpar.transport.virtual import VirtualWorld
from tests.util.graphs import residual_network, shared_network
from tests.util.run import local_feeds, random_plan, samples

BATCH, STEPS = 4, 2


def segmentation() -> Graph:
    """A small U-Net on volumes, with the Dice loss."""
    g = GraphBuilder(input=(4, 4, 3, 2))
    x = g.relu(g.norm(g.conv(g.input, 3, 3, pad=1)))
    y = g.relu(g.conv(g.max_pool(x, [2, 2, 1]), 4, 3, pad=1))
    y = g.concat([g.conv_transpose(y, 3, [2, 2, 1], [2, 2, 1]), x])
    return g.build(g.conv(y, 3, 1)).with_loss(LOSSES["dice"]())


def grouped() -> Graph:
    """Grouped convolutions, gates and several poolings."""
    g = GraphBuilder(input=(6, 5, 4))
    x = g.conv(g.input, 4, 3, pad=1, groups=2)
    x = g.multiply([g.sigmoid(x), g.leaky_relu(g.norm(x, affine=False))])
    x = g.concat([g.avg_pool(x, 2), g.max_pool(x, 2)])
    return g.build(g.linear(g.flatten(g.dropout(x, 0.3)), 3)).with_loss(LOSSES["bce"]())


def regression() -> Graph:
    g = GraphBuilder(input=(6, 4, 2))
    x = g.add([g.upsample(g.avg_pool(g.input, 2), 2), g.conv(g.input, 2, 3, pad=1)])
    return g.build(g.conv(g.relu(x), 2, 1)).with_loss(LOSSES["mse"]())


def classifier() -> Graph:
    g = GraphBuilder(input=(7, 6, 2))
    x = g.max_pool(g.relu(g.norm(g.conv(g.input, 4, 3, stride=2))), 2, 1)
    return g.build(g.linear(g.relu(g.linear(g.flatten(x), 6)), 4)).with_loss(LOSSES["cross_entropy"]())


@dataclass(frozen=True)
class Case:
    """A network and how it is trained."""

    graph: Graph
    rule: Callable[[], Optimizer]
    clip: float | None = None
    micro: int = 1
    types: str = "float64"
    schedule: Schedule | None = None


CASES = {
    "residual": Case(residual_network(), lambda: SGD(0.05, momentum=0.9, nesterov=True, weight_decay=1e-3), clip=0.5),
    "segmentation": Case(segmentation(), lambda: AdamW(0.01), micro=2),
    "grouped": Case(grouped(), lambda: LAMB(0.01, weight_decay=0.01), types="float32"),
    "regression": Case(regression(), lambda: LARS(0.1, momentum=0.9, weight_decay=1e-3, trust=0.1), clip=1e6),
    "classifier": Case(classifier(), lambda: SGD(0.1), types="float32"),
    "stages": Case(residual_network(), lambda: SGD(0.05, momentum=0.9), clip=0.5, schedule="1f1b"),
    "shared": Case(shared_network(groups=2), lambda: SGD(0.05, momentum=0.9)),
    "shared in stages": Case(shared_network(norm=False), lambda: LARS(0.1, momentum=0.9, trust=0.1), schedule="1f1b"),
    "split stages": Case(classifier(), lambda: SGD(0.1), schedule="zero-bubble"),
}


@dataclass
class Ran:
    """What steps told and left, as bytes of the host."""

    told: list[StepResult] = field(default_factory=list)
    left: dict[str, np.ndarray] = field(default_factory=dict)
    fetches: int = 0


class Training:
    """A case on some ranks, which may start again."""

    def __init__(self, case: Case, procs: int, world: Any, engines: list[Any]) -> None:
        self.case, self.world, self.engines = case, world, engines
        rng = np.random.default_rng(procs)
        grid = Grid.of(procs)
        pipeline = None
        if case.schedule is not None and procs > 1:
            n = len(case.graph.ops)
            stages = {node.name: i * grid.sizes[0] // n for i, node in enumerate(case.graph.ops)}
            pipeline = Pipeline((0,), stages, case.schedule, 2)
        plan = random_plan(case.graph, BATCH, grid, rng, idle=0.1, pipeline=pipeline) if procs > 1 else Plan(grid)
        self.feeds = [samples(case.graph, BATCH, rng) for _ in range(STEPS)]
        self.workers = [Worker(case.graph, plan, e, t, seed=7) for e, t in zip(engines, world.transports, strict=True)]
        self.start: list[dict[str, np.ndarray]] = []
        for worker in self.workers:
            worker.executor(BATCH, "reduce" if case.micro == 1 else "accumulate")
            self.start.append({n: worker.engine.to_host(a).copy() for n, a in worker.state.items()})

    def run(self) -> list[Ran]:
        """All steps from the first weights on; a result per rank."""
        ran = [Ran() for _ in self.workers]
        self.virtual.run(lambda t: self._rank(t.rank, ran[t.rank]))
        return ran

    @property
    def virtual(self) -> VirtualWorld:
        return getattr(self.world, "virtual", self.world)

    def _rank(self, rank: int, ran: Ran) -> None:
        worker, case = self.workers[rank], self.case
        engine, transport = worker.engine, worker.transport
        for name, a in self.start[rank].items():
            engine.copy(engine.from_host(a.copy()), out=worker.state[name])
        rule = case.rule()
        rule.engine = engine
        names = [n for n, p in worker.params.items() if p.kind != "statistic"]
        rule.init_state({n: worker.state[n] for n in names})
        norms = norms_over_ranks(worker.layouts, transport, engine)

        def update(params: Any, grads: Any) -> None:
            if case.clip is not None:
                clip_by_global_norm(grads, case.clip, norms, engine)
            rule.step(params, grads, None, norms)

        for step, feeds in enumerate(self.feeds):
            mode: Any = "reduce" if case.micro == 1 else "last" if step % case.micro == 1 else "accumulate"
            executor = worker.executor(BATCH, mode)
            executor.on_update = update
            blocks = local_feeds(executor.program, rank, feeds, engine.dtype)
            before = getattr(engine, "fetches", 0)
            ran.told.append(worker.run(blocks, BATCH, mode, MicroBatch(7, step, 1 / case.micro)))
            ran.fetches += getattr(engine, "fetches", 0) - before
        left = worker.state | rule.state_dict()
        ran.left = {n: engine.to_host(a).copy() for n, a in left.items()}


def plain(case: Case, procs: int) -> list[Ran]:
    world = VirtualWorld(Grid.of(procs))
    engines: list[Engine] = [NumpyEngine(case.types) for _ in range(procs)]
    return Training(case, procs, world, engines).run()


def assert_equal(got: list[Ran], want: list[Ran], tolerance: float = 0.0) -> None:
    """To the last bit, or to rounding."""
    for a, b in zip(got, want, strict=True):
        if not tolerance:
            assert a.told == b.told
        for one, other in zip(a.told, b.told, strict=True):
            told, wanted = ([float(v) for v in vars(r).values() if isinstance(v, int | float)] for r in (one, other))
            np.testing.assert_allclose(told, wanted, rtol=tolerance)
        assert a.left.keys() == b.left.keys()
        for name, array in b.left.items():
            atol = tolerance * np.abs(array).max(initial=1)  # gradients that cancel are rounding
            np.testing.assert_allclose(a.left[name], array, rtol=tolerance, atol=atol, err_msg=name)
