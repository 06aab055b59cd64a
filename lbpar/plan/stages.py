"""Stages for a plan: cuts of the layers' order that balance the stages, their borders included."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from lbpar.cost.kernel_time import item_bytes
from lbpar.cost.machine import Machine
from lbpar.cost.price import Price, price
from lbpar.errors import PlanError
from lbpar.graph.graph import Graph
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Pipeline, Plan, Schedule, check_shared, stays_together
from lbpar.solver.chain import cut_chain


def stage_plan(
    inner: Plan,
    graph: Graph,
    samples: int,
    places: int,
    machine: Machine,
    *,
    schedule: Schedule = "1f1b",
    micro_batches: int = 1,
    each: int = 1,
    given: Mapping[str, int] | None = None,
    dtype: str = "float32",
) -> Plan:
    """A plan with stages, each with the grids of ``inner``, cut where the slowest stage is fastest.

    Exact over all cuts of the layers' order: a stage's time is that of its layers' steps on a micro-batch, one after the other, and of what
    crosses its borders, both ways; a value that several stages skip crosses each of their borders.

    Parameters
    ----------
    inner : Plan
        Of the processes of one stage, for micro-batches.
    samples : int
        Of a micro-batch.
    places : int
        Stages that work at the same time; the grid gets one more axis, the slowest.
    machine : Machine
        What the cuts are priced on.
    each : int
        Stages per place (schedule "interleaved").
    given : mapping, optional
        Stage of some layers.

    Raises
    ------
    PlanError
        There are more stages than layers, or no cut gives the layers the stages that were asked for.
    """
    given, stages, names = given or {}, places * each, [n.name for n in graph.ops]
    pipeline = Pipeline((), {}, schedule, micro_batches)
    if stages == 1:
        return inner.staged(1, pipeline)
    check_given(graph, given, stages, schedule)
    if set(given) == set(names):
        return inner.staged(places, Pipeline((), dict(given), schedule, micro_batches))
    costs, borders = chain(inner, graph, samples, places, machine, dtype, schedule)
    found = cut_chain(costs, borders, stages, [given.get(n) for n in names])
    if found is None:
        raise PlanError(
            "parallel.stage: no cut of the layers' order gives these layers these stages; stages must not decrease in the order of layers, "
            f"and each needs a layer of its own. The order is {', '.join(names)}."
        )
    starts = found[0]
    of = {name: sum(i >= s for s in starts) - 1 for i, name in enumerate(names)}
    return inner.staged(places, Pipeline((), of, schedule, micro_batches))


def check_given(graph: Graph, given: Mapping[str, int], stages: int, schedule: Schedule) -> None:
    """Raise PlanError unless there are layers for so many stages, the given ones exist, and layers may share parameters from there."""
    if stages > len(graph.ops):
        raise PlanError(
            f"parallel.stages: got {stages} stages, but {graph.name} has {len(graph.ops)} layers; every stage needs one at least."
        )
    wrong = [n for n, s in given.items() if s >= stages]
    if wrong:
        raise PlanError(f"parallel.stage.{wrong[0]}: got stage {given[wrong[0]]}, expected 0 to {stages - 1}.")
    check_shared(graph, given, schedule)


def chain(
    inner: Plan,
    graph: Graph,
    samples: int,
    places: int,
    machine: Machine,
    dtype: str = "float32",
    schedule: Schedule = "1f1b",
) -> tuple[list[float], list[float]]:
    """Seconds of every layer on a micro-batch, forward and backward, and of what crosses a border before it, both ways."""
    program = lower(graph, inner, samples, gradients="accumulate")
    spent = price_by_node(price(program, machine, dtype))
    names, shapes = [n.name for n in graph.ops], graph.shapes(samples)
    place = {n: i for i, n in enumerate(names)}
    last = {n: max((place[c.name] for c in graph.consumers(n)), default=i) for n, i in place.items()}
    grid, item = Grid((*inner.grid.sizes, places)), item_bytes(None, dtype, machine.half_arrays)
    link = machine.parts(grid, grid.axes[-1:])
    borders = [0.0] * len(names)
    for name, i in place.items():
        elements = 1
        for e in shapes[name]:
            elements *= e
        seconds = machine.move_seconds("p2p", link, elements * item / inner.grid.size, 1.0)
        for at in range(i + 1, last[name] + 1):
            borders[at] += 2 * seconds  # the value, and its gradient on the way back
    for first, users in graph.shared.items():
        if stays_together(graph, first, schedule):
            borders[place[first] + 1 : place[users[-1].name] + 1] = [inf] * (place[users[-1].name] - place[first])
    return [spent.get(n, 0.0) for n in names], borders


def price_by_node(found: Price) -> dict[str, float]:
    """Seconds of each layer's steps."""
    return found.by(lambda s: s.node)
