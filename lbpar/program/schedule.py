"""In which order micro-batches go through the stages: one linear order of tasks, which all ranks share.

A task is the forward pass (F), the backward pass (B) or, where the schedule parts them, the weight gradients (W) of one stage and micro-batch.
The order is that of starts in a simulation in which every place is busy as early as its schedule allows, a forward pass takes one unit of
time, a whole backward pass two. Each rank runs the tasks of its own place in this order. What it waits for was started by a task further up, so
no two ranks can wait for each other, however long anything takes.

Delayed gradients are 1F1B of whole mini-batches, of which ever more come.

Schedules: GPipe [Huang et al. 2019], 1F1B [Narayanan et al. 2019], interleaved 1F1B [Narayanan et al. 2021], zero-bubble ZB-H1 [Qi et al. 2023].
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from lbpar.program.plan import Schedule

Kind = Literal["F", "B", "W"]


class Task(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro: int


class Timed(NamedTuple):
    """A task with the time at which it starts and that at which it ends."""

    start: int
    place: int
    task: Task
    end: int


def in_flight(schedule: Schedule, stages: int, places: int, place: int) -> int | None:
    """Most pairs of stage and micro-batch (with delayed gradients: mini-batch) whose activations a place keeps at a time; None: all."""
    if schedule == "gpipe":
        return None
    if schedule == "interleaved":
        return _warm_up(stages, places, place) + 1
    return places if schedule == "zero-bubble" else places - place


def _warm_up(stages: int, places: int, place: int) -> int:
    """Forward passes of a place before its first backward pass, where places have several stages."""
    return 2 * (places - place - 1) + (stages // places - 1) * places


@lru_cache(maxsize=64)
def timeline(schedule: Schedule, stages: int, places: int, micros: int) -> tuple[Timed, ...]:
    """All tasks in the order in which they start.

    Parameters
    ----------
    schedule : {"gpipe", "1f1b", "interleaved", "zero-bubble", "delayed"}
    stages, places : int
        Stage s is at place s modulo ``places``.
    micros : int
        Micro-batches, or mini-batches of delayed gradients. Where places have several stages, they take turns after as many as there are places; if the last turn is not
        complete, all forward passes come first.
    """
    if schedule == "interleaved" and micros % places:
        schedule = "gpipe"
    left = [_tasks(schedule, stages, places, p, micros)[::-1] for p in range(places)]
    length = {"F": 1, "B": 1, "W": 1} if schedule == "zero-bubble" else {"F": 1, "B": 2}
    free, ended = [0] * places, dict[Task, int]()
    out: list[Timed] = []
    while any(left):
        could = []
        for place, tasks in enumerate(left):
            needs = _needs(tasks[-1], stages) if tasks else ()
            if tasks and all(n in ended for n in needs):
                could.append((max((free[place], *(ended[n] for n in needs))), place))
        start, place = min(could)
        task = left[place].pop()
        ended[task] = free[place] = start + length[task.kind]
        out.append(Timed(start, place, task, ended[task]))
    return tuple(sorted(out))


def _tasks(schedule: Schedule, stages: int, places: int, place: int, micros: int) -> list[Task]:
    """Those of one place, in its order."""
    mine = [(s, i) for s in range(place, stages, places) for i in range(micros)]
    forward = [Task("F", s, i) for s, i in sorted(mine, key=lambda t: (t[1] // places, t[0], t[1]))]
    backward = [Task("B", s, i) for s, i in sorted(mine, key=lambda t: (t[1] // places, -t[0], t[1]))]
    if schedule == "gpipe":
        return [*forward, *backward]
    warm = _warm_up(stages, places, place) + 1 if schedule == "interleaved" else places - place
    out = forward[:warm]
    for j, b in enumerate(backward):
        out.append(b)
        if schedule == "zero-bubble" and j >= place:
            out.append(Task("W", place, j - place))  # late, so that the passes that others wait for come first
        out += forward[warm + j : warm + j + 1]
    late = range(max(0, micros - place), micros) if schedule == "zero-bubble" else ()
    return [*out, *(Task("W", place, j) for j in late)]


def _needs(task: Task, stages: int) -> list[Task]:
    kind, s, i = task
    if kind == "F":
        return [Task("F", s - 1, i)] if s else []
    if kind == "W":
        return [Task("B", s, i)]
    return [Task("F", s, i), *([Task("B", s + 1, i)] if s + 1 < stages else [])]
