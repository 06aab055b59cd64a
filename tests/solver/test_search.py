"""The search against brute force, its bounds, its ties and its refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lbpar.errors import PlanError
from lbpar.papers.reduction import eliminate_to_k
from lbpar.solver import bounded as bounded_module
from lbpar.solver import factors as factors_module
from lbpar.solver import run as search_module
from lbpar.solver.bounded import mini_buckets
from lbpar.solver.order import plan_order
from lbpar.solver.prune import prune
from lbpar.solver.search import EdgeTable, compile_problem, minimise
from lbpar.solver.tighten import narrow


def random_graph(rng, kind):
    """Node costs and edge costs of a small random graph; about one in three matrices has few distinct rows."""
    n = int(rng.integers(2, 8))
    ks = rng.integers(1, 5, n)
    pairs = set()
    if kind == "tree":
        pairs = {(int(rng.integers(0, v)), v) for v in range(1, n)}
    elif kind == "series-parallel":
        pairs = {(0, 1)}
        for v in range(2, n):
            a, b = sorted(pairs)[int(rng.integers(len(pairs)))]
            pairs |= {(a, v), (v, b)}
            if rng.random() < 0.5:
                pairs.discard((a, b))
    else:
        pairs = {(a, b) for a in range(n) for b in range(n) if a != b and rng.random() < 0.5}
    integral = rng.random() < 0.5  # integers make ties
    draw = (lambda *s: rng.integers(0, 6, s).astype(float)) if integral else (lambda *s: rng.normal(size=s))
    nodes = {f"n{i}": draw(k) for i, k in enumerate(ks)}
    edges = {}
    for a, b in sorted(pairs):
        m = draw(ks[a], ks[b])
        if rng.random() < 0.3:
            m = m[rng.integers(0, ks[a], ks[a])]
        edges[f"n{a}", f"n{b}"] = m
    return nodes, edges


def value(nodes, edges, choice):
    return sum(u[choice[n]] for n, u in nodes.items()) + sum(e[choice[a], choice[b]] for (a, b), e in edges.items())


def brute_force(nodes, edges, memory=None, limit=np.inf):
    best = np.inf
    for c in itertools.product(*(range(len(u)) for u in nodes.values())):
        choice = dict(zip(nodes, c, strict=True))
        if memory is not None and sum(memory[n][i] for n, i in choice.items()) > limit:
            continue
        best = min(best, value(nodes, edges, choice))
    return best


CASES = [(seed, ("tree", "series-parallel", "dense")[seed % 3]) for seed in range(210)]


@pytest.mark.parametrize("block", range(7))
def test_equals_brute_force(block):
    for seed, kind in CASES[block::7]:
        nodes, edges = random_graph(np.random.default_rng(seed), kind)
        found = minimise(nodes, edges)
        assert found.exact and found.gap == 0 and found.bound == found.total
        assert found.total == pytest.approx(value(nodes, edges, found.choice), rel=1e-12, abs=1e-12)
        assert found.total == pytest.approx(brute_force(nodes, edges), rel=1e-12, abs=1e-12), (seed, kind)
        assert found.space_size == np.prod([len(u) for u in nodes.values()])
        assert minimise(nodes, edges).choice == found.choice


def test_dominated_configurations_go_without_losing_the_optimum():
    removed = 0
    for seed, kind in CASES:
        nodes, edges = random_graph(np.random.default_rng(seed), kind)
        _, problem, workshop = compile_problem(nodes, edges)
        smaller, kept = prune(problem, workshop)
        removed += sum(len(u) for u in nodes.values()) - sum(map(len, kept))
        left = {n: u[k] for (n, u), k in zip(nodes.items(), kept, strict=True)}
        where = dict(zip(nodes, kept, strict=True))
        rest = {(a, b): e[np.ix_(where[a], where[b])] for (a, b), e in edges.items()}
        assert brute_force(left, rest) == pytest.approx(brute_force(nodes, edges), abs=1e-12), (seed, kind)
        assert [len(u) for u in smaller.unary] == [len(k) for k in kept]
    assert removed > 500


@pytest.mark.parametrize("block", range(3))
def test_narrowing_keeps_the_optimum(monkeypatch, block):
    monkeypatch.setattr(search_module, "CHEAP_CELLS", 0)  # every search is narrowed, and narrowed to the end
    for seed, kind in CASES[block::3]:
        nodes, edges = random_graph(np.random.default_rng(seed), kind)
        if seed % 7 == 0:  # forbid a few
            for cost in nodes.values():
                cost[1::2] = np.inf
        optimum = brute_force(nodes, edges)
        found = minimise(nodes, edges)
        assert found.exact and found.total == pytest.approx(optimum, rel=1e-12, abs=1e-12), (seed, kind)
        _, problem, _ = compile_problem(nodes, edges)
        narrowed = narrow(problem, lambda p: False, 10_000)
        assert narrowed.bound <= optimum + 1e-9 <= narrowed.total + 2e-9
        left = {n: u[k] for (n, u), k in zip(nodes.items(), narrowed.kept, strict=True)}
        where = dict(zip(nodes, narrowed.kept, strict=True))
        rest = {(a, b): e[np.ix_(where[a], where[b])] for (a, b), e in edges.items()}
        assert brute_force(left, rest) == pytest.approx(optimum, rel=1e-12, abs=1e-12), (seed, kind)


def test_narrowing_is_exact_on_a_chain_and_strong_on_a_grid():
    rng = np.random.default_rng(2)
    nodes = {i: rng.random(40) for i in range(30)}
    chain = {(i, i + 1): rng.random((40, 40)) for i in range(29)}
    _, problem, _ = compile_problem(nodes, chain)
    narrowed = narrow(problem, lambda p: False, 10**6)
    best = minimise(nodes, chain).total
    assert narrowed.bound == pytest.approx(best) and narrowed.total == pytest.approx(best)
    assert sum(map(len, narrowed.kept)) <= 60
    skips = chain | {(i, i + 4): 0.2 * rng.random((40, 40)) for i in range(26)}
    _, problem, _ = compile_problem(nodes, skips)
    narrowed = narrow(problem, lambda p: False, 10**6)
    assert narrowed.bound > 0.9 * narrowed.total


def test_small_chunks_give_the_same(monkeypatch):
    monkeypatch.setattr(factors_module, "CHUNK_CELLS", 4)
    for seed, kind in CASES[::5]:
        nodes, edges = random_graph(np.random.default_rng(seed), kind)
        assert minimise(nodes, edges).total == pytest.approx(brute_force(nodes, edges), abs=1e-12), (seed, kind)


def test_bounds_enclose_the_optimum_when_tables_are_too_large(monkeypatch):
    monkeypatch.setattr(bounded_module, "ROUNDS", 4)
    inexact = 0
    for seed in range(2, 120, 3):
        nodes, edges = random_graph(np.random.default_rng(seed), "dense")
        optimum = brute_force(nodes, edges)
        _, problem, _ = compile_problem(nodes, edges)
        bound, choice, _, _ = mini_buckets(problem, plan_order(problem), 6)
        assert bound <= optimum + 1e-9
        assert problem.total(choice) >= optimum - 1e-9
        inexact += bound < optimum - 1e-9
        found = minimise(nodes, edges, states_limit=10)
        assert found.bound <= optimum + 1e-9 and found.total >= optimum - 1e-9
        assert not found.exact or found.total == pytest.approx(optimum, abs=1e-9)
    assert inexact > 3


def test_a_wide_graph_is_bounded_and_says_so():
    rng = np.random.default_rng(5)
    names = range(24)
    nodes = {n: rng.random(8) for n in names}
    edges = {(a, b): rng.random((8, 8)) for a in names for b in names if a < b}
    found = minimise(nodes, edges, states_limit=200_000)
    assert not found.exact
    assert 0 < found.gap < 1
    assert found.bound < found.total
    assert found.total == pytest.approx(value(nodes, edges, found.choice))
    greedy = min(value(nodes, edges, {n: int(rng.integers(8)) for n in names}) for _ in range(200))
    assert found.total < greedy
    assert minimise(nodes, edges, states_limit=200_000).choice == found.choice


def test_ties_keep_the_first_configuration():
    nodes = {n: np.zeros(4) for n in "abc"}
    edges = {("a", "b"): np.zeros((4, 4)), ("b", "c"): np.zeros((4, 4))}
    assert minimise(nodes, edges).choice == {"a": 0, "b": 0, "c": 0}


def test_edge_tables_equal_full_matrices():
    rng = np.random.default_rng(3)
    table = EdgeTable(rng.random((2, 3)), np.array([0, 1, 1, 0, 1]), np.array([2, 0, 1, 1]))
    nodes = {"a": rng.random(5), "b": rng.random(4)}
    full = minimise(nodes, {("a", "b"): table.full()})
    assert minimise(nodes, {("a", "b"): table}).choice == full.choice
    assert full.total == pytest.approx(brute_force(nodes, {("a", "b"): table.full()}))


def test_long_repeated_chain_is_evaluated_once():
    rng = np.random.default_rng(1)
    cost, edge = rng.random(30), rng.random((30, 30))
    nodes = {i: cost for i in range(200)}
    edges = {(i, i + 1): edge for i in range(199)}
    found = minimise(nodes, edges)
    state = cost.copy()
    for _ in range(199):
        state = (state[:, None] + edge).min(axis=0) + cost
    assert found.total == pytest.approx(state.min(), rel=1e-12)
    assert found.space_size == 30**200


def test_forbidden_configurations_are_avoided():
    nodes = {"a": [0.0, np.inf, 1.0], "b": [0.0, 0.0]}
    edges = {("a", "b"): [[np.inf, np.inf], [0.0, 0.0], [np.inf, 3.0]]}
    found = minimise(nodes, edges)
    assert found.choice == {"a": 2, "b": 1} and found.total == 4.0
    with pytest.raises(PlanError, match="forbidden"):
        minimise({"a": [np.inf]}, {})


@pytest.mark.parametrize("kind", ["tree", "series-parallel", "dense"])
def test_memory_limit_is_exact(kind):
    for seed in range(40):
        rng = np.random.default_rng(1000 + seed)
        nodes, edges = random_graph(rng, kind)
        memory = {n: rng.integers(0, 9, len(u)).astype(float) for n, u in nodes.items()}
        least = sum(m.min() for m in memory.values())
        most = sum(m.max() for m in memory.values())
        limit = float(np.floor(least + rng.random() * (most - least)))
        found = minimise(nodes, edges, memory=memory, limit=limit)
        assert found.exact, (seed, kind)
        assert found.memory == sum(memory[n][c] for n, c in found.choice.items()) <= limit
        assert found.total == pytest.approx(brute_force(nodes, edges, memory, limit), abs=1e-9), (seed, kind)


def test_memory_limit_within_a_gap():
    rng = np.random.default_rng(11)
    nodes = {n: rng.random(9) for n in range(12)}
    edges = {(n, n + 1): rng.random((9, 9)) for n in range(11)}
    memory = {n: rng.random(9) for n in nodes}
    limit = 0.3 * sum(m.max() for m in memory.values())
    exact = minimise(nodes, edges, memory=memory, limit=limit)
    rough = minimise(nodes, edges, memory=memory, limit=limit, gap=0.2)
    assert rough.bound <= exact.total + 1e-9 <= rough.total + 2e-9
    assert rough.gap <= 0.2 and rough.memory <= limit and rough.states <= exact.states


def test_memory_limit_that_nothing_fits_names_the_smallest_footprint():
    nodes = {"conv": [0.0, 1.0], "fc": [0.0]}
    with pytest.raises(PlanError, match=r"smallest footprint is 12, of which 'conv' needs 8"):
        minimise(nodes, {}, memory={"conv": [9.0, 8.0], "fc": [4.0]}, limit=11)


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ({"a": []}, {}, "shape"),
        ({"a": [[1.0]]}, {}, "shape"),
        ({"a": [np.nan]}, {}, "NaN"),
        ({"a": [0.0], "b": [0.0]}, {("a", "b"): [[np.nan]]}, "NaN"),
        ({"a": [0.0], "b": [0.0]}, {("a", "b"): [[0.0, 1.0]]}, "shape"),
        ({"a": [0.0]}, {("a", "z"): [[0.0]]}, "'z'"),
    ],
)
def test_bad_input_is_named(nodes, edges, message):
    with pytest.raises(PlanError, match=message):
        minimise(nodes, edges)


def test_empty_graph():
    assert minimise({}, {}).total == 0.0


def test_self_edges_and_both_directions_add_up():
    rng = np.random.default_rng(7)
    nodes = {"a": rng.random(3), "b": rng.random(3)}
    edges = {("a", "a"): rng.random((3, 3)), ("a", "b"): rng.random((3, 3)), ("b", "a"): rng.random((3, 3))}
    assert minimise(nodes, edges).total == pytest.approx(brute_force(nodes, edges))


def test_folding_a_series_parallel_graph_leaves_two_nodes_and_the_optimum():
    for seed in range(1, 60, 3):
        nodes, edges = random_graph(np.random.default_rng(seed), "series-parallel")
        edges = {(a, b): e for (a, b), e in edges.items()}
        folded = eliminate_to_k(nodes, edges)
        assert folded.total == pytest.approx(brute_force(nodes, edges), abs=1e-12)
        assert folded.k == len(folded.remaining) == len(nodes) - len(folded.eliminated)
    diamond = {("a", "b"): np.zeros((2, 2)), ("a", "c"): np.zeros((2, 2)), ("b", "d"): np.zeros((2, 2))}
    diamond["c", "d"] = np.zeros((2, 2))
    folded = eliminate_to_k({n: np.zeros(2) for n in "abcd"}, diamond)
    assert folded.remaining == ("a", "d") and folded.combinations == 4


def test_folding_stops_at_a_node_with_two_consumers_that_never_meet():
    edges = {(a, b): np.zeros((2, 2)) for a, b in ["ab", "bc", "bd"]}
    assert eliminate_to_k({n: np.zeros(2) for n in "abcd"}, edges).remaining == ("a", "b", "c", "d")
