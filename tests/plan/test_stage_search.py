"""Cuts and grids chosen together: against all of them, against the programs that run, and within memory."""

from __future__ import annotations

from functools import cache, reduce
from itertools import combinations
from math import comb, prod

import numpy as np
import pytest

from lbpar.config.parallel import ParallelConfig
from lbpar.cost.machine import Machine, find_machine
from lbpar.cost.price import price
from lbpar.errors import PlanError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.models.registry import build_model
from lbpar.plan.priced import Settings
from lbpar.plan.stage_search import StageSearch, best_stages, weights
from lbpar.program.lowering import lower
from lbpar.program.order import BUCKET_BYTES
from lbpar.program.steps import Start
from lbpar.solver.stretches import Ordered, Stretches, cut_and_choose
from tests.util.graphs import random_graph

MACHINE = find_machine("perlmutter-a100")
#: Choices of grids that brute force tries for each cut, at most.
MOST = 8_000


def searching(
    graph: Graph, procs: int, places: int, batch: int = 8, micros: int = 4, machine: Machine = MACHINE
) -> StageSearch:
    return StageSearch(Settings(graph, batch, machine, "float32", "momentum"), procs, places, micros)


def least(net: Ordered, parts: int, most: float, every: float) -> float:
    """The least objective over all cuts and all choices of grids, each written out from the tables."""
    names = list(net.costs)
    sizes = [net.costs[n].size for n in names]
    grids = dict(zip(names, (x.reshape(-1) for x in np.indices(sizes)), strict=True))
    node = {n: net.costs[n][grids[n]] for n in names}
    edge = {(u, v): e.full()[grids[u], grids[v]] for (u, v), e in net.edges.items()}
    best = np.inf
    for cuts in combinations(range(1, len(names)), parts - 1):
        stage = {n: sum(i >= s for s in cuts) for i, n in enumerate(names)}
        period = [sum(node[n] for n in names if stage[n] == s) for s in range(parts)]
        for (u, v), costs in edge.items():
            if stage[u] == stage[v]:
                period[stage[v]] = period[stage[v]] + costs
        for u, value in ((u, value) for u, values in net.reads.items() for value in values):
            arrived = {stage[u]}
            for r in value:
                s = stage[r.name]
                if s != stage[u]:
                    table = r.again if s in arrived else r.first
                    period[s] = period[s] + table.full()[grids[u], grids[r.name]]
                    arrived.add(s)
        best = min(best, float((most * reduce(np.maximum, period) + every * sum(period)).min()))
    return best


@cache
def small_searches(count: int) -> list[tuple[int, int, StageSearch]]:
    """Seeds and stages of random graphs whose plans can all be tried."""
    out: list[tuple[int, int, StageSearch]] = []
    seed = 0
    while len(out) < count:
        search = searching(random_graph(np.random.default_rng(seed)), 4, 2)
        groups = len(search.tables.groups)
        if groups >= 3 and prod(len(t.grids) for t in search.tables.nodes.values()) <= MOST:
            out.append((seed, 2 if groups < 4 or seed % 2 else 3, search))
        seed += 1
    return out


@pytest.mark.parametrize("part", range(4))
def test_the_search_finds_the_best_of_all_plans_of_small_graphs(part: int) -> None:
    """A hundred random graphs; three stages, too, which the tables of two places serve as well."""
    for seed, parts, search in small_searches(100)[part::4]:
        net = search.network
        most, every = weights("1f1b" if seed % 3 else "zero-bubble", 4)
        found = cut_and_choose(net, parts, most, every)
        assert found.gap == 0 and found.total == pytest.approx(least(net, parts, most, every), rel=1e-9), seed
        assert net.space(parts) == comb(len(net.costs) - 1, parts - 1) * prod(c.size for c in net.costs.values())


@pytest.mark.parametrize("seed", range(12))
def test_periods_are_those_of_the_program_that_runs(seed: int) -> None:
    """Random cuts and grids: the sum of all stages' periods, times the micro-batches, is the price of all steps, but for starts of messages
    with room left."""
    rng = np.random.default_rng(seed)
    graph = build_model("vgg11", input=(32, 32, 3), classes=10) if seed % 2 else build_model("lenet")
    search = searching(graph.with_loss(CrossEntropy()), 8, 2, 32, 4)
    net, n = search.network, len(search.network.costs)
    choice = {name: int(rng.integers(c.size)) for name, c in net.costs.items()}
    start = int(rng.integers(1, n))
    found = cut_and_choose(
        Ordered(
            {k: np.where(np.arange(c.size) == choice[k], c, np.inf) for k, c in net.costs.items()}, net.edges, net.reads
        ),
        2,
        1.0,
        0.0,
        pinned={k: int(i >= start) for i, k in enumerate(net.costs)},
    )
    assert found.choice == choice and found.starts == [0, start]
    program = lower(search.settings.graph, search.lay_out(found, "1f1b"), 32, bucket_bytes=BUCKET_BYTES)
    steps = price(program, MACHINE, "float32", "momentum").steps
    assert 4 * sum(found.costs) == pytest.approx(
        sum(s.seconds for s in steps), rel=0.06 if graph.name == "lenet" else 0.02
    )


def chain(layers: int, filters: int = 16) -> Graph:
    g = GraphBuilder(input=(16, 16, 8))
    x = g.input
    for i in range(layers):
        x = g.conv(x, filters, 3, pad=1, name=f"c{i}")
    return g.build(g.linear(g.global_avg_pool(x, name="pool"), 5, name="fc")).with_loss(CrossEntropy())


def test_the_objective_is_near_the_simulated_step() -> None:
    search = searching(build_model("vgg16").with_loss(CrossEntropy()), 8, 4, 64, 16)
    found = search.plan("1f1b")
    assert found.solution.gap <= 1e-3
    assert found.solution.total == pytest.approx(found.priced.seconds, rel=0.08)
    assert found.priced.seconds < 1.02 * search.plan("gpipe").priced.seconds


def narrowing() -> Graph:
    """Layers of many activations and little work, then the other way round."""
    g = GraphBuilder(input=(32, 32, 3))
    x = g.input
    for i in range(6):
        x = g.conv(x, 8, 1, name=f"large{i}")
    x = g.max_pool(x, 4, 4, name="pool")
    for i in range(4):
        x = g.conv(x, 64, 3, pad=1, name=f"small{i}")
    return g.build(g.linear(g.flatten(x, name="flat"), 5, name="fc")).with_loss(CrossEntropy())


def test_stages_are_searched_again_within_a_limit_of_memory() -> None:
    """The limit holds at every place by liveness; the cut moves to where the memory is. What cannot fit is refused."""
    search = searching(narrowing(), 4, 2, 512, 8, find_machine("laptop"))
    free = search.plan("gpipe")
    peaks = [m.peak for m in free.priced.places]
    limit = int(0.92 * max(peaks))
    tight = search.plan("gpipe", limit=limit)
    assert peaks[0] > peaks[1] and tight.priced.memory.peak <= limit
    assert tight.solution.starts[1] < free.solution.starts[1] and not tight.priced.plan.recompute
    assert tight.solution.total >= free.solution.total
    with pytest.raises(PlanError, match="no plan fits"):
        search.plan("gpipe", limit=1 << 20)


def test_given_stages_are_kept_and_parted_groups_left_to_cuts_alone() -> None:
    g = GraphBuilder(input=(8, 8, 4))
    x = g.relu(g.norm(g.conv(g.input, 8, 3, pad=1, name="c"), name="n"), name="r")
    graph = g.build(g.linear(g.flatten(x, name="flat"), 3, name="fc")).with_loss(CrossEntropy())
    settings = Settings(graph, 8, MACHINE, "float32", "momentum")
    found = best_stages(settings, ParallelConfig(stages=2, stage={"c": 0, "n": 1}), 4)
    assert found is not None and found.priced.plan.pipeline is not None
    of = found.priced.plan.pipeline.stages
    assert of == {"c": 0, **dict.fromkeys(("n", "r", "flat", "fc", "loss"), 1)}
    assert best_stages(settings, ParallelConfig(stages=2, stage={"n": 0, "r": 1}), 4) is None  # they share a grid
    with pytest.raises(PlanError, match="got stage 2, expected 0 to 1"):
        best_stages(settings, ParallelConfig(stages=2, stage={"c": 2}), 4)


def test_solutions_say_what_each_stage_keeps() -> None:
    """Weights and their companions once, activations for every micro-batch in flight."""
    search = searching(chain(4), 4, 2)
    found = search.plan("1f1b").solution
    assert isinstance(found, Stretches)
    once, twice = (search.held(found, [k, k]) for k in (1, 2))
    names, cut = list(search.network.costs), found.starts[1]
    for s, part in enumerate((names[:cut], names[cut:])):
        kept = sum(search.network.each[n][found.choice[n]] for n in part)
        assert twice[s] - once[s] == pytest.approx(kept) and kept > 0


def wide_chain(layers: int) -> Graph:
    g = GraphBuilder(input=(4096,))
    x = g.input
    for i in range(layers):
        x = g.linear(x, 4096, bias=False, name=f"fc{i}")
    return g.build(x).with_loss(CrossEntropy())


def test_cuts_alone_are_what_the_search_finds_where_each_stage_is_one_process() -> None:
    """Partition only by cut: nothing moves but values across borders, and the loss."""
    priced = searching(wide_chain(4), 4, 4).plan("1f1b").priced
    moves = {
        (s.move.kind, s.phase) for s in priced.program.steps if isinstance(s, Start) and s.node not in ("loss", "hits")
    }
    assert moves == {("p2p", "forward"), ("p2p", "backward")}
    assert priced.plan.pipeline is not None
    assert [priced.plan.pipeline.stages[f"fc{i}"] for i in range(4)] == [0, 1, 2, 3]


def test_a_merged_block_is_what_the_search_finds_where_samples_cannot_be_split() -> None:
    """Filters, then channels: inside the last block of two layers nothing moves, and one sum ends it."""
    search = searching(wide_chain(4), 4, 2, batch=4, micros=4)
    priced = search.plan("1f1b", given={"fc1": 0, "fc2": 1}).priced
    assert [set(priced.plan[name]) for name in ("fc2", "fc3")] == [{"F"}, {"C"}]
    moved = [s for s in priced.program.steps if isinstance(s, Start) and s.phase == "forward"]
    assert not [s for s in moved if s.src.startswith("fc2:y")]
    assert [s.move.kind for s in moved if s.src.startswith("fc3:y")] in (["allreduce"] * 4, ["reduce_scatter"] * 4)
