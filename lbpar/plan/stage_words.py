"""Whether stages pay, and why: in words, from the numbers of the plans that were compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from lbpar.graph.graph import Graph
from lbpar.graph.ops.norm import Norm
from lbpar.plan.candidates import MOST_AXES
from lbpar.plan.compare_stages import Layers, Staged, fastest_first, unpriced
from lbpar.plan.priced import Settings
from lbpar.program.steps import Start, StartMany, takes_part
from lbpar.text import count, human_bytes, human_seconds

#: Differences of less than this part of a step are not spoken of.
MATTERS = 0.03


@dataclass(frozen=True)
class Spent:
    """Seconds of a step: ``compute`` at the busiest place; moves ``inside`` nodes and ``between`` them, where most are; ``idle`` on the mean."""

    compute: float
    inside: float
    between: float
    idle: float


def spent(row: Staged, settings: Settings) -> Spent:
    """What a plan's step is spent on."""
    priced, machine = row.priced, settings.machine
    program, nearest = priced.program, machine.file.levels[0]
    each = []
    for rank in priced.plan.places:
        seconds = {True: 0.0, False: 0.0}
        for step, cost in zip(program.steps, priced.price.steps, strict=True):
            if isinstance(step, (Start, StartMany)) and cost.moves and takes_part(step, program, rank):
                move = step.move if isinstance(step, Start) else step.starts[0].move
                levels = machine.parts(program.plan.grid, move.axes)
                seconds[bool(levels) and levels[-1].level is not nearest] += cost.seconds
        each.append(seconds)
    inside, between = (max(s[far] for s in each) for far in (False, True))
    return Spent(priced.step.compute, inside, between, priced.step.bubble * priced.seconds if row.places > 1 else 0.0)


def unpriced_words(
    graph: Graph,
    batch: int,
    procs: int,
    counts: Sequence[int],
    micro_batches: int | None = None,
    most_axes: int = MOST_AXES,
    layers: Layers | None = None,
) -> list[str]:
    """A sentence on everything that a comparison leaves out."""
    return [
        f"Not priced: {count(k, 'stage')}{f', {schedule}' if schedule else ''}: {why}"
        for k in counts
        for schedule, why in unpriced(graph, batch, procs, k, micro_batches, most_axes, layers)
    ]


def written(row: Staged, asked: Staged, path: str, settings: Settings, limit: int | None = None) -> list[str]:
    """Sentences on the plan that is written beside the one that would be without a comparison."""

    def named(r: Staged) -> str:
        parts = (
            [r.priced.name]
            if r.priced.name.startswith(f"{r.places} stage")
            else [r.priced.name, count(r.places, "stage")]
        )
        return ", ".join([*parts, count(r.micro_batches, "micro-batch"), human_seconds(r.priced.seconds) + " a step"])

    fits = "" if limit is None else " that fits in memory" if row.fits else ", though it does not fit in memory"
    instead = "" if row is asked else f"; without --stages it would be {named(asked)}"
    out = [f"Plan for {path}: {named(row)}, the fastest{fits} (delayed gradients left out){instead}."]
    norms = [n.name for n in settings.graph.ops if isinstance(n.op, Norm)]
    if norms and row.micro_batches != asked.micro_batches:
        one, other = (samples_at_a_time(settings.batch, r.micro_batches) for r in (row, asked))
        out.append(
            f"Batch norm ({norms[0]}{' and others' * (len(norms) > 1)}) takes its statistics of {one} there, not of {other}: training is not quite the same."
        )
    return out


def samples_at_a_time(batch: int, micro_batches: int) -> str:
    """Samples of a micro-batch, in words."""
    return ("up to " if batch % micro_batches else "") + count(-(-batch // micro_batches), "sample") + " at a time"


def _split(row: Staged) -> str:
    most = max(prod(row.priced.plan.ways(n.name).values()) for n in row.priced.program.graph.ops)
    return "not split" if most == 1 else f"split in at most {most}"


def whether_stages_pay(rows: Sequence[Staged], settings: Settings, limit: int | None = None) -> list[str]:
    """Sentences on the fastest plan with stages beside the one without.

    Parameters
    ----------
    rows : sequence of Staged
        The plan without stages, and others; nothing is said unless there are both. Delayed gradients, which change the arithmetic, are left out.
    settings : Settings
        How they were priced.
    limit : int, optional
        Bytes that one process may use.
    """
    rows = [r for r in fastest_first(rows) if r.schedule != "delayed"]
    none, best = ([r for r in rows if (r.places > 1) == staged] for staged in (False, True))
    return list(_sentences(none[0], best[0], settings, limit)) if none and best else []


def _sentences(none: Staged, best: Staged, settings: Settings, limit: int | None) -> Iterator[str]:
    before, after = none.priced.seconds, best.priced.seconds
    m0, m1 = max(none.memory), max(best.memory)
    micros = count(best.micro_batches, "micro-batch")
    if limit is not None and not (none.fits and best.fits):
        room = f"in {human_bytes(limit)} a process"
        needs = f"the best without stages needs {human_bytes(m0)}"
        if best.fits:
            yield f"Only plans with stages fit {room}: {best.places} with {best.schedule} and {micros} take {human_seconds(after)} a step; {needs}."
        elif none.fits:
            yield (
                f"Only a plan without stages fits {room}: {human_seconds(before)} a step; {best.places} with {best.schedule} and {micros} need {human_bytes(m1)}."
            )
        else:
            yield f"No plan that was found fits {room}, with stages or without, so nothing is said of whether stages pay: {needs}, {best.places} stages {human_bytes(m1)}."
        return
    pays = after < before
    how = f"{before / after:.2f} times as fast as" if after < before else f"{after / before:.2f} times as long as"
    yield (
        f"Stages {'pay' if pays else 'do not pay'}: {best.places} with {best.schedule} and {micros} take {human_seconds(after)} a step, "
        f"{how} the best plan without ({human_seconds(before)})."
    )
    a, b, procs = spent(none, settings), spent(best, settings), none.priced.plan.grid.size
    large = MATTERS * min(before, after)
    if abs(a.between - b.between) > large:
        yield (
            f"Slow links: moves between nodes take {human_seconds(b.between)} of each process, {human_seconds(a.between)} without stages; "
            f"{human_bytes(best.border_bytes)} cross borders."
        )
    if abs(a.inside - b.inside) > large:
        small = f"Small batch: {settings.batch / procs:.3g} samples a process. " if settings.batch < procs else ""
        yield f"{small}Moves inside nodes take {human_seconds(b.inside)} of each process, {human_seconds(a.inside)} without stages."
    if abs(a.compute - b.compute) > large:
        samples = [f"{samples_at_a_time(settings.batch, r.micro_batches)}, {_split(r)}" for r in (best, none)]
        yield (
            f"Computation takes {human_seconds(b.compute)} at the busiest stage, {human_seconds(a.compute)} without stages: layers work on {samples[0]}, "
            f"instead of {samples[1]}."
        )
    if b.idle > large:
        yield f"Idle: on the mean stages do not compute {100 * best.priced.step.bubble:.0f} % of the step; more micro-batches or fewer stages make it less."
    if abs(m0 - m1) > 0.1 * m0:
        fits = "" if limit is None else f", of {human_bytes(limit)}"
        yield f"Memory: the stage that needs most takes {human_bytes(m1)}, a process without stages {human_bytes(m0)}{fits}."
