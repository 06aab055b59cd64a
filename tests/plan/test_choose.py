from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from lbpar.cost.machine import Machine, find_machine
from lbpar.errors import PlanError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.models.registry import build_model
from lbpar.plan.choose import Choice, choose_plan
from lbpar.plan.priced import Settings
from lbpar.plan.pricing import Pricing
from lbpar.plan.tables import build_tables
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.steps import Start
from tests.cost.nets import even
from tests.util.run import assert_same, run, samples, serial

MACHINE = find_machine("perlmutter-a100")


def three_linear(width: int = 4096) -> Graph:
    g = GraphBuilder(input=(width,))
    x = g.linear(g.input, width, bias=False, name="fc1")
    x = g.linear(x, width, bias=False, name="fc2")
    return g.build(g.linear(x, width, bias=False, name="fc3")).with_loss(CrossEntropy())


def without_latency(name: str) -> Machine:
    """PaSE's machines know bandwidth only."""
    file = find_machine(name).file
    level = file.levels[0].model_copy(update={"alpha": 0.0, "size": None})
    return Machine(file.model_copy(update={"levels": (level,)}))


def slow_links() -> tuple[Graph, Machine]:
    """Where messages are dear, all ranks repeat the work."""
    file = find_machine("cori-knl").file
    level = file.levels[0].model_copy(update={"alpha": 1e-2})
    return even(), Machine(file.model_copy(update={"levels": (level,)}))


def half_of(choice: Choice) -> int:
    """A limit for which half of the arrays have to go."""
    held = choice.priced.memory
    return held.overhead + (held.peak - held.overhead) // 2


def test_alternating_splits_move_nothing_between_layers() -> None:
    """PaSE's splits of consecutive linear layers: only partial sums travel, and no plan of ours costs more than that."""
    graph, machine = three_linear(), without_latency("pase-1080ti")
    grid_axes = ((4, 3), (2, 1, 0))
    choice = choose_plan(graph, 128, 32, machine, compare=False)
    ops = {
        "fc1": {"F": grid_axes[0], "C": grid_axes[1]},
        "fc2": {"F": grid_axes[1], "C": grid_axes[0]},
        "fc3": {"F": grid_axes[0], "C": grid_axes[1]},
        "loss": {"F": grid_axes[0]},
    }
    assert [choice.plan.grid.ways(ops[n]["F"]) for n in ("fc1", "fc2", "fc3")] == [4, 8, 4]
    program = lower(graph, Plan(choice.plan.grid, ops), 128)
    kinds = {s.move.kind for s in program.steps if isinstance(s, Start)}
    assert kinds <= {"allreduce", "reduce_scatter", "slice"}, kinds
    tables = build_tables(graph, 128, Pricing(machine, choice.plan.grid), ops)
    assert choice.solution.total <= tables.total(dict.fromkeys(ops, 0)) * (1 + 1e-12)
    fc = [choice.plan.ways(n) for n in ("fc1", "fc2", "fc3")]
    assert all("N" not in w for w in fc), fc  # weights outweigh 128 samples: none is split


def test_late_layers_split_space_when_samples_run_out() -> None:
    graph = build_model("unet2d", input=(256, 256, 3), width=16).with_loss(CrossEntropy())
    choice = choose_plan(graph, 1, 8, MACHINE, compare=False)
    spatial = [n for n, g in choice.plan.ops.items() if {"H", "W"} & set(g)]
    assert len(spatial) > len(choice.plan.ops) / 2
    assert any({"H", "W"} <= set(choice.plan[n]) for n in spatial)


def test_three_dimensional_networks_scale_beyond_their_batch() -> None:
    graph = build_model("unet3d", input=(32, 32, 32, 1), width=8).with_loss(CrossEntropy())
    choice = choose_plan(graph, 2, 16, MACHINE)
    first = choice.plan.ways("down1.conv1")
    assert np.prod([first.get(k, 1) for k in "DHW"]) > 2
    data = next(o for o in choice.others if o.name == "data")
    assert choice.priced.step.compute < 0.5 * data.step.compute


def test_many_samples_and_light_weights_give_data_parallelism() -> None:
    g = GraphBuilder(input=(64, 64, 8))
    x = g.relu(g.conv(g.input, 8, 3, pad=1, name="c1"))
    graph = g.build(g.linear(g.global_avg_pool(g.conv(x, 8, 3, pad=1, name="c2")), 8)).with_loss(CrossEntropy())
    choice = choose_plan(graph, 256, 8, MACHINE, compare=False)
    assert choice.plan.ways("c1") == choice.plan.ways("c2") == {"N": 8}


def test_small_layers_use_fewer_processes() -> None:
    g = GraphBuilder(input=(16,))
    graph = g.build(g.linear(g.input, 8, name="fc")).with_loss(CrossEntropy())
    choice = choose_plan(graph, 4, 64, find_machine("abci-v100"), compare=False)
    ways = choice.plan.ways("fc")
    assert np.prod(list(ways.values()) or [1]) < 64
    assert any("rest repeats the same work" in n for n in choice.notes)


@pytest.mark.parametrize("procs", [1, 2, 6, 8])
def test_chosen_plans_train_like_one_process(procs: int) -> None:
    graph, rng = even(), np.random.default_rng(0)
    choice = choose_plan(graph, 6, procs, find_machine("laptop"))
    feeds = samples(graph, 6, rng)
    assert_same(run(graph, choice.plan, 6, feeds), serial(graph, 6, feeds))


def test_the_chosen_plan_is_the_fastest_of_those_compared() -> None:
    choice = choose_plan(build_model("resnet18").with_loss(CrossEntropy()), 64, 16, MACHINE)
    assert {"data", "spatial", "filter", "channel", "stationary-w", "owt", "best single grid"} <= {
        o.name for o in choice.others
    }
    assert all(choice.priced.seconds <= o.seconds for o in choice.others)
    assert choice.solution.exact and choice.solution.gap == 0


@pytest.mark.parametrize("limited", [False, True])
def test_further_processes_change_nothing(monkeypatch: pytest.MonkeyPatch, limited: bool) -> None:
    graph, machine = slow_links()
    limit = half_of(choose_plan(graph, 16, 4, machine, compare=False)) if limited else None
    alone = choose_plan(graph, 16, 4, machine, memory_limit=limit)
    fork, forked = os.fork, []
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # but for the one that watches the time of tests
    monkeypatch.setattr(os, "fork", lambda: forked.append(1) or fork())
    found = choose_plan(graph, 16, 4, machine, memory_limit=limit, cores=2)
    assert len(forked) == (1 if limited else 3)
    assert (found.plan, found.others, found.space) == (alone.plan, alone.others, alone.space)
    assert found.priced.price == alone.priced.price and found.notes == alone.notes


def test_given_layers_keep_their_grids() -> None:
    graph = even()
    choice = choose_plan(graph, 8, 4, MACHINE, layers={"c2": {"H": 2, "W": 2}, "fc": {"F": 2}}, compare=False)
    assert choice.plan.ways("c2") == {"H": 2, "W": 2} and choice.plan.ways("fc") == {"F": 2}
    with pytest.raises(PlanError, match="did you mean 'c1'"):
        choose_plan(graph, 8, 4, MACHINE, layers={"c1x": {"H": 2}})


def test_memory_limits_are_kept_and_cost_time() -> None:
    """A limit makes ranks share work that all repeat without it."""
    graph, machine = slow_links()
    free = choose_plan(graph, 16, 4, machine, compare=False)
    limit = half_of(free)
    tight = choose_plan(graph, 16, 4, machine, memory_limit=limit, compare=False)
    assert tight.priced.memory.peak <= limit < free.priced.memory.peak
    assert tight.priced.price.seconds >= free.priced.price.seconds * (1 - 1e-9)


def test_an_impossible_limit_names_the_smallest_footprint_and_the_largest_array() -> None:
    graph = build_model("alexnet").with_loss(CrossEntropy())
    with pytest.raises(
        PlanError, match=r"no plan fits in 1 MB.*smallest footprint found is .*largest array is .*Use more processes"
    ):
        choose_plan(graph, 64, 8, MACHINE, memory_limit=1_000_000)


def test_a_prime_number_of_processes_is_planned_and_remarked_on() -> None:
    choice = choose_plan(even(), 64, 61, MACHINE, compare=False)
    assert choice.plan.grid.sizes == (61,)
    assert any("prime factor 61" in n and "60 or 64" in n for n in choice.notes)


def test_merged_axes_are_said() -> None:
    choice = choose_plan(even(), 64, 1024, MACHINE, compare=False)
    assert any(n.startswith("Space: 1024 processes are planned as") for n in choice.notes)


def test_settings_price_any_plan() -> None:
    graph = even()
    priced = Settings(graph, 8, MACHINE, "float32", "adam").priced(
        "one", Plan(choose_plan(graph, 8, 1, MACHINE).plan.grid)
    )
    assert priced.price.bytes == 0 and priced.seconds > 0


def test_a_strategy_that_the_network_cannot_run_is_named_and_left_out() -> None:
    """Blocks of a flattened volume that is split along its last dimension, too, would be of 160,000 pieces."""
    g = GraphBuilder(input=(800, 800, 800, 1))
    graph = g.build(g.linear(g.flatten(g.conv(g.input, 1, 1)), 2)).with_loss(CrossEntropy())
    choice = choose_plan(graph, 8, 8, find_machine("perlmutter-a100"))
    (note,) = (n for n in choice.notes if n.startswith("Strategy"))
    assert note.startswith("Strategy spatial: not compared") and "pieces" in note
    assert {"data", "filter", "owt"} <= {o.name for o in choice.others} and "spatial" not in {
        o.name for o in choice.others
    }
