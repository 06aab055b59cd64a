"""Run one full update under a plan and on one rank, and compare every tensor.

The comparison covers outputs (``layer:y``), their gradients (``layer:dy``; ``input:dy`` is the gradient of the network's
input), weight gradients (``layer.weight:grad``), updated weights and running statistics (``layer.weight``), and the loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lbpar.engine.base import Engine
from lbpar.errors import CommError
from lbpar.graph.graph import Graph
from lbpar.layout.exchange import volume
from lbpar.layout.grid import Grid
from lbpar.layout.runs import flat_index, indices
from lbpar.layout.transition import MoveKind
from lbpar.program.lowering import Gradients, lower
from lbpar.program.plan import Pipeline, Plan
from lbpar.program.steps import Buffer, Program
from lbpar.program.words import itemsize
from lbpar.random import fold, normal, uniform
from lbpar.runtime.binding import MicroBatch
from lbpar.runtime.delayed import Pipe
from lbpar.runtime.executor import Executor, UpdateRule, run_lockstep
from lbpar.runtime.initial import initial_state
from lbpar.runtime.optim.base import Optimizer, flat
from lbpar.runtime.optim.clip import clip_by_global_norm
from lbpar.runtime.room import check_room
from lbpar.runtime.worker import norms_over_ranks
from lbpar.transport.base import Transport
from lbpar.transport.single import SingleTransport
from lbpar.transport.virtual import VirtualWorld

Array = Any

FLOOR = 1e-3
"""Tensors smaller than this part of the largest of their kind count as if they were that large: the gradient of a bias
before a batch norm, say, is zero except for rounding."""

LARGE = 0.05
"""Tensors of a half type larger than this part of the largest of their kind are compared."""

NOISE = 1e-12
"""Gradients smaller than this part of the largest one are rounding."""


@dataclass
class Parity:
    """Result of one comparison.

    Attributes
    ----------
    tensors : dict
        Worst relative difference per tensor; infinite where a value is not a number.
    sent : dict
        Bytes that all ranks together sent, per kind of move, as counted by the transport and said by the program.
    """

    tensors: dict[str, float] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """Largest difference of all tensors."""
        return max(self.tensors.values(), default=0.0)


@dataclass(frozen=True)
class Update:
    """One update of a network's weights, the same for every engine and any number of ranks.

    Attributes
    ----------
    graph : Graph
        With its loss.
    batch : int
        Global number of samples; inputs and targets are random, drawn by global index.
    seed : int
        Fixes weights, inputs, targets and dropout.
    rule : callable
        Makes the optimizer of an engine.
    lr : float
        Its learning rate.
    clip_norm : float, optional
        Gradients are scaled down to this global norm.
    accumulate : int
        Batches whose gradients are added.
    micro_batches : int
        Parts that each batch has, with and without stages.
    loss_scale : float
        What gradients are multiplied by on their way back, a power of two.
    stages : mapping of str to int, optional
        Stage of each layer, where gradients are delayed: then there are as many updates, with batches of their own, that every stage has
        taken some gradients of the age that it will take all others of.
    """

    graph: Graph
    batch: int
    seed: int
    rule: Callable[[Engine], Optimizer]
    lr: float
    clip_norm: float | None = None
    accumulate: int = 1
    micro_batches: int = 1
    loss_scale: float = 1.0
    stages: Mapping[str, int] | None = None

    @property
    def ages(self) -> dict[str, int]:
        """With delayed gradients: how many updates old the gradient of each parameter is when it is applied."""
        if self.stages is None:
            return {}
        last = max(self.stages.values())
        trained = (n for n, p in self.graph.params().items() if p.kind != "statistic")
        return {n: last - self.stages[n.rpartition(".")[0]] for n in trained}

    def programs(self, plan: Plan, fused: bool = True, rims: bool = False) -> list[Program]:
        """The program of each batch, keeping every array; options are those of `lower`."""

        def program(gradients: Gradients) -> Program:
            return lower(
                self.graph,
                plan,
                self.batch,
                input_grad=True,
                keep=True,
                gradients=gradients,
                fused=fused,
                rims=rims,
            )

        if self.accumulate == 1:
            updates = 1 if self.stages is None else 2 * (1 + max(self.stages.values()))
            return [program("reduce")] * updates
        return [program("accumulate")] * (self.accumulate - 1) + [program("last")]

    def executors(self, programs: Sequence[Program], engine: Engine, transport: Transport) -> list[Executor]:
        """What runs each batch on one rank, with freshly drawn weights and an optimizer."""
        layouts = programs[-1].params
        drawn = initial_state(self.graph.params(), layouts, transport.rank, self.seed, engine.dtype)
        state, held = {name: engine.from_host(a) for name, a in drawn.items()}, dict[str, Array]()
        rule, norms = self.rule(engine), norms_over_ranks(layouts, transport, engine, programs[-1].plan.update_axes)
        rule.engine = engine

        def apply(params: Mapping[str, Array], grads: Mapping[str, Array]) -> None:
            if self.loss_scale != 1:
                engine.unscale([flat(name, g) for name, g in grads.items()], 1 / self.loss_scale)
            if self.clip_norm is not None:
                clip_by_global_norm(grads, self.clip_norm, norms, engine)
            rule.step(params, grads, self.lr, norms)

        made = []
        for i, program in enumerate(programs):
            executor = Executor(program, engine, transport, state, held)
            executor.micro_batch = MicroBatch(self.seed, i, 1 / len(programs), self.loss_scale)
            executor.on_update = apply
            made.append(executor)
        return made

    def feeds(self, executor: Executor) -> dict[str, Array]:
        """One rank's random inputs and targets of a batch."""
        program = executor.program
        return {b: self._random(source, program.buffers[b], executor) for b, source in program.feeds.items()}

    def _random(self, source: str, held: Buffer, executor: Executor) -> Array:
        shape, dtype = self.graph.shapes(self.batch)[source], executor.engine.dtype
        samples, *rest = held.layout.box(executor.transport.rank)
        box = (tuple((held.first + lo, held.first + hi) for lo, hi in samples), *rest)
        key = fold(fold(self.seed, 17, [n.name for n in self.graph.inputs].index(source)), executor.micro_batch.number)
        index = flat_index(box, shape)
        output = next((o for o, (target, _) in self.graph.compared.items() if target == source), None)
        if output is None:
            return normal(key, index).astype(dtype)
        classes = self.graph.shapes(self.batch)[output][-1]
        if self.graph[source].op.dtype == "int64":  # type: ignore[attr-defined]
            return np.minimum((uniform(key, index) * classes).astype(np.int64), classes - 1)
        return uniform(key, index).astype(dtype)


def largest(a: Array) -> float:
    """Largest absolute value."""
    return float(np.abs(a).max(initial=0))


def root_mean_square(a: Array) -> float:
    """Size of a typical value: the few that fall on the other side of a kink when rounded count little."""
    return float(np.sqrt(np.square(a, dtype=np.float64).mean())) if a.size else 0.0


def measure(dtype: str) -> Callable[[Array], float]:
    """How differences are measured in a type."""
    return largest if dtype == "float64" else root_mean_square


class Reference:
    """An update on one rank, and what it leaves.

    Parameters
    ----------
    update : Update
    engine : Engine
    size : callable
        Of a tensor and of a difference; relative differences are the ratio.

    Attributes
    ----------
    values : dict of array
        Every array by its name.
    """

    def __init__(self, update: Update, engine: Engine, size: Callable[[Array], float] = largest) -> None:
        self.update, self.engine, self.size = update, engine, size
        # Every kernel on its own: fused ones are among what is checked.
        pipeline = Pipeline(micro_batches=update.micro_batches) if update.micro_batches > 1 else None
        programs = update.programs(Plan(Grid(), pipeline=pipeline), fused=False)
        check_room(programs[-1], engine)
        executors = update.executors(programs, engine, SingleTransport())
        (with_old_weights if update.ages else run_all)(update, executors)
        executor = executors[-1]
        held = {v: executor.arrays[b] for v, b in executor.program.values.items() if b in executor.arrays}
        self.values = {v: engine.to_host(a) for v, a in (held | executor.state).items()}
        self._noise = self._cancelled()

    def differences(self, executor: Executor) -> dict[str, tuple[float, float]]:
        """Per tensor: size of the difference on this rank's blocks, size of the whole."""
        out = {}
        program, rank = executor.program, executor.transport.rank
        held: Mapping[str, str] = {**program.values, **{p: p for p in program.params}}
        for value, buffer in held.items():
            layout = program.buffers[buffer].layout if buffer not in program.params else program.params[buffer]
            if not self._compared(value) or layout.partial or layout.has_ghosts:
                continue
            whole = self.values[value]
            if not layout.holds(rank):
                out[value] = 0.0, self.size(whole)
                continue
            mine = executor.engine.to_host({**executor.arrays, **executor.state}[buffer])
            box = layout.box(rank)
            ours = whole[np.ix_(*(indices(runs) for runs in box))] if box else whole
            out[value] = self.size(mine - ours), self.size(whole)
        return out

    def beside(self, other: Reference) -> dict[str, float]:
        """Relative difference of each tensor from that of another run on one rank."""
        parts = {
            value: (self.size(other.values[value] - whole), self.size(whole))
            for value, whole in self.values.items()
            if self._compared(value)
        }
        return relative([parts])

    def _cancelled(self) -> set[str]:
        """Parameters whose gradient is zero except for rounding. Adam and its kin divide it by its own size, so that their
        updates of these are rounding too, but not small; their gradients are compared all the same."""
        sizes = {v.removesuffix(":grad"): largest(a) for v, a in self.values.items() if v.endswith(":grad")}
        limit = NOISE * max(sizes.values(), default=0.0)
        return {p for p, size in sizes.items() if size < limit}

    def _compared(self, value: str) -> bool:
        if value in self._noise:
            return False
        return value in self.values and kind_of(value) in ("state", "y", "dy", "grad")


def verify_virtual(reference: Reference, plan: Plan, engine: Engine | None = None) -> Parity:
    """Compare on P ranks inside this process, with another engine if one is given."""
    update, engine = reference.update, engine or reference.engine
    world, programs = VirtualWorld(plan.grid, strict=False), update.programs(plan, rims=engine.rims)
    ranks = [update.executors(programs, engine, transport) for transport in world.transports]
    if update.ages:
        world.run(lambda t: run_all(update, ranks[t.rank]))
    else:
        # Norms of split parameters (LARS, LAMB) are sums over ranks, for which all must meet: updates wait for the end of
        # the lockstep run. No later step reads a weight.
        late = [_put_off(executors[-1]) for executors in ranks]
        for batch in zip(*ranks, strict=True):
            run_lockstep(batch, [update.feeds(e) for e in batch])
        world.run(lambda t: late[t.rank]())
    counted = [{tag: s.bytes for tag, s in t.counter.by_tag().items()} for t in world.transports]
    parts = [reference.differences(executors[-1]) for executors in ranks]
    return Parity(relative(parts), _bytes(programs, engine, counted))


def verify_mpi(reference: Reference, plan: Plan, transport: Transport, engine: Engine | None = None) -> Parity:
    """Compare on this job's ranks. Collective over all of them; every rank returns the same."""
    update, engine = reference.update, engine or reference.engine
    programs = update.programs(plan, rims=engine.rims)
    executors = update.executors(programs, engine, transport)
    transport.counter.reset()
    run_all(update, executors)
    counted = transport.allgather_obj({tag: s.bytes for tag, s in transport.counter.by_tag().items()})
    parts = transport.allgather_obj(reference.differences(executors[-1]))
    return Parity(relative(parts), _bytes(programs, engine, counted))


def run_all(update: Update, executors: Sequence[Executor]) -> None:
    """Run all batches on one rank: one after the other, or, where gradients are delayed, several under way at a time. Collective over all ranks."""
    if not update.ages:
        for executor in executors:
            executor.run(update.feeds(executor))
        return
    pipe = Pipe(len(executors[-1].program.rounds))
    for done in (*(pipe.go(e, update.feeds(e)) for e in executors), *pipe.drain()):
        if done is not None and done is not executors[-1]:
            done.arrays = {}


def with_old_weights(update: Update, executors: Sequence[Executor]) -> None:
    """Run all batches on one rank that has all weights, each with those of as many updates ago as their gradients are to be old."""
    state, engine = executors[-1].state, executors[-1].engine
    kept = {n: deque([engine.copy(state[n])], age + 1) for n, age in update.ages.items()}  # the oldest first
    for executor in executors:
        rule = executor.on_update
        assert rule is not None

        def newest(params: Mapping[str, Array], grads: Mapping[str, Array], rule: UpdateRule = rule) -> None:
            for n, p in params.items():
                engine.copy(kept[n][-1], out=p)
            rule(params, grads)
            for n, p in params.items():
                kept[n].append(engine.copy(p))

        executor.on_update = newest
        for n, versions in kept.items():
            engine.copy(versions[0], out=state[n])
        executor.run(update.feeds(executor))


def _put_off(executor: Executor) -> Callable[[], None]:
    """Let an executor's update wait; returns a call that makes up for it."""
    update, waiting = executor.on_update, []
    executor.on_update = lambda params, grads: waiting.append((params, grads))

    def catch_up() -> None:
        assert update is not None
        for params, grads in waiting:
            update(params, grads)

    return catch_up


def _bytes(programs: Sequence[Program], engine: Engine, counted: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Bytes that all ranks sent in all batches, per kind of move; they must be what the programs say."""
    sent: dict[str, int] = {}
    predicted: dict[str, int] = {}
    kinds: dict[str, MoveKind] = {}
    for program in programs:
        for step in program.moves:
            kind = step.move.kind
            if kind == "slice":
                continue
            kinds[step.dst] = kind
            elements = sum(volume(step.move, r).elements for r in range(len(counted)))
            size = itemsize(program, step, engine.dtype, engine.activations)
            predicted[kind] = predicted.get(kind, 0) + elements * size
    for tag, kind in kinds.items():
        sent[kind] = sent.get(kind, 0) + sum(c.get(tag, 0) for c in counted)
    if sent != predicted:
        raise CommError(
            f"verify: the transport counted {sent} bytes, the program says {predicted}; this is a defect of lbpar."
        )
    return sent


def large(exact: Reference, found: Mapping[str, float]) -> dict[str, float]:
    """Relative differences of the tensors that are not small beside others of their kind; of half types, where small ones are
    what is left when larger numbers cancel, the rest is rounding."""
    sizes = {value: root_mean_square(a) for value, a in exact.values.items() if value in found}
    most = _largest_of_kind(sizes)
    return {value: d for value, d in found.items() if sizes[value] > LARGE * most[kind_of(value)]}


def worst_of_large(exact: Reference, found: Mapping[str, float]) -> float:
    """Worst of `large`."""
    return max(large(exact, found).values(), default=0.0)


def _largest_of_kind(sizes: Mapping[str, float]) -> dict[str, float]:
    most: dict[str, float] = {}
    for value, size in sizes.items():
        most[kind_of(value)] = max(most.get(kind_of(value), 0.0), size)
    return most


def kind_of(value: str) -> str:
    """``y``, ``dy``, ``grad``, ...: what a value is, of whichever micro-batch; ``state``: a parameter or running statistic."""
    return value.partition("#")[0].rpartition(":")[2] if ":" in value else "state"


def relative(parts: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Worst relative difference per tensor over all ranks' parts; infinite if any is not a number."""
    sizes = {value: size for value, (_, size) in parts[0].items()}
    most, out = _largest_of_kind(sizes), {}
    for value, size in sizes.items():
        scale = max(size, FLOOR * most[kind_of(value)]) or 1.0
        # max() would drop a NaN that is not the first of them.
        worst = max(float("inf") if np.isnan(p[value][0]) else p[value][0] for p in parts) / scale
        out[value] = float("inf") if np.isnan(worst) else worst
    return out
