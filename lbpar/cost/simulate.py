"""Step time with overlap: two queues, computation and communication, over the program's starts and waits; a pair for each place of stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lbpar.cost.machine import Machine
from lbpar.cost.price import Price
from lbpar.program.steps import Free, Program, Start, StartMany, Step, Update, Wait, takes_part, writes
from lbpar.program.words import micro_batch


@dataclass(frozen=True)
class Simulation:
    """Seconds of one step on one rank.

    Parameters
    ----------
    seconds : float
        The step.
    compute : float
        The compute queue is busy, at the place where it is busiest.
    communication : float
        The communication queue is busy, at the place where it is busiest.
    exposed : float
        The compute queue waits for communication, or for other stages.
    busy : tuple of float
        The compute queue is busy, at each place of stages.
    """

    seconds: float
    compute: float
    communication: float
    exposed: float
    busy: tuple[float, ...] = ()

    @property
    def bubble(self) -> float:
        """Part of the step in which places of stages do not compute, on the mean."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.seconds) if self.busy and self.seconds else 0.0


def simulate(program: Program, priced: Price, machine: Machine) -> Simulation:
    """Run the priced program on two queues, at every place of stages; with delayed gradients, the time from one mini-batch to the next.

    A move is issued when the compute queue reaches its start, and runs when the moves before it are done; a wait holds the
    compute queue until then. What goes to another stage keeps the queue of the stage that sends. Where the machine lets only a part of
    communication go on behind computation (``overlap``), the step lies that far between this and one in which moves are not hidden.
    """
    ranks = program.plan.places
    roles = [_role(step, program, ranks) for step in program.steps]
    hidden, compute, communication = _period(program, priced, roles, len(ranks), True)
    shown = _period(program, priced, roles, len(ranks), False)[0] if machine.file.overlap < 1 else 0.0
    seconds = machine.file.overlap * hidden + (1 - machine.file.overlap) * shown
    busiest = max(compute)
    return Simulation(seconds, busiest, max(communication), max(0.0, seconds - busiest), tuple(compute))


class Span(NamedTuple):
    """A place works on one micro-batch: F forward, B backward, U on what is of all micro-batches (-1)."""

    place: int
    kind: str
    micro: int
    start: float
    end: float


def pipeline(program: Program, priced: Price) -> list[Span]:
    """When each place works on which micro-batch, moves hidden behind computation: the picture of a step with stages."""
    ranks, pieces = program.plan.places, list[Span]()

    def note(place: int, step: Step, start: float, end: float) -> None:
        micro, phase = micro_batch(step), getattr(step, "phase", "update")
        kind = "U" if micro is None else "F" if phase == "forward" else "B"
        pieces.append(Span(place, kind, -1 if micro is None else micro, start, end))

    _run(program, priced, [_role(s, program, ranks) for s in program.steps], len(ranks), True, 1, note)
    return merged(pieces)


def merged(pieces: Iterable[Span]) -> list[Span]:
    """Spans of one place that follow each other and work on the same, as one."""
    last, out = dict[int, Span](), list[Span]()
    for p in sorted((p for p in pieces if p.end > p.start), key=lambda p: (p.place, p.start)):
        before = last.get(p.place)
        if before is not None and before[:3] == p[:3]:
            p = out[-1] = before._replace(end=max(p.end, before.end))
        else:
            out.append(p)
        last[p.place] = p
    return out


Role = tuple[tuple[int, ...], tuple[int, ...]]
"""Places that do a step, and those to which something comes."""


def _role(step: Step, program: Program, ranks: tuple[int, ...]) -> Role:
    everywhere = tuple(range(len(ranks)))
    if len(ranks) == 1 or isinstance(step, Free):
        return everywhere, everywhere
    if isinstance(step, Update):
        here = tuple(p for p in everywhere if takes_part(step, program, ranks[p]))
        return here, here

    def of(buffer: str) -> tuple[int, ...]:
        return tuple(p for p in everywhere if program.here(ranks[p])[buffer])

    if isinstance(step, Start):
        return of(step.src), of(step.dst)
    here = of(step.starts[0].src if isinstance(step, StartMany) else writes(step)[0])
    return here, here


Times = tuple[float, list[float], list[float]]
"""Seconds of the step, and how long each place computes and communicates."""


def _period(program: Program, priced: Price, roles: list[Role], places: int, overlap: bool) -> Times:
    """Times of a step: from one mini-batch to the next, where several are under way (those that fill and drain the stages left out)."""
    many = len(program.rounds)
    if many == 1:
        return _run(program, priced, roles, places, overlap, 1)
    short, long = (_run(program, priced, roles, places, overlap, n * many) for n in (2, 3))
    compute, communication = ([t / (3 * many) for t in times] for times in long[1:])
    return (long[0] - short[0]) / many, compute, communication


def _run(
    program: Program,
    priced: Price,
    roles: list[Role],
    places: int,
    overlap: bool,
    mini_batches: int,
    note: Callable[[int, Step, float, float], None] | None = None,
) -> Times:
    """Times of so many mini-batches; moves behind computation, or not. ``note`` learns what each place computes, and when."""
    clock, moving, compute, communication = ([0.0] * places for _ in range(4))
    ready: dict[tuple[str, int], list[float]] = {}
    for of, i in program.in_rounds(mini_batches):
        step, cost, (here, there) = program.steps[i], priced.steps[i], roles[i]
        if isinstance(step, (Start, StartMany)) and cost.moves:
            for p in here:
                begin = max(moving[p], clock[p])
                moving[p] = begin + cost.seconds
                if not overlap:
                    clock[p] = moving[p]
                communication[p] += cost.seconds
            done = [max(moving[p] for p in here)] * places if here != there else moving
            for start in step.starts if isinstance(step, StartMany) else (step,):
                ready[start.dst, of] = list(done)
        elif isinstance(step, Wait):
            arrived = ready.get((step.dst, of), clock)
            for p in here:
                clock[p] = max(clock[p], arrived[p])
        elif not isinstance(step, Free):
            for p in here:
                if note is not None:
                    note(p, step, clock[p], clock[p] + cost.seconds)
                clock[p] += cost.seconds
                compute[p] += cost.seconds
    return max(max(clock), max(moving)), compute, communication
