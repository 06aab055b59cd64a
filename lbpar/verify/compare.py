"""Run one full step under a plan and on one rank, and compare every tensor.

The comparison covers outputs (``layer:y``), their gradients (``layer:dy``; ``input:dy`` is the gradient of the network's
input), weight gradients (``layer.weight:grad``), updated weights and running statistics (``layer.weight``), and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lbpar.engine.base import Engine
from lbpar.errors import CommError
from lbpar.graph.graph import TARGET, Graph
from lbpar.layout.exchange import volume
from lbpar.layout.grid import Grid
from lbpar.layout.runs import Box, flat_index, indices
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.steps import Program
from lbpar.program.words import itemsize
from lbpar.random import fold, normal, uniform
from lbpar.runtime.binding import Context
from lbpar.runtime.executor import Executor, run_lockstep
from lbpar.runtime.initial import initial_state
from lbpar.runtime.optim.base import Optimizer
from lbpar.runtime.optim.norms import LocalNorms
from lbpar.runtime.room import check_room
from lbpar.runtime.worker import norms_over_ranks
from lbpar.transport.base import Transport
from lbpar.transport.single import SingleTransport
from lbpar.transport.virtual import VirtualWorld

Array = Any
MakeOptimizer = Callable[[], Optimizer]

FLOOR = 1e-3
"""Tensors smaller than this part of the largest of their kind count as if they were that large: the gradient of a bias
before a batch norm, say, is zero but for rounding."""

NOISE = 1e-12
"""Gradients smaller than this part of the largest one are rounding."""


@dataclass
class Parity:
    """Result of one comparison.

    Attributes
    ----------
    tensors : dict
        Worst relative difference per tensor: largest absolute difference over the largest absolute value; infinite where
        a value is not a number.
    sent : dict
        Bytes that all ranks together sent, per kind of move, as counted by the transport.
    predicted : dict
        The same as the program says.
    """

    tensors: dict[str, float] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    predicted: dict[str, int] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """Largest difference of all tensors."""
        return max(self.tensors.values(), default=0.0)


class Reference:
    """One step of a network on one rank, and what it leaves.

    Parameters
    ----------
    graph : Graph
        With its loss.
    batch : int
        Global number of samples; inputs and targets are random, drawn by global index.
    engine : Engine
        Its element type is that of all tensors; float64 for parity.
    seed : int
        Fixes weights, inputs, targets and dropout.
    make_optimizer : callable
        Makes the optimizer whose update is compared.
    lr : float
        Its learning rate.
    """

    def __init__(
        self, graph: Graph, batch: int, engine: Engine, seed: int, make_optimizer: MakeOptimizer, lr: float
    ) -> None:
        self.graph, self.batch, self.engine, self.seed = graph, batch, engine, seed
        self.make_optimizer, self.lr = make_optimizer, lr
        plan = Plan(Grid())
        # Every kernel on its own: fused ones are among what is checked.
        program = lower(graph, plan, batch, input_grad=True, keep=True, fused=False)
        check_room(program, engine.dtype.name)
        executor = self.executor(program, SingleTransport(), LocalNorms())
        executor.run(self.feeds(program, 0))
        held = {v: executor.arrays[b] for v, b in program.values.items() if b in executor.arrays}
        self.values = {v: engine.to_host(a) for v, a in (held | executor.state).items()}
        self._noise = self._cancelled()

    def program(self, plan: Plan) -> Program:
        """The program of the step under a plan, keeping every array."""
        return lower(self.graph, plan, self.batch, input_grad=True, keep=True)

    def executor(self, program: Program, transport: Transport, norms: Any) -> Executor:
        """An executor with freshly drawn weights and an optimizer."""
        state = initial_state(self.graph.params(), program.params, transport.rank, self.seed, self.engine.dtype)
        state = {name: self.engine.from_host(a) for name, a in state.items()}
        executor = Executor(program, self.engine, transport, state)
        executor.context = Context(self.seed)
        optimizer = self.make_optimizer()
        executor.on_update = lambda params, grads: optimizer.step(params, grads, self.lr, norms)
        return executor

    def feeds(self, program: Program, rank: int) -> dict[str, Array]:
        """One rank's random inputs and targets."""
        return {b: self._random(source, program.buffers[b].layout.box(rank)) for b, source in program.feeds.items()}

    def _random(self, source: str, box: Box) -> Array:
        shape = self.graph.shapes(self.batch)[source]
        key, index = fold(self.seed, 17, int(source == TARGET)), flat_index(box, shape)
        if source != TARGET:
            return normal(key, index).astype(self.engine.dtype)
        output = self.graph.shapes(self.batch)[self.graph.output]
        if self.graph[TARGET].op.dtype == "int64":  # type: ignore[attr-defined]
            return np.minimum((uniform(key, index) * output[-1]).astype(np.int64), output[-1] - 1)
        return uniform(key, index).astype(self.engine.dtype)

    def differences(self, executor: Executor) -> dict[str, tuple[float, float]]:
        """Per tensor: largest absolute difference on this rank's blocks, largest absolute value of the whole."""
        out = {}
        program, rank = executor.program, executor.transport.rank
        held: Mapping[str, str] = {**program.values, **{p: p for p in program.params}}
        for value, buffer in held.items():
            layout = program.buffers[buffer].layout if buffer not in program.params else program.params[buffer]
            if not self._compared(value) or layout.partial or layout.has_ghosts:
                continue
            mine = self.engine.to_host({**executor.arrays, **executor.state}[buffer])
            whole = self.values[value]
            box = layout.box(rank)
            ours = whole[np.ix_(*(indices(runs) for runs in box))] if box else whole
            largest = float(np.abs(whole).max()) if whole.size else 0.0
            out[value] = (float(np.abs(mine - ours).max()) if mine.size else 0.0, largest)
        return out

    def _cancelled(self) -> set[str]:
        """Parameters whose gradient is zero but for rounding. Adam and its kin divide it by its own size, so that their
        updates of these are rounding too, but not small; their gradients are compared all the same."""
        largest = {v.removesuffix(":grad"): float(np.abs(g).max(initial=0)) for v, g in self._gradients()}
        limit = NOISE * max(largest.values(), default=0.0)
        return {p for p, g in largest.items() if g < limit}

    def _gradients(self) -> list[tuple[str, Array]]:
        return [(v, a) for v, a in self.values.items() if v.endswith(":grad")]

    def _compared(self, value: str) -> bool:
        if value in self._noise:
            return False
        return value in self.values and (":" not in value or value.rpartition(":")[2] in ("y", "dy", "grad"))


def verify_virtual(reference: Reference, plan: Plan) -> Parity:
    """Compare on P ranks inside this process."""
    world = VirtualWorld(plan.grid, strict=False)
    program = reference.program(plan)
    ranks = range(plan.grid.size)
    executors = [
        reference.executor(program, t, norms_over_ranks(program.params, t, reference.engine)) for t in world.transports
    ]
    # Norms of split parameters (LARS, LAMB) are sums over ranks, for which all must meet: updates wait for the end of
    # the lockstep run. No later step reads a weight.
    updates = [_put_off(e) for e in executors]
    run_lockstep(executors, [reference.feeds(program, r) for r in ranks])
    world.run(lambda t: updates[t.rank]())
    counted = [world.transport(r).counter.by_tag() for r in range(plan.grid.size)]
    parity = Parity(*_bytes(program, reference.engine.dtype, [{t: s.bytes for t, s in c.items()} for c in counted]))
    parity.tensors = relative([reference.differences(e) for e in executors])
    return parity


def verify_mpi(reference: Reference, plan: Plan, transport: Transport) -> Parity:
    """Compare on this job's ranks. Collective over all of them; every rank returns the same."""
    program = reference.program(plan)
    executor = reference.executor(program, transport, norms_over_ranks(program.params, transport, reference.engine))
    transport.counter.reset()
    executor.run(reference.feeds(program, transport.rank))
    mine = {t: s.bytes for t, s in transport.counter.by_tag().items()}
    counted = transport.allgather_obj(mine)
    parity = Parity(*_bytes(program, reference.engine.dtype, counted))
    parity.tensors = relative(transport.allgather_obj(reference.differences(executor)))
    return parity


def _put_off(executor: Executor) -> Callable[[], None]:
    """Let an executor's update wait; returns a call that makes up for it."""
    update, waiting = executor.on_update, []
    executor.on_update = lambda params, grads: waiting.append((params, grads))

    def catch_up() -> None:
        assert update is not None
        for params, grads in waiting:
            update(params, grads)

    return catch_up


def _bytes(
    program: Program, dtype: np.dtype[Any], counted: Sequence[Mapping[str, int]]
) -> tuple[dict[str, float], dict[str, int], dict[str, int]]:
    sent: dict[str, int] = {}
    predicted: dict[str, int] = {}
    for step in program.moves:
        kind = step.move.kind
        if kind == "slice":
            continue
        size = itemsize(program, step, dtype)
        sent[kind] = sent.get(kind, 0) + sum(c.get(step.dst, 0) for c in counted)
        predicted[kind] = (
            predicted.get(kind, 0) + sum(volume(step.move, r).elements for r in range(len(counted))) * size
        )
    if sent != predicted:
        raise CommError(
            f"verify: the transport counted {sent} bytes, the program says {predicted}; this is a defect of lbpar."
        )
    return {}, sent, predicted


def relative(parts: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Worst relative difference per tensor over all ranks' parts; infinite if any is not a number."""
    largest: dict[str, float] = {}
    for value, (_, size) in parts[0].items():
        kind = value.rpartition(":")[2] if ":" in value else "state"
        largest[kind] = max(largest.get(kind, 0.0), size)
    out = {}
    for value, (_, size) in parts[0].items():
        kind = value.rpartition(":")[2] if ":" in value else "state"
        scale = max(size, FLOOR * largest[kind]) or 1.0
        # max() would drop a NaN that is not the first of them.
        worst = max(float("inf") if np.isnan(p[value][0]) else p[value][0] for p in parts) / scale
        out[value] = float("inf") if np.isnan(worst) else worst
    return out
