"""Cuts and configurations chosen together, against all of them."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from lbpar.errors import PlanError
from lbpar.solver import exact
from lbpar.solver.search import EdgeTable
from lbpar.solver.stretches import Ordered, Read, _Search, cheapest_cuts, cut_and_choose


def random_network(rng: np.random.Generator) -> Ordered:
    """Up to six nodes of up to three configurations; every node but the first reads some earlier ones."""
    names = [f"n{i}" for i in range(int(rng.integers(3, 7)))]
    sizes = {n: int(rng.integers(1, 4)) for n in names}

    def table(u: str, v: str, low: float, high: float) -> EdgeTable:
        rows = rng.integers(0, 2, sizes[u])
        return EdgeTable(rng.uniform(low, high, (2, sizes[v])), rows, np.arange(sizes[v]))

    edges, reads = {}, dict[str, list[list[Read]]]()
    for i, v in enumerate(names[1:], 1):
        sources = {names[i - 1], *(names[k] for k in range(i - 1) if rng.random() < 0.3)}
        for u in names[:i]:
            if u in sources:
                edges[u, v] = table(u, v, -0.2, 1.0)
                read = Read(v, table(u, v, 0.0, 1.5), table(u, v, 0.0, 1.0))
                values = reads.setdefault(u, [[]])
                values[-1].append(read)
                if rng.random() < 0.2:  # the next one reads another value of the node, this one maybe, too
                    values.append([read] if rng.random() < 0.5 else [])
    costs = {n: rng.uniform(0.5, 2.0, k) for n, k in sizes.items()}
    return Ordered(costs, edges, reads, *({n: rng.uniform(0, 1, k) for n, k in sizes.items()} for _ in range(2)))


def periods(net: Ordered, starts: tuple[int, ...], choice: dict[str, int]) -> list[float]:
    """Written from the definition."""
    names = list(net.costs)
    stage = {n: sum(i >= s for s in starts) - 1 for i, n in enumerate(names)}
    out = [0.0] * len(starts)
    for n in names:
        out[stage[n]] += net.costs[n][choice[n]]
    for (u, v), e in net.edges.items():
        if stage[u] == stage[v]:
            out[stage[v]] += e.full()[choice[u], choice[v]]
    for u, value in ((u, value) for u, values in net.reads.items() for value in values):
        met = set()
        for r in value:
            s = stage[r.name]
            if s != stage[u]:
                out[s] += (r.again if s in met else r.first).full()[choice[u], choice[r.name]]
                met.add(s)
    return out


def brute(net: Ordered, parts: int, most: float, every: float, limits: list[float] | None, flight: list[int]) -> float:
    names, best = list(net.costs), np.inf
    for cuts in combinations(range(1, len(names)), parts - 1):
        starts = (0, *cuts)
        for numbers in product(*(range(c.size) for c in net.costs.values())):
            choice = dict(zip(names, numbers, strict=True))
            if limits is not None:
                ends = (*cuts, len(names))
                held = [
                    sum(net.fixed[n][choice[n]] + flight[s] * net.each[n][choice[n]] for n in names[i:j])
                    for s, (i, j) in enumerate(zip(starts, ends, strict=True))
                ]
                if any(h > m for h, m in zip(held, limits, strict=True)):
                    continue
            costs = periods(net, starts, choice)
            best = min(best, most * max(costs) + every * sum(costs))
    return best


@pytest.mark.parametrize("seed", range(60))
def test_the_best_of_all_cuts_and_configurations_is_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    net = random_network(rng)
    parts = int(rng.integers(1, min(4, len(net.costs)) + 1))
    most, every = float(rng.choice([0.0, 3.0, 15.0])), float(rng.choice([0.0, 1 / 3, 1.0]))
    found = cut_and_choose(net, parts, most, every)
    assert found.total == pytest.approx(brute(net, parts, most, every, None, [])) and found.gap == 0
    costs = periods(net, tuple(found.starts), found.choice)
    assert costs == pytest.approx(found.costs)
    assert found.total == pytest.approx(most * max(costs) + every * sum(costs))


@pytest.mark.parametrize("seed", range(40))
def test_each_stretch_keeps_its_limit(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    net, parts = random_network(rng), 2
    flight = [2, 1]
    limits = [float(x) for x in rng.uniform(1.0, 6.0, parts)]
    wanted = brute(net, parts, 7.0, 1.0, limits, flight)
    if not np.isfinite(wanted):
        with pytest.raises(PlanError, match="no cut"):
            cut_and_choose(net, parts, 7.0, 1.0, limits=limits, flight=flight)
        return
    found = cut_and_choose(net, parts, 7.0, 1.0, limits=limits, flight=flight)
    assert found.total == pytest.approx(wanted) and found.gap == 0


def test_pinned_nodes_are_in_their_stretch() -> None:
    net = random_network(np.random.default_rng(3))
    names = list(net.costs)
    found = cut_and_choose(net, 2, 1.0, 0.0, pinned={names[-2]: 0})
    assert found.starts == [0, len(names) - 1]
    with pytest.raises(PlanError, match="no cut gives"):
        cut_and_choose(net, 2, 1.0, 0.0, pinned={names[0]: 1})


def test_the_space_is_counted() -> None:
    costs = {f"n{i}": np.zeros(3) for i in range(5)}
    assert Ordered(costs, {}, {}).space(3) == 6 * 3**5


@pytest.mark.parametrize("seed", range(20))
def test_cuts_weigh_the_largest_stretch_and_the_sum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, parts = 7, 3
    costs = [np.triu(rng.uniform(1, 9, (n + 1, n + 1)), 1) for _ in range(parts)]
    costs = [np.where(c > 0, c, np.inf) for c in costs]
    most, every = float(rng.uniform(0, 4)), float(rng.uniform(0, 2))
    found = cheapest_cuts(costs, most, every)
    values = []
    for cuts in combinations(range(1, n), parts - 1):
        own = [float(c[i, j]) for c, i, j in zip(costs, (0, *cuts), (*cuts, n), strict=True)]
        values.append(most * max(own) + every * sum(own))
    assert found is not None and most * found[0] + every * found[1] == pytest.approx(min(values))


def long_network(rng: np.random.Generator) -> Ordered:
    """Fourteen nodes; here and there a node reads the one before the last."""
    names = [f"n{i}" for i in range(14)]
    sizes = {n: int(rng.integers(1, 4)) for n in names}

    def table(u: str, v: str) -> EdgeTable:
        return EdgeTable(rng.uniform(-0.2, 1.0, (sizes[u], sizes[v])), np.arange(sizes[u]), np.arange(sizes[v]))

    edges, reads = {}, dict[str, list[list[Read]]]()
    for i, v in enumerate(names[1:], 1):
        for u in names[max(0, i - 1 - int(rng.random() < 0.4)) : i]:
            edges[u, v] = table(u, v)
            reads.setdefault(u, [[]])[0].append(Read(v, table(u, v), table(u, v)))
    return Ordered({n: rng.uniform(0.5, 2.0, k) for n, k in sizes.items()}, edges, reads)


@pytest.mark.parametrize("seed", range(12))
def test_bounds_of_stretches_that_hold_a_joint_are_exact(seed: int) -> None:
    """As a search of each stretch finds, nodes outside chosen freely; bounds of others are not above."""
    net = long_network(np.random.default_rng(seed))
    search = _Search(net, 3, 1.0, 1.0, {}, None, None, {})
    joints, bounds, n = search._joints(), search._cheap(), len(net.costs)
    spanning = 0
    for i, j in combinations(range(n + 1), 2):
        best = search.search(0, i, j, {}).bound
        assert bounds[i, j] <= best + 1e-12
        if any(i <= c < j - 1 for c in joints):
            spanning += 1
            assert bounds[i, j] == pytest.approx(best)
    assert spanning > 20


@pytest.mark.parametrize("cells", [1, 8])
def test_blocks_whose_tables_do_not_fit_have_cheaper_bounds(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    nets = [long_network(np.random.default_rng(seed)) for seed in range(6)]
    want = [cut_and_choose(net, 3, 3.0, 1.0).total for net in nets]
    monkeypatch.setattr(exact, "MOST_CELLS", cells)
    for net, best in zip(nets, want, strict=True):
        found = cut_and_choose(net, 3, 3.0, 1.0)
        assert found.total == pytest.approx(best) and found.gap == 0
