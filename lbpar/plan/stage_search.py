"""Stages for ``strategy: auto``: cuts and the grid of every layer, chosen together.

A stage's *period* is what it spends on one micro-batch: its kernels and moves, forward and backward, what it reads from earlier stages and returns
to them, and its part of what is done once a step. With K places, m micro-batches and v stages at each place the search minimises

    (m·v − f) · the longest period  +  f · the sum of all periods

with f = 1 (GPipe, 1F1B), 1/3 (ZB-H1), 1/v (interleaved) or 0 (delayed gradients): the steady state at the pace of the slowest stage, and filling and draining. Stages lie
along the slowest links and have as many processes each, because they lie along an axis of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np

from lbpar.config.parallel import ParallelConfig
from lbpar.errors import PlanError
from lbpar.graph.graph import Graph
from lbpar.layout.grid import Axes, Grid
from lbpar.layout.layout import Dim
from lbpar.layout.many import Layouts
from lbpar.plan.asked import check_layer, micro_batches, stages_each
from lbpar.plan.assign import assign
from lbpar.plan.candidates import MOST_AXES, planning_grid
from lbpar.plan.choose import GAP, TIGHTEN
from lbpar.plan.lean import fitted
from lbpar.plan.priced import PricedPlan, Settings
from lbpar.plan.pricing import NodeTable, Pricing
from lbpar.plan.segments import recomputed
from lbpar.plan.stages import check_given
from lbpar.plan.tables import Tables, build_tables, group_nodes, joined, shared_costs, shares, turned
from lbpar.program.plan import Pipeline, Plan, Schedule, stays_together
from lbpar.program.schedule import in_flight
from lbpar.solver.chain import cut_chain
from lbpar.solver.search import EdgeTable
from lbpar.solver.stretches import Ordered, Read, Stretches, cut_and_choose

#: Spaces of no more plans are searched for the optimum, others for a plan within `GAP` of it.
SMALL = 10**9


def weights(schedule: Schedule, micro_batches: int, each: int = 1) -> tuple[float, float]:
    """What the longest period and the sum of all count in a step."""
    fill = {"zero-bubble": 1 / 3, "interleaved": 1 / each, "delayed": 0.0}.get(schedule, 1.0)
    return micro_batches * each - fill, fill


@dataclass(frozen=True)
class StagePlan:
    """A plan with stages, priced, and what the search says of it: its solution, the space, and the seconds that it took."""

    priced: PricedPlan
    solution: Stretches
    space: dict[str, object]
    search_seconds: float

    @property
    def plans(self) -> int:
        """Plans in the space."""
        plans = self.space["plans"]
        assert isinstance(plans, int)
        return plans

    @property
    def periods(self) -> tuple[float, ...]:
        """Seconds that each stage spends on a micro-batch."""
        return tuple(self.solution.costs)

    @property
    def objective(self) -> float:
        """Seconds of a step as the search sees them."""
        return self.solution.total


@dataclass
class StageSearch:
    """The search for one number of places; schedules share its tables.

    Parameters
    ----------
    settings : Settings
        Of the whole batch.
    procs, places, micro_batches : int
    fixed : mapping
        Grids of single layers that are given.
    most_axes : int
        As for `choose_plan`.
    """

    settings: Settings
    procs: int
    places: int
    micro_batches: int
    fixed: Mapping[str, dict[str, Axes]] = field(default_factory=dict)
    most_axes: int = MOST_AXES
    _searched: dict = field(default_factory=dict)
    _found: dict = field(default_factory=dict)

    @cached_property
    def grid(self) -> Grid:
        """Axes of a stage, then that of the stages."""
        return Grid((*planning_grid(self.procs // self.places, self.most_axes).sizes, self.places))

    @cached_property
    def tables(self) -> Tables:
        """Candidates and costs of layers, per micro-batch."""
        s, axis = self.settings, len(self.grid.sizes) - 1
        pricing = Pricing(s.machine, self.grid, s.dtype, s.optimizer, axis, self.micro_batches)
        return build_tables(s.graph, -(-s.batch // self.micro_batches), pricing, self.fixed)

    @cached_property
    def network(self) -> Ordered:
        """What is cut."""
        return self._network(False)

    @cached_property
    def delayed(self) -> Ordered:
        """The same for delayed gradients, with which stages do not share parameters."""
        return self._network(True) if self.settings.graph.shared else self.network

    def _network(self, delayed: bool) -> Ordered:
        t = self.tables
        return Ordered(
            {n: table.seconds for n, table in t.nodes.items()},
            t.edges,
            readers(self.settings, t, delayed),
            {n: table.weights for n, table in t.nodes.items()},
            {n: table.memory - table.weights for n, table in t.nodes.items()},
        )

    def plan(
        self, schedule: Schedule, each: int = 1, given: Mapping[str, int] | None = None, limit: int | None = None
    ) -> StagePlan:
        """The best plan with stages for a schedule.

        Parameters
        ----------
        each : int
            Stages at each place (schedule "interleaved").
        given : mapping, optional
            Stage of some layers.
        limit : int, optional
            Bytes that one process may use.

        Raises
        ------
        PlanError
            There are more stages than groups of layers, no cut gives the layers their stages, or nothing fits in memory.
        """
        stages, groups = self.places * each, self.tables.groups
        if stages > len(groups):
            raise PlanError(
                f"parallel.stages: got {stages} stages, but {self.settings.graph.name} has {len(groups)} groups of layers that share a grid."
            )
        leader = {m: g for g, members in groups.items() for m in members}
        pinned = {leader[n]: s for n, s in (given or {}).items()}
        kept = [in_flight(schedule, stages, self.places, s % self.places) or self.micro_batches for s in range(stages)]
        most = max(kept) if schedule == "delayed" else self.micro_batches
        flight = [min(most, -(-k // each)) for k in kept]

        def search(limits: Sequence[float] | None) -> StagePlan:
            started = perf_counter()
            network = self.delayed if schedule == "delayed" else self.network
            searched = self._searched.setdefault(id(network), {})
            known = {"known": searched} if limits is None else {"limits": limits, "flight": flight}
            period, fill = weights(schedule, self.micro_batches, each)
            key = (schedule == "delayed", stages, period, fill, tuple(pinned.items()))
            found = None if limits else self._found.get(key)
            if found is None:  # GPipe and 1F1B ask for the same
                gap = 0.0 if network.space(stages) <= SMALL else GAP
                found = cut_and_choose(network, stages, period, fill, pinned=pinned, gap=gap, **known)  # type: ignore[arg-type]
            if not limits:
                self._found[key] = found
            spent = perf_counter() - started
            priced = replace(self.settings, known=[]).priced(
                f"{self.places} stages, {schedule}", self.lay_out(found, schedule)
            )
            return StagePlan(priced, found, self.space(found, stages), spent)

        whole = found = search(None)
        if limit is None:
            return found
        limits: list[float] = []
        for _ in range(TIGHTEN):
            peaks = np.tile([m.peak for m in found.priced.places], each)
            if peaks.max() <= limit:
                return found
            held = np.array(self.held(found.solution, flight))
            share = held / np.tile(held.reshape(each, self.places).sum(0), each)  # stages of one place share its room
            room = np.maximum(0, limit * share - (peaks * share - held))  # less what the search does not see
            limits = [min(r, old) if p > limit else old for r, old, p in zip(room, limits or room, peaks, strict=True)]
            try:
                found = search(limits)
            except PlanError:
                break
        if found.priced.memory.peak > limit:  # no choice of grids and cuts fits: compute activations again
            found = replace(whole, priced=fitted(self.settings, whole.priced.name, whole.priced.plan, limit))
        return found

    def space(self, found: Stretches, stages: int) -> dict[str, object]:
        """The stated space in numbers, and what was proven."""
        plans, counts = self.network.space(stages), [c.size for c in self.network.costs.values()]
        return {
            "plans": plans,
            "nodes": len(counts),
            "candidates_most": max(counts),
            "candidates_mean": float(np.mean(counts)),
            "exact": found.gap == 0,
            "gap": found.gap,
            "objective": found.total,
            "stretches": found.searched,
        }

    def held(self, found: Stretches, flight: Sequence[int]) -> list[float]:
        """What the layers of each stage keep: weights and their companions, and the activations of the micro-batches in flight."""
        names, ends = list(self.network.costs), [*found.starts[1:], len(self.network.costs)]
        out = []
        for i, j, q in zip(found.starts, ends, flight, strict=True):
            kept = ((self.network.fixed[n][found.choice[n]], self.network.each[n][found.choice[n]]) for n in names[i:j])
            out.append(float(sum(w + q * a for w, a in kept)))
        return out

    def lay_out(self, found: Stretches, schedule: Schedule) -> Plan:
        """The plan of a solution."""
        ops, stages = {}, {}
        for i, (name, members) in enumerate(self.tables.groups.items()):
            for m in members:
                ops[m] = self.tables.nodes[name].grids[found.choice[name]]
                stages[m] = sum(i >= s for s in found.starts) - 1
        axes = self.grid.axes[-1:] if self.places > 1 else ()
        return Plan(self.grid, ops, Pipeline(axes, stages, schedule, self.micro_batches))


def best_stages(
    settings: Settings, parallel: ParallelConfig, procs: int, most_axes: int = MOST_AXES
) -> StagePlan | None:
    """The best plan with the stages that a run file asks for; None where they part layers that share a grid.

    Raises
    ------
    PlanError
        A given grid is impossible, a layer's stage does not exist, or nothing fits in memory.
    """
    graph, places, each = settings.graph, parallel.stages, stages_each(parallel)
    for name in parallel.stage:
        check_layer(name, graph, "parallel.stage")
    check_given(graph, parallel.stage, places * each, parallel.schedule)
    limit = settings.machine.memory if parallel.memory is None and parallel.recompute == "auto" else parallel.memory
    settings = replace(settings, recompute=recomputed(parallel.recompute, graph) or ())
    fixed = fixed_grids(parallel.layers, graph, planning_grid(procs // places, most_axes))
    micros = min(settings.batch, micro_batches(parallel))
    search = StageSearch(settings, procs, places, micros, fixed, most_axes)
    groups = group_nodes(graph, fixed)
    given = [{parallel.stage[m] for m in members if m in parallel.stage} for members in groups.values()]
    pins = [next(iter(g), None) for g in given]
    if any(len(g) > 1 for g in given) or cut_chain([0.0] * len(pins), [0.0] * len(pins), places * each, pins) is None:
        return None
    return search.plan(parallel.schedule, each, parallel.stage, limit)


def fixed_grids(
    layers: Mapping[str, Mapping[Any, int | Sequence[int]]], graph: Graph, inside: Grid
) -> dict[str, dict[str, Axes]]:
    """The grids that a run file gives to single layers, on the axes of a stage."""
    for name in layers:
        check_layer(name, graph)
    fixed = {n: assign(f"parallel.layers.{n}", ways, inside) for n, ways in layers.items()}
    return {n: {k: a for k, a in g.items() if a} for n, g in fixed.items()}


def readers(settings: Settings, tables: Tables, delayed: bool = False) -> dict[str, list[list[Read]]]:
    """Of every group the readers of each of its values, and what a value costs a reader in a later stage.

    The first reader in a stage pays for the way across the border, there and back; others move what has arrived, without fusing anything with what
    is elsewhere. Parameters that groups share are read from the first; where stages may not share them, it takes for ever.
    """
    graph, groups, pricing = settings.graph, tables.groups, tables.pricing
    leader = {m: g for g, members in groups.items() for m in members}
    order = {g: i for i, g in enumerate(groups)}
    read = []
    for x, a in leader.items():
        found = {
            leader[r.name]: i
            for r in graph.consumers(x)
            for i, y in enumerate(dict.fromkeys(graph[leader[r.name]].inputs))
            if y == x
        }
        read.append((a, sorted(((b, i) for b, i in found.items() if b != a), key=lambda r: order[r[0]])))
    assert pricing.stages is not None
    here, there = (pricing.moves.cuts.number(Dim.only((pricing.stages,), k)) for k in (0, 1))

    def at(layouts: Layouts, place: int) -> Layouts:
        known = pricing.memo.setdefault(
            ("at", place, layouts), replace(layouts, at=np.full_like(layouts.partial, place))
        )
        return known

    def moved(u: NodeTable, v: NodeTable, i: int, first: bool) -> list[tuple[Layouts, Layouts, bool]]:
        """How a value goes to a reader, and, turned, how its gradient comes back."""
        whole = u.y.complete
        forward = [(whole if k or not first else u.y, x, False) for k, x in enumerate(v.xs[i])]
        backward = [(dx, whole, True) for dx in v.dxs[i]]
        for way, ends in ((forward, (here, there)), (backward, (there, here))):
            if first and way:
                way[0] = (at(way[0][0], ends[0]), at(way[0][1], ends[1]), way[0][2])
        return [*forward, *backward]

    asked: dict[tuple[int, int, int, bool], list[tuple[Layouts, Layouts, bool]]] = {}
    for a, rs in read:
        for k, (b, i) in enumerate(rs):
            u, v = tables.nodes[a], tables.nodes[b]
            for first in (True, False)[: 1 + (k > 0)]:
                asked.setdefault((id(u), id(v), i, first), moved(u, v, i, first))
    pairs = list(dict.fromkeys((src.classes[0], dst.classes[0]) for way in asked.values() for src, dst, _ in way))
    seconds = dict(zip(pairs, pricing.tables(pairs), strict=True))
    made: dict[tuple[int, int, int, bool], EdgeTable] = {}
    sizes = {id(t): len(t.grids) for t in tables.nodes.values()}
    for key, way in asked.items():
        parts = []
        for src, dst, back in way:
            (rows, row), (columns, column) = src.classes, dst.classes
            table = EdgeTable(seconds[rows, columns], row, column)
            parts.append(turned(table) if back else table)
        none = EdgeTable(np.zeros((1, 1)), *(np.zeros(sizes[t], int) for t in key[:2]))
        made[key] = joined(parts) if parts else none
    out: dict[str, list[list[Read]]] = {}
    for a, rs in read:
        if rs:
            pairs_of = [(b, (id(tables.nodes[a]), id(tables.nodes[b]), i)) for b, i in rs]
            value = [Read(b, made[*key, True], made[*key, k == 0]) for k, (b, key) in enumerate(pairs_of)]
            out.setdefault(a, []).append(value)
    for (a, b), uses in shares(graph, groups).items():
        u, v = tables.nodes[a], tables.nodes[b]
        one, other = sorted((a, b), key=order.__getitem__)
        if one != a or any(stays_together(graph, groups[a][p], "delayed" if delayed else "1f1b") for p, _ in uses):
            ends = [np.zeros(len(tables.nodes[g].grids), int) for g in (one, other)]
            never = EdgeTable(np.full((1, 1), np.inf), ends[0], ends[1])
            out.setdefault(one, []).append([Read(other, never, never)])
            continue
        for p, q in uses:
            across = shared_costs(pricing, u, p, v, q, (here, there))
            out.setdefault(a, []).append([Read(b, across, across)])
    return out
