"""Exact minimisation of node costs plus edge costs over a graph.

    total(choice) = sum over nodes of node_costs[v][choice[v]] + sum over edges of edges[u, v][choice[u], choice[v]]

The method is variable elimination in the (min, +) algebra, the tensor form of the dependent-set dynamic programming
of PaSE (Elango, IPDPS 2021) and of the node and edge elimination of OptCNN (Jia et al., ICML 2018), on tables over
classes of configurations. It is exact for any graph; its cost grows with the graph's width. Where that
cost passes ``states_limit``, the answer is bounded from both sides and says so.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from lbpar.errors import PlanError
from lbpar.solver.budget import within_memory
from lbpar.solver.cache import Cache
from lbpar.solver.factors import Classes, Factor, Floats, Ints, Problem
from lbpar.solver.run import run

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Solution:
    """The outcome of a search.

    Attributes
    ----------
    choice : configuration number of every node.
    total : objective of ``choice``.
    bound : no choice costs less than this; equals ``total`` when ``exact``.
    exact : whether ``total`` is proven minimal.
    width : most neighbours of a node when it was eliminated (its dependent set).
    states : table cells evaluated; repeated tables count once.
    space_size : number of choices, the product of the numbers of configurations.
    memory : sum of the memory of the chosen configurations, where memory was given.
    """

    choice: dict
    total: float
    width: int
    states: int
    space_size: int
    exact: bool
    bound: float
    memory: float | None = None

    @property
    def gap(self) -> float:
        """Relative gap (total - bound) / |total|; 0 when exact."""
        return 0.0 if self.exact or self.total == self.bound else (self.total - self.bound) / abs(self.total)


@dataclass(frozen=True, eq=False)
class EdgeTable:
    """An edge cost matrix stored by class: the cost of (cu, cv) is ``table[rows[cu], columns[cv]]``.

    ``rows``: shape (k_u,), ``columns``: shape (k_v,), integers; ``table``: float64. Use it where many configurations
    give a tensor the same layout, so that the full matrix need never be made.
    """

    table: Floats
    rows: Ints
    columns: Ints

    def full(self) -> Floats:
        """The matrix of shape (k_u, k_v)."""
        return self.table[np.ix_(self.rows, self.columns)]


def minimise(
    node_costs: Mapping[Name, ArrayLike],
    edges: Mapping[tuple[Name, Name], ArrayLike | EdgeTable],
    *,
    memory: Mapping[Name, ArrayLike] | None = None,
    limit: float | None = None,
    states_limit: int = 1_000_000_000,
    gap: float = 0.0,
    cache: Cache | None = None,
) -> Solution:
    """Choose one configuration per node so that node plus edge costs are least.

    Parameters
    ----------
    node_costs : for each node a vector, shape (k_v,); inf forbids a configuration. k_v may differ between nodes.
    edges : for pairs of nodes a matrix of shape (k_u, k_v) or an :class:`EdgeTable`. (u, v) and (v, u) may both be
        there and add up. Passing the same object for equal tables saves comparing them.
    memory : for each node a vector, shape (k_v,), of what a configuration occupies; nodes left out occupy nothing.
    limit : most that the memories of the chosen configurations may sum to.
    states_limit : table cells that the exact elimination may need; beyond, the search is bounded, not exact, and spends about
        as many.
    gap : with a memory limit, stop once the answer is proven within this relative gap; 0 asks for the optimum.
    cache : what searches of parts of one network share, so that blocks which occur in several are worked on once.

    Returns
    -------
    Solution
        Ties between equal optima are broken the same way every time. With a memory limit, the search stops after a fixed number of
        subproblems; ``Solution.gap`` says what was proven.

    Raises
    ------
    PlanError
        A shape does not fit, a cost is NaN, an edge names an unknown node, every choice is forbidden, or nothing
        fits in ``limit`` (the message gives the smallest footprint).
    """
    names, problem, cache = compile_problem(node_costs, edges, cache)
    held = None if memory is None else [_held(n, u, memory) for n, u in zip(names, problem.unary, strict=True)]
    if limit is None:
        found = run(problem, cache, states_limit)
    else:
        held = held or [np.zeros(u.size) for u in problem.unary]
        found = within_memory(names, problem, held, limit, states_limit, gap)
    if not np.isfinite(found.total):
        raise PlanError("search: every choice is forbidden (cost inf); allow at least one configuration for each node")
    exact = found.bound >= found.total - 1e-11 * abs(found.total)
    return Solution(
        dict(zip(names, found.choice, strict=True)),
        found.total,
        found.width,
        found.cells,
        prod(u.size for u in problem.unary),
        exact,
        found.total if exact else found.bound,
        None if held is None else float(sum(m[c] for m, c in zip(held, found.choice, strict=True))),
    )


def _held(name: Hashable, unary: Floats, memory: Mapping[Any, ArrayLike]) -> Floats:
    """What each configuration of a node occupies."""
    m = np.asarray(memory.get(name, np.zeros(unary.size)), np.float64)
    if m.shape != unary.shape or not np.isfinite(m).all():
        raise PlanError(
            f"search: memory of node {name!r} has shape {m.shape}; expected finite values of shape {unary.shape}"
        )
    return m


def compile_problem(
    node_costs: Mapping[Name, ArrayLike],
    edges: Mapping[tuple[Name, Name], ArrayLike | EdgeTable],
    cache: Cache | None = None,
) -> tuple[list[Name], Problem, Cache]:
    """Check the input and turn it into numbered variables and compressed factors."""
    cache = cache or Cache()
    names = list(node_costs)
    number = {n: i for i, n in enumerate(names)}
    unary: list[Floats] = []
    for n in names:
        u = np.asarray(node_costs[n], np.float64)
        if u.ndim != 1 or u.size == 0:
            raise PlanError(f"search: node {n!r} has costs of shape {u.shape}; expected (k,), k >= 1 configurations")
        bad = np.flatnonzero(np.isnan(u) | (u == -np.inf))
        if bad.size:
            raise PlanError(f"search: node {n!r} has a cost that is NaN or -inf at configuration {bad[0]}")
        unary.append(cache.intern(u))
    factors: list[Factor] = []
    made: dict[int, tuple[Classes, Classes, Floats]] = {}  # by identity: equal edges of a network are one object
    for (a, b), given in edges.items():
        for end in (a, b):
            if end not in number:
                raise PlanError(f"search: edge {(a, b)!r} names {end!r}, which has no node costs")
        i, j = number[a], number[b]
        if id(given) not in made:
            made[id(given)] = _edge((a, b), given, cache)
        rows, columns, table = made[id(given)]
        shape, expected = (rows.index.size, columns.index.size), (unary[i].size, unary[j].size)
        if shape != expected:
            raise PlanError(f"search: edge {(a, b)!r} has costs of shape {shape}; its nodes expect {expected}")
        if i == j:
            unary[i] = unary[i] + table[rows.index, columns.index]
        else:
            factors.append(Factor((i, j), (rows, columns), table))
    return names, Problem(unary, factors), cache


def _edge(name: tuple, given: ArrayLike | EdgeTable, cache: Cache) -> tuple[Classes, Classes, Floats]:
    """Maps of both sides and the table over their classes."""
    table = np.asarray(given.table if isinstance(given, EdgeTable) else given, np.float64)
    if table.ndim != 2:
        raise PlanError(f"search: edge {name!r} has costs of shape {table.shape}; expected two dimensions")
    if np.isnan(table).any() or (table == -np.inf).any():
        raise PlanError(f"search: edge {name!r} has a cost that is NaN or -inf")
    if not isinstance(given, EdgeTable):
        return cache.compress(cache.intern(table))
    for side, size in zip((given.rows, given.columns), table.shape, strict=True):
        if np.min(side) < 0 or np.max(side) >= size:
            raise PlanError(f"search: edge {name!r} maps a configuration outside its table of shape {table.shape}")
    # Classes that no configuration has are left out.
    (rows, first), (columns, second) = _used(given.rows), _used(given.columns)
    if table.shape != (len(first), len(second)):
        table = table[np.ix_(first, second)]
    return cache.classes(rows, len(first)), cache.classes(columns, len(second)), cache.intern(table)


def _used(index: Ints) -> tuple[Ints, Ints]:
    """The map over the classes that occur, and which those are."""
    index = np.asarray(index, np.int64)
    used = np.flatnonzero(np.bincount(index))
    return np.searchsorted(used, index), used
