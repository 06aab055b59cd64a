"""`strategy: auto`: the cheapest plan of the stated space, within a memory limit.

The search minimises the sum of all steps, exactly, over candidate grids (`lbpar.plan.candidates`). Where the machine hides
communication behind computation, it is run once more with the sums of weight gradients at a discount. Both optima and the
named strategies are lowered and simulated on two queues, and the fastest that fits in memory is taken; of several as fast, the one
with the fewest moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any

import numpy as np

from lbpar.aside import aside
from lbpar.config.parallel import Recompute
from lbpar.cost.machine import Machine
from lbpar.cost.memory import PREFETCH
from lbpar.errors import LayoutError, PlanError
from lbpar.graph.graph import Graph
from lbpar.layout.grid import Axes, Grid
from lbpar.layout.layout import Ints
from lbpar.plan.asked import given_grids
from lbpar.plan.candidates import MOST_AXES, OpGrid, planning_grid
from lbpar.plan.lean import fit_any, too_small
from lbpar.plan.priced import Figures, PricedPlan, Settings
from lbpar.plan.pricing import Pricing
from lbpar.plan.segments import recomputed
from lbpar.plan.strategies import STRATEGIES, strategy_plan
from lbpar.plan.tables import Tables, build_tables
from lbpar.program.plan import Plan
from lbpar.solver.search import Solution, minimise
from lbpar.text import human_bytes

#: Search again under a tighter limit at most so often, until the peak by liveness fits.
TIGHTEN = 4
#: Under a memory limit a plan is taken once it is proven to be within so much of the optimum.
GAP = 1e-3
#: Step times that differ by no more are taken as equal: measured ones differ by more from the prediction, and from each other.
ALIKE = 0.004
#: Grids for all layers whose layers and edges cost no more times the least are compared by the whole step.
NEAR = 1.1
#: Part of the weight gradients' sums that the second search takes as hidden behind computation.
HIDDEN = 0.9


@dataclass
class Choice:
    """What the planner chose, and what it knows about it.

    Parameters
    ----------
    plan : Plan
        The chosen plan.
    priced : PricedPlan
        It, lowered and priced.
    solution : Solution
        The search that found it (or, if a named strategy was taken, would have).
    tables : Tables
        Candidates and costs.
    space : mapping
        The space and the rules in force, in words and numbers.
    others : tuple of Figures
        Named strategies and the best single grid, fastest first; empty if none were compared.
    limit : int or None
        Memory limit in bytes.
    search_seconds : float
        Time that pricing and searching took.
    notes : list of str
        What the user should know.
    """

    plan: Plan
    priced: PricedPlan
    solution: Solution
    tables: Tables
    machine: Machine
    batch: int
    dtype: str
    optimizer: str
    space: dict[str, object]
    others: tuple[Figures, ...] = ()
    limit: int | None = None
    search_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


def choose_plan(
    graph: Graph,
    batch: int,
    procs: int,
    machine: Machine,
    *,
    memory_limit: int | None = None,
    dtype: str = "float32",
    optimizer: str = "momentum",
    prefetch: int = PREFETCH,
    rims: bool = False,
    workspace: int = 0,
    layers: Mapping[str, Mapping[Any, int | Sequence[int]]] | None = None,
    recompute: Recompute | None = None,
    compare: bool = True,
    most_axes: int = MOST_AXES,
    cores: int = 1,
) -> Choice:
    """Choose the grid of every layer.

    Parameters
    ----------
    graph : Graph
        The network, with its loss.
    batch : int
        Global number of samples.
    procs : int
        Number of processes.
    machine : Machine
        What to price with.
    memory_limit : int, optional
        Bytes that one process may use.
    dtype, optimizer : str
        Type of activations; a key of `lbpar.cost.price.SLOTS`.
    prefetch : int
        Batches read ahead.
    rims : bool
        Interiors of convolutions are computed while halos are under way (`lbpar.program.rims`).
    workspace : int
        Most bytes that a product takes beside its operands.
    layers : mapping, optional
        Grids that are given: layer to ways (or axes) per loop.
    recompute : "auto", int or tuple of str, optional
        Activations to compute again in the backward pass: as the limit (by default the machine's memory) asks for, in so many segments, or the
        outputs of these layers. Default: as the limit asks for where nothing fits otherwise.
    compare : bool
        Also price the named strategies and take the fastest of all.
    most_axes : int
        Axes to split the processes into at most; more find finer plans and take longer.
    cores : int
        With more than one, processes forked from this one price half of the moves and, without a memory limit, the named strategies, and
        search a second time.

    Raises
    ------
    PlanError
        Nothing fits in memory (says what the smallest footprint is), or a given grid is impossible.
    """
    started = perf_counter()
    grid = planning_grid(procs, most_axes)
    fixed = given_grids(layers or {}, graph, batch, grid)
    if recompute == "auto" and memory_limit is None:
        memory_limit = machine.memory
    given = recomputed(recompute, graph)
    settings = Settings(graph, batch, machine, dtype, optimizer, prefetch, rims, workspace, given or ())
    fork = cores > 1 and compare and memory_limit is None  # programs that are made to fit stay here

    def named() -> tuple[list[Figures], list[str], list[Figures]]:
        """The named strategies, and in a further process what may be asked for below."""
        return *_named(settings, grid, fixed), [settings.figures("not split", whole)] if fork and not fixed else []

    whole = Plan(grid, {})
    with aside(named, fork) as compared:
        pricing = Pricing(machine, grid, dtype, optimizer, fork=cores > 1)
        tables = build_tables(graph, batch, pricing, {n: {k: a for k, a in g.items() if a} for n, g in fixed.items()})

        def search(hidden: float) -> tuple[Figures, Solution]:
            return _search(settings, tables, grid, memory_limit, hidden, fixed)

        again = compare and machine.file.overlap > 0
        with aside(lambda: search(HIDDEN * machine.file.overlap), fork and again) as second:
            found = [search(0.0)]
            uniform = single_grid(tables, grid) if compare else None
            found += [second()] if again else []
        spent = perf_counter() - started
        others, refused, beside = compared() if compare else ([], [], [])
    settings.compared.extend((*others, *beside, *(o for o, _ in found)))
    if uniform is not None:
        others.append(settings.figures("best single grid", uniform))
    fastest = min((*others, *(o for o, _ in found)), key=lambda o: o.seconds).step
    if compare and not fixed and fastest.communication > fastest.seconds / 3:  # else rule 7 has considered idle axes
        others.append(settings.figures("not split", whole))
    others.sort(key=lambda o: o.seconds)
    fitting = [o for o in (*(o for o, _ in found), *others) if memory_limit is None or o.memory.peak <= memory_limit]
    notes = []
    if memory_limit is not None and given is None and (recompute == "auto" or not fitting):
        lean = fit_any(settings, min((o.seconds for o in fitting), default=inf), memory_limit)
        if lean is not None and not fitting:
            notes.append(
                f"Memory: nothing fits in {human_bytes(memory_limit)} unless activations are computed again (`parallel.recompute`)."
            )
        if lean is not None:
            settings.known.append(lean)
            fitting.append(lean.figures)
    if not fitting:
        raise PlanError(too_small(memory_limit or 0, settings.known))
    solution = min(found, key=lambda f: f[0].seconds)[1]
    best = simplest(fitting)
    space = _space(tables, solution, grid, procs)
    priced = settings.priced(best.name, best.plan)
    choice = Choice(
        best.plan, priced, solution, tables, machine, batch, dtype, optimizer, space, tuple(others), memory_limit, spent
    )
    choice.notes += [*notes, *_notes(choice, procs, grid), *refused]
    return choice


def _named(settings: Settings, grid: Grid, fixed: Mapping[str, OpGrid]) -> tuple[list[Figures], list[str]]:
    """The named strategies, and a line on each that this network cannot run."""
    found, refused, last = [], [], None
    for name in STRATEGIES:
        try:
            plan = strategy_plan(name, settings.graph, grid, settings.batch, fixed)
            if name != "slabs" or plan != last:  # two processes may have the slabs of "spatial"
                found.append(settings.figures(name, plan))
            last = plan
        except (LayoutError, PlanError) as error:
            refused.append(f"Strategy {name}: not compared, because this network cannot run so: {error}")
    return found, refused


def simplest(plans: Sequence[Figures]) -> Figures:
    """Of those that are as fast as the fastest, within what prices can tell apart, the one with the fewest moves."""
    fastest = min(o.seconds for o in plans)
    alike = [o for o in plans if o.seconds <= fastest * (1 + ALIKE)]
    return min(alike, key=lambda o: (o.moves, o.seconds))


def plan_of(tables: Tables, choice: Mapping[str, int], grid: Grid) -> Plan:
    """The plan that gives every group its chosen candidate."""
    ops = {m: tables.nodes[name].grids[choice[name]] for name, members in tables.groups.items() for m in members}
    return Plan(grid, ops)


def _search(
    settings: Settings,
    tables: Tables,
    grid: Grid,
    limit: int | None,
    hidden: float,
    fixed: Mapping[str, OpGrid],
) -> tuple[Figures, Solution]:
    """Optimum of the tables, under the limit if there is one, with the peak checked by liveness; what needs least memory if nothing fits."""
    costs = {n: t.seconds - hidden * t.summed for n, t in tables.nodes.items()}
    held = {n: t.memory for n, t in tables.nodes.items()}
    name = "search, sums of gradients hidden" if hidden else "search"
    solution = minimise(costs, tables.edges, memory=held)
    priced = settings.figures(name, plan_of(tables, solution.choice, grid))
    if limit is None or priced.memory.peak <= limit:
        return priced, solution
    assert solution.memory is not None
    budget = max(0.0, limit - max(0.0, priced.memory.peak - solution.memory))
    leanest = priced
    for _ in range(TIGHTEN):
        try:
            solution = minimise(costs, tables.edges, memory=held, limit=budget, gap=GAP)
        except PlanError:
            break  # nothing keeps so little
        priced = settings.figures(name, plan_of(tables, solution.choice, grid))
        if priced.memory.peak <= limit:
            return priced, solution
        leanest = min(leanest, priced, key=lambda o: o.memory.peak)
        assert solution.memory is not None
        budget = min(budget, solution.memory) - (priced.memory.peak - limit)
    smallest, found = _smallest(settings, tables, grid, fixed)
    return min(leanest, smallest, key=lambda o: o.memory.peak), found


def _smallest(settings: Settings, tables: Tables, grid: Grid, fixed: Mapping[str, OpGrid]) -> tuple[Figures, Solution]:
    """The plan of least memory; among equals the cheapest."""
    scale = sum(float(t.seconds.max()) for t in tables.nodes.values()) or 1.0
    least = min(float(t.memory[t.memory > 0].min(initial=1.0)) for t in tables.nodes.values())
    costs = {n: t.memory + 1e-6 * least * t.seconds / scale for n, t in tables.nodes.items()}
    solution = minimise(costs, {}, memory={n: t.memory for n, t in tables.nodes.items()})
    tried = [settings.figures("least memory", plan_of(tables, solution.choice, grid))]
    # What is kept is least there, but moving between layouts takes room as well: plans that move little may need less.
    tried += _named(settings, grid, fixed)[0]
    uniform = single_grid(tables, grid)
    if uniform is not None:
        tried.append(settings.figures("best single grid", uniform))
    return min(tried, key=lambda o: o.memory.peak), solution


def single_grid(tables: Tables, grid: Grid) -> Plan | None:
    """The best plan in which all layers split alike: one number of axes per loop for the whole network.

    Filters of a layer with weights stand for channels of the others; a layer that cannot take the grid takes the part of it
    that it can.
    """
    seen: dict[tuple[tuple[str, tuple[int, ...]], ...], OpGrid] = {}
    for t in {id(t): t for t in tables.nodes.values()}.values():
        for g in t.grids:
            if not {"C", "G"} & set(g) or "F" not in g:
                uniform = {("K" if loop in ("F", "C", "G") else loop): axes for loop, axes in g.items()}
                if grid.ways(tuple(a for axes in uniform.values() for a in axes)) == grid.size:
                    seen[tuple(sorted(uniform.items()))] = uniform
    alike = [list(_alike(uniform)) for uniform in seen.values()]
    numbers: dict[int, Ints] = {}
    for t in tables.nodes.values():
        if id(t) not in numbers:
            where = {tuple(sorted(g.items())): i for i, g in enumerate(t.grids)}
            numbers[id(t)] = np.array([next((where[g] for g in grids if g in where), -1) for grids in alike])
    possible = np.flatnonzero(np.all([numbers[id(t)] >= 0 for t in tables.nodes.values()], 0))
    if not possible.size:
        return None
    sums = tables.parts({n: numbers[id(t)][possible] for n, t in tables.nodes.items()})
    near = possible[sums <= sums.min() * NEAR]
    plans = [{n: int(numbers[id(t)][i]) for n, t in tables.nodes.items()} for i in near]
    return plan_of(tables, min(plans, key=tables.total), grid)


def _alike(uniform: OpGrid) -> Iterator[tuple[tuple[str, Axes], ...]]:
    """What layers of different kinds make of one grid for all, the closest first."""
    spatial = [loop for loop in ("W", "H", "D") if loop in uniform]
    for dropped in (
        (),
        ("K",),
        *(tuple(spatial[: i + 1]) for i in range(len(spatial))),
        ("K", *spatial),
        ("K", "N", *spatial),
    ):
        for channel in ("F", "C", "G"):
            g = {(channel if k == "K" else k): a for k, a in uniform.items() if k not in dropped}
            yield tuple(sorted(g.items()))


def _space(tables: Tables, solution: Solution, grid: Grid, procs: int) -> dict[str, object]:
    counts = [len(t.seconds) for t in tables.nodes.values()]
    primes = Grid.of(procs).sizes
    return {
        "plans": solution.space_size,
        "nodes": len(counts),
        "candidates_most": max(counts),
        "candidates_mean": float(np.mean(counts)),
        "grid": list(grid.sizes),
        "axes_merged": len(grid.sizes) < len(primes),
        "states": solution.states,
        "width": solution.width,
        "exact": solution.exact,
        "gap": solution.gap,
        "objective": tables.total(solution.choice),
    }


def _notes(choice: Choice, procs: int, grid: Grid) -> Iterator[str]:
    if choice.space["axes_merged"]:
        yield f"Space: {procs} processes are planned as {grid}, in larger axes than their prime factors {Grid.of(procs)}; splits of other sizes were not tried."
    large = max(grid.sizes, default=1)
    if large > 16 and Grid.of(procs).sizes[-1] == large:
        near = sorted(
            (n for n in range(max(2, procs - procs // 8), procs + procs // 8 + 1) if max(Grid.of(n).sizes) <= 5),
            key=lambda n: abs(n - procs),
        )
        hint = f"; {' or '.join(map(str, sorted(near[:2])))} processes could be arranged in many ways" if near else ""
        yield f"Processes: {procs} has the prime factor {large}, which a loop takes whole or not at all{hint}."
    if not choice.solution.exact:
        yield f"Search: bounded, not exact; no plan of this space is more than {100 * choice.solution.gap:.2g} % cheaper."
    used = choice.plan.used
    if used < grid.size:
        yield f"Processes: no layer splits over more than {used} of {grid.size}; the rest repeats the same work. Use {used} process{'es' if used > 1 else ''}."
    peak, device = choice.priced.memory.peak, choice.machine.memory
    if choice.limit is None and peak > device:
        yield f"Memory: the plan needs {human_bytes(peak)} per process, a device of {choice.machine.name} has {human_bytes(device)}; give --memory to plan within it."
