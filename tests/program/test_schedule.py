"""Schedules against the formulas of their papers: length, and how many micro-batches each place keeps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from lbpar.program.plan import SCHEDULES, Schedule
from lbpar.program.schedule import Task, in_flight, timeline

SIZES = [(places, micros) for places in (1, 2, 3, 4, 8) for micros in (places, 2 * places, 3 * places + 1)]


def length(schedule: Schedule, stages: int, places: int, micros: int) -> int:
    return max(t.end for t in timeline(schedule, stages, places, micros))


@pytest.mark.parametrize(("places", "micros"), SIZES)
def test_idle_time_is_that_of_the_formula(places: int, micros: int) -> None:
    """(p - 1) / m of the work for GPipe and 1F1B, a third of it for ZB-H1, and 1 / v of it with v stages at each place."""
    for schedule in ("gpipe", "1f1b"):
        assert length(schedule, places, places, micros) == 3 * micros + 3 * (places - 1)
    assert length("zero-bubble", places, places, micros) == 3 * micros + places - 1
    if micros % places == 0:
        for v in (1, 2, 3):
            assert length("interleaved", v * places, places, micros) == 3 * v * micros + 3 * (places - 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("places", "micros"), [*SIZES, (3, 1), (4, 3)])
def test_every_task_runs_once_after_what_it_needs(schedule: Schedule, places: int, micros: int) -> None:
    for stages in (places, 2 * places) if schedule == "interleaved" else (places,):
        order = [t.task for t in timeline(schedule, stages, places, micros)]
        at = {task: i for i, task in enumerate(order)}
        kinds = "FBW" if schedule == "zero-bubble" else "FB"
        assert len(at) == len(order) == len(kinds) * stages * micros
        for kind, s, i in order:
            if kind == "F" and s:
                assert at[Task("F", s - 1, i)] < at[Task("F", s, i)]
            if kind == "B":
                before = Task("B", s + 1, i) if s + 1 < stages else Task("F", s, i)
                assert at[before] < at[Task("B", s, i)]
            if kind == "W":
                assert at[Task("B", s, i)] < at[Task("W", s, i)]
            if i:  # gradients are added in the order of micro-batches
                assert at[Task(kind, s, i - 1)] < at[Task(kind, s, i)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("places", "micros"), [(1, 4), (2, 8), (4, 16), (8, 16)])
def test_places_keep_no_more_than_they_may(schedule: Schedule, places: int, micros: int) -> None:
    stages = 2 * places if schedule == "interleaved" else places
    last = "W" if schedule == "zero-bubble" else "B"
    kept, most = [0] * places, [0] * places
    for timed in timeline(schedule, stages, places, micros):
        kept[timed.place] += (timed.task.kind == "F") - (timed.task.kind == last)
        most[timed.place] = max(most[timed.place], kept[timed.place])
    want = [in_flight(schedule, stages, places, p) for p in range(places)]
    assert most == ([stages // places * micros] * places if schedule == "gpipe" else want)
    if schedule == "1f1b":
        assert most == [places - p for p in range(places)]


def test_delayed_gradients_leave_no_gap_behind_the_first_backward_pass() -> None:
    """Every place alternates from then on, and its forward pass of a mini-batch comes behind as many updates as the formula says."""
    places, many = 4, 12
    order = timeline("delayed", places, places, many)
    for p in range(places):
        mine = [t for t in order if t.place == p]
        first = next(i for i, t in enumerate(mine) if t.task.kind == "B")
        busy = mine[first : first + 2 * (many - places) + 1]
        assert all(b.start == a.end for a, b in pairwise(busy)), p
        for i in range(many):
            before = mine[: next(j for j, t in enumerate(mine) if t.task == ("F", p, i))]
            assert sum(t.task.kind == "B" for t in before) == max(0, i - (places - 1 - p))
        assert in_flight("delayed", places, places, p) == places - p
