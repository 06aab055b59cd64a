"""Why a plan is what it is: sums add up, and runners-up cost what the tables say."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.cost.machine import find_machine
from lbpar.plan.choose import Choice, choose_plan
from lbpar.plan.explain import COMPUTE, UPDATE, WEIGHTS, conditional, explain, runners_up
from tests.cost.nets import even


@pytest.fixture(scope="module")
def choice() -> Choice:
    return choose_plan(even(), 1 << 14, 4, find_machine("perlmutter-a100"))


def test_parts_of_a_step_add_up(choice: Choice) -> None:
    step = explain(choice)["step"]
    for parts in ("by_phase", "by_purpose", "by_kind"):
        assert sum(step[parts].values()) == pytest.approx(step["sum"])
    assert {COMPUTE, UPDATE, WEIGHTS} <= set(step["by_purpose"])
    assert step["samples_per_second"] == pytest.approx((1 << 14) / step["seconds"])


def test_layers_hold_all_collectives_but_messages_of_several(choice: Choice) -> None:
    report = explain(choice)
    steps = [s for s in choice.priced.price.steps if s.moves and (s.bytes or s.group > 1)]
    listed = [c for row in report["layers"] for c in row["collectives"]]
    assert [row["layer"] for row in report["layers"]] == [n.name for n in choice.priced.program.graph.ops]
    assert sum(c["bytes"] for c in listed) == sum(s.bytes for s in steps)


def test_the_comparison_is_relative_to_the_choice(choice: Choice) -> None:
    first, *others = explain(choice)["comparison"]
    assert first["ratio"] == 1 and first["strategy"] == choice.priced.name
    for row in others:
        assert row["ratio"] == pytest.approx(row["seconds"] / first["seconds"])


def test_the_runner_up_is_the_best_other_candidate_beside_the_same_neighbours(choice: Choice) -> None:
    tables = choice.tables
    picked = {n: tables.number(n, dict(choice.priced.plan[n])) for n in tables.groups}
    rivals = runners_up(tables, choice.priced)
    assert rivals
    for name in tables.groups:
        changed = [tables.parts(picked | {name: i}) for i in range(len(tables.nodes[name].grids))]
        cost = conditional(tables, picked, name)  # type: ignore[arg-type]
        assert np.allclose(np.array(changed) - changed[picked[name]], cost - cost[picked[name]])
        if name in rivals:
            best = min(c for i, c in enumerate(changed) if i != picked[name])
            assert rivals[name]["extra_seconds"] == pytest.approx(best - changed[picked[name]], abs=1e-12)
