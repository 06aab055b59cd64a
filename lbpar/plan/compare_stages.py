"""Numbers of stages and schedules beside the best plan without stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lbpar.cost.memory import memory_of_stages
from lbpar.errors import PlanError
from lbpar.plan.choose import PricedPlan, Settings, choose_plan
from lbpar.plan.resolve import MICRO_BATCHES
from lbpar.plan.stages import stage_plan
from lbpar.program.plan import SCHEDULES, Schedule
from lbpar.program.steps import Start

#: Stages at each place, where schedules have several.
EACH = 2


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
    """

    places: int
    schedule: Schedule | None
    micro_batches: int
    priced: PricedPlan
    border_bytes: int
    memory: tuple[int, ...]

    def as_dict(self, batch: int) -> dict[str, Any]:
        """Plain numbers for reports."""
        step = self.priced.step
        return {
            "stages": self.places,
            "schedule": self.schedule,
            "micro_batches": self.micro_batches,
            "seconds": step.seconds,
            "samples_per_second": batch / step.seconds,
            "bubble": step.bubble if self.places > 1 else 0.0,
            "border_bytes": self.border_bytes,
            "memory_bytes": list(self.memory),
        }


def measured(priced: PricedPlan, settings: Settings) -> Staged:
    """A priced plan as a row."""
    p, program = priced.plan.pipeline, priced.program
    border = 0
    for step, cost in zip(program.steps, priced.price.steps, strict=True):
        if isinstance(step, Start) and step.move.src.at != step.move.dst.at:
            border += cost.bytes
    options = settings.prefetch, settings.machine.half_arrays, settings.workspace
    held = memory_of_stages(program, settings.dtype, settings.optimizer, *options)
    places = len(priced.plan.places)
    schedule = p.schedule if p is not None and places > 1 else None
    return Staged(places, schedule, priced.plan.micro_batches, priced, border, tuple(m.peak for m in held))


def compare_stages(
    settings: Settings, procs: int, counts: Sequence[int], micro_batches: int | None = None, most_axes: int = 3
) -> list[Staged]:
    """Price so many stages with every schedule, the fastest first.

    The grids inside the stages are the best for a stage's processes and a micro-batch, the cuts the best for these grids.

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

    Raises
    ------
    PlanError
        A number of stages does not divide the processes, or there are more micro-batches than samples.
    """
    out = []
    if micro_batches is not None and micro_batches > settings.batch:
        raise PlanError(
            f"--micro-batches: got {micro_batches} parts of {settings.batch} samples, expected at most {settings.batch}."
        )
    graph, machine = settings.graph, settings.machine
    for places in counts:
        if procs % places:
            raise PlanError(f"--stages: got {places}, which does not divide {procs} processes.")
        micros = min(settings.batch, micro_batches or MICRO_BATCHES * places)
        samples = -(-settings.batch // micros)
        inner = choose_plan(
            graph,
            samples,
            procs // places,
            machine,
            dtype=settings.dtype,
            optimizer=settings.optimizer,
            prefetch=settings.prefetch,
            rims=settings.rims,
            workspace=settings.workspace,
            compare=False,
            most_axes=most_axes,
        ).plan
        for schedule in SCHEDULES:
            each = EACH if schedule == "interleaved" else 1
            if each * places > len(graph.ops) or (each > 1 and micros % places):
                continue
            plan = stage_plan(
                inner,
                graph,
                samples,
                places,
                machine,
                schedule=schedule,
                micro_batches=micros,
                each=each,
                dtype=settings.dtype,
            )
            priced = replace(settings, known=[]).priced(f"{places} stages, {schedule}", plan)
            out.append(measured(priced, settings))
    return sorted(out, key=lambda s: s.priced.seconds)
