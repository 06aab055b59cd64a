"""Plans are made to fit by computing activations again: as little as needed, the cheapest first."""

from __future__ import annotations

import pytest

from lbpar.cost.machine import find_machine
from lbpar.errors import PlanError
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.models.registry import build_model
from lbpar.plan.choose import choose_plan
from lbpar.plan.lean import fit, fitted, too_small
from lbpar.plan.priced import Settings
from lbpar.program.plan import Plan

MACHINE = find_machine("laptop")


def unet() -> Graph:
    return build_model("unet3d", input=(48, 48, 48, 2), width=0.5).with_loss(CrossEntropy())


def settings(graph: Graph) -> Settings:
    return Settings(graph, 1, MACHINE, "float32", "momentum")


def test_tighter_limits_cost_more_and_are_held() -> None:
    s = settings(unet())
    kept = s.priced("one", Plan(Grid()))
    found = [fit(s, kept, int(kept.memory.peak * share)) for share in (1.0, 0.9, 0.8, 0.72)]
    assert all(
        f is not None and f.memory.peak <= kept.memory.peak * x for f, x in zip(found, (1, 0.9, 0.8, 0.72), strict=True)
    )
    times = [f.seconds for f in found if f is not None]
    assert times == sorted(times) and times[0] == kept.seconds and times[-1] < 1.15 * kept.seconds
    assert not found[0].plan.recompute  # type: ignore[union-attr]
    assert fit(s, kept, kept.memory.peak // 10) is None


def test_an_output_is_kept_where_computing_it_again_takes_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others are computed from must be there meanwhile: dropping alone does not get so low."""
    s = settings(unet())
    kept = s.priced("one", Plan(Grid()))
    limit = int(0.71 * kept.memory.peak)
    lean = fit(s, kept, limit)
    assert lean is not None and lean.memory.peak <= limit
    monkeypatch.setattr("lbpar.plan.lean._keep_one", lambda *_: None)
    assert fit(s, kept, limit) is None


def test_cheap_outputs_go_first() -> None:
    s = settings(unet())
    kept = s.priced("one", Plan(Grid()))
    lean = fit(s, kept, int(kept.memory.peak * 0.9))
    assert lean is not None and lean.plan.recompute
    kinds = {s.graph[n].op.kind for n in lean.plan.recompute}
    assert kinds <= {"relu", "concat", "max_pool"}


def test_what_does_not_fit_is_refused() -> None:
    s = settings(unet())
    kept = s.priced("one", Plan(Grid()))
    assert fitted(s, "one", kept.plan, kept.memory.peak).plan == kept.plan
    with pytest.raises(PlanError, match="no plan fits in 10 MB per process"):
        fitted(s, "one", kept.plan, 10_000_000)
    lean = Plan(Grid(), recompute=("up1.relu1",))
    with pytest.raises(PlanError, match="no plan fits"):  # what is given is not changed
        fitted(s, "one", lean, s.priced("lean", lean).memory.peak - 1)
    assert "no plan fits in 1 B" in too_small(1, [kept])


def test_the_planner_computes_again_where_nothing_fits_otherwise() -> None:
    graph = unet()
    free = choose_plan(graph, 1, 2, MACHINE, compare=False)
    least = min(o.memory.peak for o in (free.priced, *choose_plan(graph, 1, 2, MACHINE).others))
    limit = int(0.85 * least)
    choice = choose_plan(graph, 1, 2, MACHINE, memory_limit=limit)
    assert choice.plan.recompute and choice.priced.memory.peak <= limit and choice.priced.kept is not None
    assert any("nothing fits in" in n and "unless activations are computed again" in n for n in choice.notes)
    with pytest.raises(PlanError, match="no plan fits"):
        choose_plan(graph, 1, 2, MACHINE, memory_limit=limit, recompute=())


def test_auto_may_be_faster_than_the_plans_that_fit() -> None:
    """Where a plan fits that keeps everything, one that computes again is taken only if it is faster."""
    graph = unet()
    free = choose_plan(graph, 2, 2, MACHINE)
    limit = int(0.93 * free.priced.memory.peak)
    plain = choose_plan(graph, 2, 2, MACHINE, memory_limit=limit)
    auto = choose_plan(graph, 2, 2, MACHINE, memory_limit=limit, recompute="auto")
    assert auto.priced.memory.peak <= limit and plain.priced.memory.peak <= limit
    assert auto.priced.seconds <= plain.priced.seconds * 1.004
    roomy = choose_plan(graph, 2, 2, MACHINE, memory_limit=1 << 40, recompute="auto")
    assert not roomy.plan.recompute and roomy.plan == free.plan


def test_given_layers_and_segments_hold_for_every_plan() -> None:
    graph = unet()
    choice = choose_plan(graph, 2, 2, MACHINE, recompute=("up1.relu1", "up1.concat"))
    assert all(o.plan.recompute == ("up1.relu1", "up1.concat") for o in (choice.priced, *choice.others))
    assert choose_plan(graph, 2, 2, MACHINE, recompute=4, compare=False).plan.recompute


def test_the_smallest_footprint_that_is_told_is_that_of_what_was_tried() -> None:
    s = settings(unet())
    kept = s.priced("one", Plan(Grid()))
    with pytest.raises(PlanError) as refused:
        fitted(s, "one", kept.plan, kept.memory.peak // 10)
    smallest = min(s.known, key=lambda o: o.memory.peak)
    assert smallest.memory.peak < 0.75 * kept.memory.peak
    assert str(refused.value) == too_small(kept.memory.peak // 10, [smallest])
    with pytest.raises(PlanError) as chosen:
        choose_plan(s.graph, 1, 1, MACHINE, memory_limit=kept.memory.peak // 10)
    assert str(chosen.value) == str(refused.value)
