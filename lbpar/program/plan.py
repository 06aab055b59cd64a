"""A plan: the grid, and for each op which grid axes split which of its loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import get_args

from lbpar.config.parallel import Schedule
from lbpar.errors import PlanError
from lbpar.graph.graph import Graph
from lbpar.layout.grid import Axes, Grid
from lbpar.layout.layout import Dim
from lbpar.text import listed, nearest

OpGrid = Mapping[str, Axes]
SCHEDULES: tuple[Schedule, ...] = tuple(s for s in get_args(Schedule) if s != "delayed")
"""Those that change nothing but the order of work."""


@dataclass(frozen=True)
class Pipeline:
    """Which layers run where, and in how many parts a mini-batch goes through them.

    Parameters
    ----------
    axes : Axes
        Grid axes along which the stages lie, major first; no op grid uses them. None: one stage.
    stages : mapping
        Of every op its stage, from 0 on; it does not decrease from an op to its readers. Stage s is at coordinate s modulo the number of
        places along the axes, so that with more stages than places each place has several (schedule "interleaved").
    schedule : {"gpipe", "1f1b", "interleaved", "zero-bubble", "delayed"}
        Order in which micro-batches go through the stages (`lbpar.program.schedule`); ``delayed``: whole mini-batches do, of which several
        are under way, and each stage is updated behind its backward pass.
    micro_batches : int
        Parts of a mini-batch, the first ones larger by one sample where it does not divide; never more than samples.
    """

    axes: Axes = ()
    stages: Mapping[str, int] = field(default_factory=dict)
    schedule: Schedule = "1f1b"
    micro_batches: int = 1

    @property
    def count(self) -> int:
        """Number of stages."""
        return 1 + max(self.stages.values(), default=0)

    @property
    def delayed(self) -> bool:
        """Whether stages are updated with gradients of weights that are older than the newest."""
        return self.schedule == "delayed" and self.count > 1

    def check(self, graph: Graph, grid: Grid) -> None:
        """Raise PlanError unless the stages fit the network and the grid."""
        wrong = sorted(set(self.axes) - set(grid.axes))
        if wrong:
            raise PlanError(
                f"pipeline: grid axis {wrong[0]} does not exist; the grid {grid} has {len(grid.sizes)} axes."
            )
        if len(set(self.axes)) < len(self.axes):
            raise PlanError(f"pipeline: got axes {list(self.axes)}; name each axis once.")
        places, names = grid.ways(self.axes), [n.name for n in graph.ops]
        if self.schedule not in get_args(Schedule):
            raise PlanError(
                f"pipeline: got schedule {self.schedule!r}, expected one of {', '.join(get_args(Schedule))}."
            )
        if self.micro_batches < 1:
            raise PlanError(f"pipeline: got {self.micro_batches} micro-batches, expected at least 1.")
        if self.micro_batches > 1 and self.schedule == "delayed":
            raise PlanError(
                f"pipeline: got {self.micro_batches} micro-batches with schedule delayed, in which whole batches follow each other; expected 1."
            )
        if places == 1 and not self.stages:
            return
        missing = [n for n in names if n not in self.stages]
        if missing:
            raise PlanError(f"pipeline: layer {missing[0]} has no stage; give every layer one.")
        for node in graph.ops:
            for x in node.inputs:
                if x in self.stages and self.stages[x] > self.stages[node.name]:
                    raise PlanError(
                        f"pipeline: {node.name} is in stage {self.stages[node.name]}, but reads {x} of stage {self.stages[x]}; stages must "
                        "not go backwards along an edge."
                    )
        check_shared(graph, self.stages, self.schedule)
        if graph.loss is None:
            return  # a part of a network, of which stages may have nothing
        strange = [n for n in self.stages if n not in names]
        if strange:
            raise PlanError(f"pipeline: {strange[0]!r} is not a layer of {graph.name}; remove it or rename it.")
        if self.count > len(names):
            raise PlanError(
                f"pipeline: got {self.count} stages, but {graph.name} has {len(names)} layers; give every stage one at least."
            )
        empty = sorted(set(range(self.count)) - set(self.stages.values()))
        if empty:
            raise PlanError(
                f"pipeline: no layer is in stage {empty[0]}, but there is stage {self.count - 1}; number stages without gaps, from 0 on."
            )
        if self.count < places:
            raise PlanError(
                f"pipeline: the layers are in {self.count} stages, but the grid has places for {places}; give every place a stage."
            )
        if self.count > places and self.schedule != "interleaved":
            raise PlanError(
                f"pipeline: the layers are in {self.count} stages, but the grid has places for {places}; only schedule interleaved "
                "puts several stages at one place."
            )


def stays_together(graph: Graph, layer: str, schedule: Schedule) -> bool:
    """Whether all layers that have the parameters of one must be in one stage: gradients that are delayed would be of different weights, and
    running statistics of micro-batches would come in another order."""
    statistics = any(p.kind == "statistic" for n, p in graph.params().items() if n.rpartition(".")[0] == layer)
    return layer in graph.shared and (schedule == "delayed" or statistics)


def check_shared(graph: Graph, stages: Mapping[str, int], schedule: Schedule) -> None:
    """Raise PlanError if layers, whose stages are known, may not share parameters from there."""
    for first, users in graph.shared.items():
        for one, other in ((a, b) for a in users for b in users if a.name in stages and b.name in stages):
            here, there = stages[one.name], stages[other.name]
            has = f"pipeline: {other.name} is in stage {there}, but shares parameters with {one.name} of stage {here}"
            if one.name == first and there < here:
                raise PlanError(f"{has}, which has them; put it into stage {here} or a later one.")
            if there > here and stays_together(graph, first, schedule):
                why = "with delayed gradients" if schedule == "delayed" else "with their running statistics"
                raise PlanError(
                    f"{has}, which {why} must be in one; put both into one stage, or let them share nothing."
                )


@dataclass(frozen=True)
class Plan:
    """Op grids by node name; a node that is not listed runs replicated on every rank.

    Parameters
    ----------
    grid : Grid
        The processes.
    ops : mapping
        ``{node: {loop: axes}}``; axes are major first. Axes that an op does not use are idle: the replicas
        compute the same thing.
    pipeline : Pipeline, optional
        Stages and micro-batches; by default neither.
    recompute : tuple of str
        Layers whose outputs are dropped after the forward pass, and computed again where the backward pass needs them.
    """

    grid: Grid
    ops: Mapping[str, OpGrid] = field(default_factory=dict)
    pipeline: Pipeline | None = None
    recompute: tuple[str, ...] = ()

    def __getitem__(self, node: str) -> OpGrid:
        return self.ops.get(node, {})

    def ways(self, node: str) -> dict[str, int]:
        """Number of parts of each split loop of a node."""
        return {loop: self.grid.ways(axes) for loop, axes in self[node].items() if axes}

    @property
    def places(self) -> tuple[int, ...]:
        """A rank of each place of stages, in order; rank 0 where there are none."""
        axes = self.pipeline.axes if self.pipeline is not None else ()
        steps = [range(0, self.grid.sizes[a] * self.grid.strides[a], self.grid.strides[a]) for a in axes]
        return tuple(sum(at) for at in product(*steps))

    @property
    def micro_batches(self) -> int:
        """Parts of a mini-batch."""
        return 1 if self.pipeline is None else self.pipeline.micro_batches

    @property
    def delayed(self) -> bool:
        """Whether stages are updated with gradients of older weights (`Pipeline.delayed`)."""
        return self.pipeline is not None and self.pipeline.delayed

    @property
    def update_axes(self) -> Axes:
        """Axes along which ranks update at the same time: all, but with delayed gradients only those of a stage."""
        stages = self.pipeline.axes if self.pipeline is not None and self.pipeline.delayed else ()
        return tuple(a for a in self.grid.axes if a not in stages)

    @property
    def used(self) -> int:
        """Processes over which the layer is split that is split most, in all stages; with more, each works as one of these does."""
        ways = (self.grid.ways(tuple(a for axes in op.values() for a in axes)) for op in self.ops.values())
        return max(ways, default=1) * (self.grid.ways(self.pipeline.axes) if self.pipeline is not None else 1)

    def age(self, rank: int) -> int:
        """Updates that the weights of a rank's stage have seen since those that a gradient is of, when it is applied."""
        if self.pipeline is None or not self.pipeline.delayed:
            return 0
        place, coords = 0, self.grid.coords(rank)
        for a in self.pipeline.axes:
            place = place * self.grid.sizes[a] + coords[a]
        return self.pipeline.count - 1 - place

    def staged(self, places: int, pipeline: Pipeline) -> Plan:
        """The same grids inside each of so many places, which are along one more axis, the slowest."""
        grid = Grid((*self.grid.sizes, places)) if places > 1 else self.grid
        return replace(self, grid=grid, pipeline=replace(pipeline, axes=grid.axes[len(self.grid.sizes) :]))

    def at(self, node: str) -> Dim | None:
        """Where a node runs (`Layout.at`); None: everywhere."""
        p = self.pipeline
        return Dim.only(p.axes, p.stages[node] % self.grid.ways(p.axes)) if p is not None and p.axes else None

    def check(self, graph: Graph, batch: int) -> None:
        """Raise PlanError unless every op can take its grid."""
        if self.pipeline is not None:
            self.pipeline.check(graph, self.grid)
        layers = [n.name for n in graph.ops if n is not graph.loss]
        for name in self.recompute:
            if name not in layers:
                raise PlanError(
                    f"recompute: {name!r} is not a layer of {graph.name} whose output could be computed again; {nearest(name, layers)}its "
                    f"layers are {listed(layers)}."
                )
        stage_axes = set(self.pipeline.axes) if self.pipeline is not None else set()
        for name, op_grid in self.ops.items():
            if name not in graph:
                raise PlanError(f"plan: {name!r} is not a layer of {graph.name}; remove it or rename it.")
            loops = graph[name].op.loops(graph.input_shapes(name, batch))
            used: set[int] = set()
            for loop, axes in op_grid.items():
                if loop not in loops:
                    raise PlanError(
                        f"{name}: a {graph[name].op.kind} has no loop {loop!r}; its loops are {', '.join(loops)}."
                    )
                for a in axes:
                    if a not in self.grid.axes:
                        raise PlanError(
                            f"{name}: grid axis {a} does not exist; the grid {self.grid} has axes 0 to {len(self.grid.sizes) - 1}."
                        )
                    if a in stage_axes:
                        raise PlanError(f"{name}: grid axis {a} has the stages; a loop cannot be split along it.")
                    if a in used:
                        raise PlanError(f"{name}: grid axis {a} is given to two loops; give each axis to one loop.")
                    used.add(a)
