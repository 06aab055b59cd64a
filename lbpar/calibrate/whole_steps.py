"""How much longer whole training steps take than their kernels and moves by themselves.

A kernel that is timed over and over finds its operands in the caches; within a step they hold what other layers left there, and
ranks wait for each other; and what moves blocks of activations leaves them where the next kernel does not find them in its caches.
By how much that slows a step depends on the network, little on the plan: steps of some plans are timed, and all times of the machine
get longer by what these took longer than predicted, those of such moves by a factor of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from statistics import median
from time import perf_counter
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lbpar.calibrate.kernel_speeds import LEAST, drawn_feeds, flat_state
from lbpar.calibrate.samples import plans_along
from lbpar.calibrate.trust import WholeSteps
from lbpar.config.machine_file import LevelConfig, LinkConfig, MachineFile, MeasuredMove
from lbpar.cost.machine import COPIES, Machine, measured_as
from lbpar.cost.memory import memory
from lbpar.cost.price import price
from lbpar.cost.simulate import simulate
from lbpar.engine.base import Engine
from lbpar.graph.graph import Graph
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.order import BUCKET_BYTES
from lbpar.program.plan import Plan
from lbpar.program.random_plan import random_plan
from lbpar.program.steps import Program
from lbpar.runtime.executor import Executor
from lbpar.runtime.optim.rules import SGD
from lbpar.transport.base import Transport

#: Random plans, besides those with one loop for all layers.
RANDOM = 8
#: Steps of each plan after one that warms up, if there is time.
STEPS = 5
#: Plans timed at least, whatever that takes.
FEWEST = 3
#: Plans from which on moves of activations have a factor of their own.
ENOUGH = 8
#: That factor's candidates, beside the one of all else.
RATIOS = np.geomspace(0.5, 2.0, 29)
#: Moves of activations, as machine files name them. Sums of gradients are written where they are sent from.
BETWEEN: tuple[MeasuredMove, ...] = ("alltoall", "allgather", "p2p")
Links = TypeVar("Links", LevelConfig, LinkConfig)


def measure_steps(
    engine: Engine, transport: Transport, graph: Graph, batch: int, machine: Machine, dtype: str, seconds: float
) -> WholeSteps:
    """Time steps of a network under several plans, with all moves. Collective over all ranks; all get the same.

    Parameters
    ----------
    engine : Engine
    transport : Transport
        Carries the engine's arrays.
    graph : Graph
        With losses.
    batch : int
    machine : Machine
        As its kernels and links were measured.
    dtype : str
        The network's type.
    seconds : float
        To spend, about; `FEWEST` plans are timed in any case.
    """
    until, found = perf_counter() + seconds, list[tuple[float, float, float]]()
    for plan in plans(graph, batch, transport.size):
        program = lower(graph, plan, batch, bucket_bytes=BUCKET_BYTES, rims=engine.rims)
        if (
            memory(program, dtype, "momentum", halves=machine.half_arrays, copies=machine.volume_copies).peak
            > machine.memory
        ):
            continue
        priced = price(program, machine, dtype)
        step, moves = simulate(program, priced, machine), priced.by(lambda s: measured_as(s.kind) if s.moves else "")
        between = step.exposed * sum(moves.get(kind, 0.0) for kind in BETWEEN) / max(priced.move_seconds, LEAST)
        found.append((step.seconds - between, between, timed_step(program, engine, transport, seconds / FEWEST)))
        if transport.bcast(len(found) >= FEWEST and perf_counter() > until):
            break
    return fitted(np.array(found)) if found else WholeSteps()


def fitted(steps: npt.NDArray[np.float64]) -> WholeSteps:
    """The factors with which predictions are least off, on the mean.

    Parameters
    ----------
    steps : (plans, 3)
        Predicted seconds of a step without moves of activations, predicted seconds of these, and measured seconds.
    """
    rest, between, measured = steps.T

    def tried(ratio: float) -> tuple[float, float]:
        ratios = measured / (rest + ratio * between)
        factor = float(np.median(ratios))
        return float(np.mean(np.abs(factor / ratios - 1))), factor

    ratio = 1.0
    if len(steps) >= ENOUGH and between.any():
        ratio = min((1.0, *map(float, RATIOS)), key=lambda r: tried(r)[0])
    off, factor = tried(ratio)
    return WholeSteps(factor, factor * ratio, len(steps), off)


def plans(graph: Graph, batch: int, procs: int) -> Iterator[Plan]:
    """Plans of all kinds, in no order: there may be time for the first ones only."""
    random = Random(0)
    found = list(plans_along(graph, batch, procs, Grid.of(procs).axes))
    found += [random_plan(graph, batch, procs, random) for _ in range(RANDOM if procs > 1 else 0)]
    random.shuffle(found)
    return iter(found)


def timed_step(program: Program, engine: Engine, transport: Transport, seconds: float) -> float:
    """Seconds of a step with SGD's update: the median of those for which there is time, each as long as the slowest rank takes.
    Collective over all ranks."""
    until = perf_counter() + seconds
    state = flat_state(program, engine, transport.rank)
    executor, rule, params = (
        Executor(program, engine, transport, state),
        SGD(1e-6, momentum=0.9),
        program.graph.params(),
    )
    rule.engine = engine
    rule.init_state({n: a for n, a in state.items() if params[n].kind != "statistic"})
    executor.on_update = rule.step
    feeds, taken = drawn_feeds(program, engine, transport.rank), []
    for _ in range(1 + STEPS):
        transport.barrier()
        start = engine.mark()
        executor.run(feeds)
        taken.append(engine.elapsed(start, engine.mark()))
        if transport.bcast(len(taken) > 1 and perf_counter() > until):
            break
    return median(map(max, zip(*transport.allgather_obj(taken[1:]), strict=True)))


def slower(file: MachineFile, times: float, between: float) -> MachineFile:
    """The machine on which moves of activations take ``between`` times as long, and everything else ``times``."""
    c = file.compute

    def speed(per_second: float, longer: float = times) -> float:
        return max(1.0, per_second / longer)

    compute = c.model_copy(
        update={
            "peak": {dtype: speed(v) for dtype, v in c.peak.items()},
            "memory_bandwidth": speed(c.memory_bandwidth),
            "overhead": c.overhead * times,
            "starts": {name: v * times for name, v in c.starts.items()},
            "table": tuple(r.model_copy(update={"rate": speed(r.rate)}) for r in c.table),
            "speeds": {name: speed(v, between if name in COPIES else times) for name, v in c.speeds.items()},
        }
    )

    def links(x: Links, longer: float) -> Links:
        return x.model_copy(update={"alpha": x.alpha * longer, "bandwidth": speed(x.bandwidth, longer)})

    def move(x: LinkConfig) -> LinkConfig:
        longer = between if x.kind in BETWEEN else times
        return links(x, longer).model_copy(update={"beyond": x.beyond and speed(x.beyond, longer)})

    levels = (links(x, times).model_copy(update={"moves": tuple(map(move, x.moves))}) for x in file.levels)
    return file.model_copy(update={"levels": tuple(levels), "compute": compute})
