"""Numbers of stages and schedules beside the best plan without stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lbpar.errors import PlanError
from lbpar.graph.graph import Graph
from lbpar.plan.asked import MICRO_BATCHES
from lbpar.plan.candidates import MOST_AXES, planning_grid
from lbpar.plan.choose import choose_plan
from lbpar.plan.priced import PricedPlan, Settings
from lbpar.plan.stage_search import StagePlan, StageSearch, fixed_grids, weights
from lbpar.plan.tables import group_nodes
from lbpar.program.plan import SCHEDULES, Schedule
from lbpar.program.steps import Start
from lbpar.text import count, plan_count

#: Stages at each place, where schedules have several.
EACH = 2

Layers = Mapping[str, Mapping[Any, int | Sequence[int]]]


@dataclass(frozen=True)
class Staged:
    """A plan with stages, priced.

    Parameters
    ----------
    places : int
        Stages that work at the same time.
    schedule : str
        Empty without stages.
    micro_batches : int
    priced : PricedPlan
    border_bytes : int
        Bytes that cross borders in a step, those of the busiest process of each move.
    memory : tuple of int
        Peak bytes of a process at each place.
    fits : bool
        Within the limit of memory, if there is one.
    plans : int, optional
        In the space of the search for this number of stages.
    gap : float
        By how much it may have missed its optimum.
    """

    places: int
    schedule: Schedule | None
    micro_batches: int
    priced: PricedPlan
    border_bytes: int
    memory: tuple[int, ...]
    fits: bool = True
    plans: int | None = None
    gap: float = 0.0

    @property
    def formula(self) -> float:
        """The idle part of the step that the schedule's formula gives, where all stages take as long: see docs/strategies/stages.md."""
        if self.schedule is None:
            return 0.0
        pipeline = self.priced.plan.pipeline
        assert pipeline is not None
        each = (max(pipeline.stages.values()) + 1) // self.places
        beside = weights(self.schedule, self.micro_batches, each)[1] * (self.places - 1) / self.micro_batches
        return beside / (1 + beside)

    def as_dict(self, batch: int) -> dict[str, Any]:
        """Plain numbers for reports."""
        step = self.priced.step
        return {
            "plan": self.priced.name,
            "stages": self.places,
            "schedule": self.schedule,
            "micro_batches": self.micro_batches,
            "seconds": step.seconds,
            "samples_per_second": batch / step.seconds,
            "bubble": step.bubble if self.places > 1 else 0.0,
            "bubble_of_formula": self.formula,
            "border_bytes": self.border_bytes,
            "memory_bytes": list(self.memory),
            "fits": self.fits,
            "plans": plan_count(self.plans) if self.plans else None,
            "gap": self.gap,
        }


def measured(priced: PricedPlan, limit: int | None = None, found: StagePlan | None = None) -> Staged:
    """A priced plan as a row."""
    p, program = priced.plan.pipeline, priced.program
    border = 0
    for step, cost in zip(program.steps, priced.price.steps, strict=True):
        if isinstance(step, Start) and step.move.src.at != step.move.dst.at:
            border += cost.bytes
    places = len(priced.plan.places)
    schedule = p.schedule if p is not None and places > 1 else None
    peaks = tuple(m.peak for m in priced.places)
    fits = limit is None or max(peaks) <= limit
    known = () if found is None else (found.plans, found.solution.gap)
    return Staged(places, schedule, priced.plan.micro_batches, priced, border, peaks, fits, *known)


def best_without(
    settings: Settings, procs: int, limit: int | None = None, most_axes: int = MOST_AXES, **options: Any
) -> Staged:
    """The best plan without stages; one that does not fit in memory where none does. ``options``: of `choose_plan`."""
    s = settings
    options |= {"dtype": s.dtype, "optimizer": s.optimizer, "prefetch": s.prefetch, "rims": s.rims}
    options |= {"workspace": s.workspace, "most_axes": most_axes, "compare": False}

    def chosen(limit: int | None) -> PricedPlan:
        found = choose_plan(s.graph, s.batch, procs, s.machine, memory_limit=limit, **options).priced
        return replace(found, name="auto")

    try:
        return measured(chosen(limit), limit)
    except PlanError:
        if limit is None:
            raise
        return measured(chosen(None), limit)


def refused(graph: Graph, procs: int, places: int) -> str:
    """Why training would refuse so many stages; empty if it would not."""
    if procs % places:
        return f"the number does not divide {count(procs, 'process')}."
    if places > len(graph.ops):
        return f"{graph.name} has {count(len(graph.ops), 'layer')}, and every stage needs one at least."
    return ""


def check_counts(graph: Graph, batch: int, procs: int, counts: Iterable[int], micro_batches: int | None) -> None:
    """Raise PlanError for what training would refuse, before anything is planned."""
    if micro_batches is not None and micro_batches > batch:
        raise PlanError(f"--micro-batches: got {micro_batches} parts of {batch} samples, expected at most {batch}.")
    for places in counts:
        if why := refused(graph, procs, places):
            raise PlanError(f"--stages: got {places}; {why}")


def unpriced(
    graph: Graph,
    batch: int,
    procs: int,
    places: int,
    micro_batches: int | None = None,
    most_axes: int = MOST_AXES,
    layers: Layers | None = None,
) -> Iterator[tuple[Schedule | None, str]]:
    """What `compare_stages` leaves out for a number of stages, and why: a schedule, or None for all of them."""
    groups = len(group_nodes(graph, fixed_grids(layers or {}, graph, planning_grid(procs // places, most_axes))))
    has = f"{graph.name} has {count(groups, 'group')} of layers that share a grid, and the planner cuts only between these"
    if places > groups:
        yield (
            None,
            f"{has}. Training takes up to {len(graph.ops)} stages: `lbpar plan` prices {places} with `parallel.stages: {places}` in the run file.",
        )
        return
    micros = micros_of(batch, places, micro_batches)
    if EACH * places > groups:
        yield "interleaved", f"it has {EACH * places} stages, {EACH} at each place; {has}."
    elif micros % places:
        yield "interleaved", f"it needs a multiple of {places} micro-batches, got {micros}."


def micros_of(batch: int, places: int, micro_batches: int | None) -> int:
    """Parts of a batch."""
    return min(batch, micro_batches or MICRO_BATCHES * places)


def compare_stages(
    settings: Settings,
    procs: int,
    counts: Sequence[int],
    micro_batches: int | None = None,
    most_axes: int = MOST_AXES,
    limit: int | None = None,
    delayed: bool = False,
    layers: Layers | None = None,
) -> list[Staged]:
    """Price so many stages with every schedule, the fastest first, behind them those that do not fit in memory, and last those that ``delayed`` asks
    for as well: with delayed gradients, which change the arithmetic. What `unpriced` names is left out.

    Cuts and the grids of layers are chosen together (`lbpar.plan.stage_search`).

    Parameters
    ----------
    settings : Settings
        Of the whole batch.
    counts : sequence of int
        Numbers of stages; each divides the processes.
    micro_batches : int, optional
        Default: 4 per stage, or as many as there are samples.
    most_axes : int
        As for `choose_plan`.
    limit : int, optional
        Bytes that one process may use.
    layers : mapping, optional
        Given grids of single layers, inside their stage.

    Raises
    ------
    PlanError
        A number of stages does not divide the processes or is larger than that of layers, there are more micro-batches than samples, or a given
        grid is impossible.
    """
    out = []
    graph, batch = settings.graph, settings.batch
    check_counts(graph, batch, procs, counts, micro_batches)
    for places in counts:
        left_out = {s for s, _ in unpriced(graph, batch, procs, places, micro_batches, most_axes, layers)}
        if None in left_out:
            continue
        micros = micros_of(batch, places, micro_batches)
        fixed = fixed_grids(layers or {}, settings.graph, planning_grid(procs // places, most_axes))
        search = StageSearch(settings, procs, places, micros, fixed, most_axes)
        for schedule in SCHEDULES:
            if schedule not in left_out:
                out.append(_searched(search, schedule, EACH if schedule == "interleaved" else 1, limit))
        if delayed:  # of whole batches
            whole = StageSearch(settings, procs, places, 1, fixed, most_axes)
            out.append(_searched(whole, "delayed", 1, limit))
    return fastest_first(out)


def _searched(search: StageSearch, schedule: Schedule, each: int, limit: int | None) -> Staged:
    try:
        found = search.plan(schedule, each, limit=limit)
    except PlanError:  # beside what fits stands what does not
        found = search.plan(schedule, each)
    return measured(found.priced, limit, found)


def fastest_first(rows: Iterable[Staged]) -> list[Staged]:
    """In order of step time, those that do not fit in memory behind the others, and those that change the arithmetic last."""
    return sorted(rows, key=lambda r: (r.schedule == "delayed", not r.fits, r.priced.seconds))
