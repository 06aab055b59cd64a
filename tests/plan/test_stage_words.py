"""Whether stages pay is said from the numbers that were compared."""

from __future__ import annotations

from dataclasses import replace

from lbpar.cost.machine import Machine, find_machine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.plan.choose import choose_plan
from lbpar.plan.compare_stages import Staged, compare_stages, measured
from lbpar.plan.priced import Settings
from lbpar.plan.stage_words import spent, whether_stages_pay
from lbpar.program.plan import Plan


def convolutions() -> Graph:
    """As many activations as gradients."""
    g = GraphBuilder(input=(16, 16, 256))
    x = g.input
    for i in range(6):
        x = g.conv(x, 256, 3, pad=1, name=f"c{i}")
    return g.build(g.linear(g.global_avg_pool(x), 10)).with_loss(CrossEntropy())


def compared(machine: Machine, batch: int, procs: int = 8) -> tuple[list[Staged], Settings]:
    settings = Settings(convolutions(), batch, machine, "float32", "momentum")
    none = choose_plan(settings.graph, batch, procs, machine).priced
    return [measured(none), *compare_stages(settings, procs, [2])], settings


def slow_network(bandwidth: float) -> Machine:
    file = find_machine("perlmutter-a100").file
    levels = [file.levels[0], file.levels[1].model_copy(update={"bandwidth": bandwidth})]
    return Machine(file.model_copy(update={"levels": levels}))


def test_slow_links_are_named_where_they_decide() -> None:
    rows, settings = compared(slow_network(1e8), 256)
    said = whether_stages_pay(rows, settings)
    best = min(rows[1:], key=lambda r: r.priced.seconds)
    ratio = rows[0].priced.seconds / best.priced.seconds
    assert ratio > 1 and said[0].startswith("Stages pay: 2 with ") and f"{ratio:.2f} times as fast as" in said[0]
    none, staged = spent(rows[0], settings), spent(best, settings)
    assert staged.between < none.between and any(s.startswith("Slow links: ") for s in said)


def test_idle_time_is_named_where_stages_lose() -> None:
    rows, settings = compared(find_machine("perlmutter-a100"), 8)
    said = whether_stages_pay(rows, settings)
    assert said[0].startswith("Stages do not pay") and "times as long as" in said[0]
    best = min(rows[1:], key=lambda r: r.priced.seconds)
    (idle,) = [s for s in said if s.startswith("Idle: ")]
    assert f"do not compute {100 * best.priced.step.bubble:.0f} %" in idle


def test_memory_is_named_where_only_stages_fit() -> None:
    """Slower, but the only ones that fit."""
    rows, settings = compared(find_machine("perlmutter-a100"), 8)
    none, *staged = rows
    rows = [replace(none, memory=(3 << 30,), fits=False), *(replace(r, memory=(1 << 30, 1 << 29)) for r in staged)]
    said = whether_stages_pay(rows, settings, 2 << 30)
    assert len(said) == 1 and said[0].startswith("Only plans with stages fit in 2.15 GB a process: 2 with ")
    assert said[0].endswith("the best without stages needs 3.22 GB.")


def test_memory_is_named_where_only_a_plan_without_stages_fits() -> None:
    rows, settings = compared(slow_network(1e8), 256)  # stages would be faster
    none, *staged = rows
    rows = [replace(none, memory=(1 << 30,)), *(replace(r, memory=(3 << 30, 1 << 29), fits=False) for r in staged)]
    said = whether_stages_pay(rows, settings, 2 << 30)
    assert len(said) == 1 and said[0].startswith("Only a plan without stages fits in 2.15 GB a process: ")
    assert said[0].endswith("need 3.22 GB.")


def test_no_verdict_is_drawn_from_plans_that_do_not_fit() -> None:
    rows, settings = compared(find_machine("perlmutter-a100"), 8)
    said = whether_stages_pay([replace(r, fits=False) for r in rows], settings, 1000)
    assert len(said) == 1 and said[0].startswith("No plan that was found fits in 1 kB a process")


def test_computation_is_explained_by_what_the_plans_split() -> None:
    """On fast links four samples on two processes: what is said of each plan is read off its grids."""
    rows, settings = compared(find_machine("perlmutter-a100"), 4, 2)
    slow = replace(rows[0].priced, step=replace(rows[0].priced.step, compute=1.0))
    for plan, words in ((None, None), (Plan(Grid((2,)), {}), "not split")):
        row = rows[0] if plan is None else replace(rows[0], priced=settings.priced("none", plan))
        row = replace(row, priced=replace(row.priced, step=slow.step))
        (said,) = [s for s in whether_stages_pay([row, *rows[1:]], settings) if s.startswith("Computation")]
        assert "layers work on 1 sample at a time, not split, instead of 4 samples at a time, " in said
        assert said.endswith(f", {words or 'split in at most 2'}.")


def test_nothing_is_said_where_there_is_nothing_to_compare() -> None:
    rows, settings = compared(find_machine("perlmutter-a100"), 8)
    assert whether_stages_pay(rows[:1], settings) == whether_stages_pay(rows[1:], settings) == []
