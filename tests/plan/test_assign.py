"""Axes for numbers of ways."""

from __future__ import annotations

import pytest

from lbpar.errors import PlanError
from lbpar.layout.grid import Grid
from lbpar.plan.assign import assign


def test_samples_and_space_take_the_slowest_axes():
    grid = Grid((2, 2, 3))
    assert assign("a", {"N": 3, "F": 2, "H": 2}, grid) == {"N": (2,), "H": (1,), "F": (0,)}
    assert assign("a", {"N": 6}, grid) == {"N": (2, 1)}
    assert assign("a", {"F": [2, 0], "N": 2}, grid) == {"F": (2, 0), "N": (1,)}
    assert assign("a", {"C": 1}, grid) == {"C": ()}


@pytest.mark.parametrize(
    ("wanted", "procs", "message"),
    [
        ({"N": 2}, 1, "at: N 2 is 2 ways, which do not divide 1 process. Take a multiple of 2, or"),
        ({"N": 2, "F": 4}, 4, "at: N 2 x F 4 = 8 ways, which do not divide 4 processes."),
        ({"H": 3}, 4, "at: H 3 is 3 ways, which do not divide 4 processes"),
        ({"N": 0}, 4, "at: got 0 ways of N, expected at least 1"),
        ({"N": [0, 2]}, 4, "at.N: there is no grid axis 2; 4 processes have 2 axes, numbered from 0"),
        ({"N": [0], "H": [0, 1]}, 4, "at: axis 0 splits both N and H; give each axis to one loop"),
    ],
)
def test_ways_that_cannot_be(wanted, procs, message):
    with pytest.raises(PlanError) as e:
        assign("at", wanted, Grid.of(procs))
    assert message in str(e.value)


def test_ways_that_the_axes_of_a_plan_cannot_make():
    with pytest.raises(
        PlanError, match=r"N: got 2 ways, expected a product of the sizes of the grid axes that are left \(4\)"
    ):
        assign("at", {"N": 2}, Grid((4,)))
