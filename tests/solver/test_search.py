"""What a search is given and gives back."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.errors import PlanError
from lbpar.solver.search import EdgeTable, minimise
from tests.util.costs import brute_force


def test_edge_tables_equal_full_matrices():
    rng = np.random.default_rng(3)
    table = EdgeTable(rng.random((2, 3)), np.array([0, 1, 1, 0, 1]), np.array([2, 0, 1, 1]))
    nodes = {"a": rng.random(5), "b": rng.random(4)}
    full = minimise(nodes, {("a", "b"): table.full()})
    assert minimise(nodes, {("a", "b"): table}).choice == full.choice
    assert full.total == pytest.approx(brute_force(nodes, {("a", "b"): table.full()}))


def test_forbidden_configurations_are_avoided():
    nodes = {"a": [0.0, np.inf, 1.0], "b": [0.0, 0.0]}
    edges = {("a", "b"): [[np.inf, np.inf], [0.0, 0.0], [np.inf, 3.0]]}
    found = minimise(nodes, edges)
    assert found.choice == {"a": 2, "b": 1} and found.total == 4.0
    with pytest.raises(PlanError, match="forbidden"):
        minimise({"a": [np.inf]}, {})


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
