"""The script that holds the planner's objective against the price of the program, on small cases."""

from __future__ import annotations

import pytest

from tests.bench.objective import MACHINES, Case


@pytest.mark.parametrize(("model", "procs"), [("cosmoflow", 4), ("vgg16", 16), ("resnet18", 8)])
@pytest.mark.parametrize("machine", MACHINES)
def test_the_objective_is_the_price_of_the_program(model: str, procs: int, machine: str) -> None:
    assert all(abs(d) < 0.01 for d in Case(model, procs, machine).differences(3))


def test_small_changes_of_the_chosen_plan_do_not_make_it_faster() -> None:
    found = Case("cosmoflow", 4, "perlmutter-a100").climb(200)
    assert found.lowered > 20 and found.after > 0.995 * found.before
