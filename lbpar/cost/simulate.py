"""Step time with overlap: two queues, computation and communication, over the program's starts and waits."""

from __future__ import annotations

from dataclasses import dataclass

from lbpar.cost.machine import Machine
from lbpar.cost.price import Price
from lbpar.program.steps import Program, Start, StartMany, Wait


@dataclass(frozen=True)
class Simulation:
    """Seconds of one step on one rank.

    Parameters
    ----------
    seconds : float
        The step.
    compute : float
        The compute queue is busy.
    communication : float
        The communication queue is busy.
    exposed : float
        The compute queue waits for communication.
    """

    seconds: float
    compute: float
    communication: float
    exposed: float


def simulate(program: Program, priced: Price, machine: Machine) -> Simulation:
    """Run the priced program on two queues.

    A move is issued when the compute queue reaches its start, and runs when the moves before it are done; a wait holds the
    compute queue until then. Where the machine lets only a part of communication go on behind computation
    (``overlap``), the step lies that far between the two queues and the plain sum.
    """
    clock = moving = 0.0
    ready: dict[str, float] = {}
    compute = communication = 0.0
    for step, cost in zip(program.steps, priced.steps, strict=True):
        if isinstance(step, (Start, StartMany)) and cost.moves:
            moving = max(moving, clock) + cost.seconds
            communication += cost.seconds
            for start in step.starts if isinstance(step, StartMany) else (step,):
                ready[start.dst] = moving
        elif isinstance(step, Wait):
            clock = max(clock, ready.get(step.dst, clock))
        else:
            clock += cost.seconds
            compute += cost.seconds
    overlapped = max(clock, moving)
    part = machine.file.overlap
    seconds = part * overlapped + (1 - part) * (compute + communication)
    return Simulation(seconds, compute, communication, max(0.0, seconds - compute))
