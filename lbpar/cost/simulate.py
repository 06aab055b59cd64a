"""Step time with overlap: two queues, computation and communication, over the program's starts and waits; a pair for each place of stages."""

from __future__ import annotations

from dataclasses import dataclass

from lbpar.cost.machine import Machine
from lbpar.cost.price import Price
from lbpar.program.steps import Free, Program, Start, StartMany, Step, Update, Wait, writes


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
    """Run the priced program on two queues, at every place of stages.

    A move is issued when the compute queue reaches its start, and runs when the moves before it are done; a wait holds the
    compute queue until then. What goes to another stage keeps the queue of the stage that sends. Where the machine lets only a part of
    communication go on behind computation (``overlap``), the step lies that far between this and one in which moves are not hidden.
    """
    ranks = program.plan.places
    roles = [_role(step, program, ranks) for step in program.steps]
    hidden, compute, communication = _run(program, priced, roles, len(ranks), True)
    shown = _run(program, priced, roles, len(ranks), False)[0] if machine.file.overlap < 1 else 0.0
    seconds = machine.file.overlap * hidden + (1 - machine.file.overlap) * shown
    busiest = max(compute)
    return Simulation(seconds, busiest, max(communication), max(0.0, seconds - busiest), tuple(compute))


Role = tuple[tuple[int, ...], tuple[int, ...]]
"""Places that do a step, and those to which something comes."""


def _role(step: Step, program: Program, ranks: tuple[int, ...]) -> Role:
    everywhere = tuple(range(len(ranks)))
    if len(ranks) == 1 or isinstance(step, (Update, Free)):
        return everywhere, everywhere

    def of(buffer: str) -> tuple[int, ...]:
        layout = program.buffers[buffer].layout
        return everywhere if layout.at is None else tuple(p for p in everywhere if layout.holds(ranks[p]))

    if isinstance(step, Start):
        return of(step.src), of(step.dst)
    here = of(step.starts[0].src if isinstance(step, StartMany) else writes(step)[0])
    return here, here


def _run(
    program: Program, priced: Price, roles: list[Role], places: int, overlap: bool
) -> tuple[float, list[float], list[float]]:
    """Seconds of the step, and how long each place computes and communicates; moves behind computation, or not."""
    clock, moving, compute, communication = ([0.0] * places for _ in range(4))
    ready: dict[str, list[float]] = {}
    for step, cost, (here, there) in zip(program.steps, priced.steps, roles, strict=True):
        if isinstance(step, (Start, StartMany)) and cost.moves:
            for p in here:
                begin = max(moving[p], clock[p])
                moving[p] = begin + cost.seconds
                if not overlap:
                    clock[p] = moving[p]
                communication[p] += cost.seconds
            done = [max(moving[p] for p in here)] * places if here != there else moving
            for start in step.starts if isinstance(step, StartMany) else (step,):
                ready[start.dst] = list(done)
        elif isinstance(step, Wait):
            arrived = ready.get(step.dst, clock)
            for p in here:
                clock[p] = max(clock[p], arrived[p])
        elif not isinstance(step, Free):
            for p in here:
                clock[p] += cost.seconds
                compute[p] += cost.seconds
    return max(max(clock), max(moving)), compute, communication
