"""Plans: how many parts they make, and what an op cannot take."""

from __future__ import annotations

from typing import Any

import pytest

from lbpar.errors import PlanError
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from tests.program.nets import BATCH, network

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown layer": ({"conv9": {"N": (0,)}}, "conv9"),
    "unknown loop": ({"fc": {"H": (0,)}}, "no loop 'H'"),
    "unknown axis": ({"fc": {"N": (5,)}}, "axis 5 does not exist"),
    "axis given twice": ({"fc": {"N": (0,), "F": (0,)}}, "two loops"),
}


@pytest.mark.parametrize(("ops", "text"), BAD.values(), ids=BAD.keys())
def test_plans_that_an_op_cannot_take(ops: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        lower(network(), Plan(Grid((2, 2)), ops), BATCH)


def test_ways_are_products_of_axes() -> None:
    plan = Plan(Grid((2, 3, 4)), {"conv": {"N": (0, 2), "H": (1,), "F": ()}})
    assert plan.ways("conv") == {"N": 8, "H": 3}
    assert plan["pool"] == {} and plan.ways("pool") == {}


def test_a_plan_that_fits_is_accepted() -> None:
    Plan(Grid((2, 2)), {"conv1": {"N": (0,), "F": (1,)}, "fc": {"C": (1, 0)}}).check(network(), BATCH)
