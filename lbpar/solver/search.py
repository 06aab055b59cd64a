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
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from lbpar.errors import PlanError
from lbpar.solver.budget import within_memory
from lbpar.solver.factors import Classes, Factor, Floats, Ints, Problem, Workshop
from lbpar.solver.run import Solution, run

Name = TypeVar("Name", bound=Hashable)


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
    seed: int = 0,
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
    gap : with a memory limit, stop once the answer is proven within this relative gap; 0 asks for the optimum. The search
        also stops after a fixed number of subproblems; ``Solution.gap`` says what was proven.
    seed : for the restarts of the bounded search; the exact search uses no randomness.

    Returns
    -------
    Solution
        Ties between equal optima are broken the same way every time.

    Raises
    ------
    PlanError
        A shape does not fit, a cost is NaN, an edge names an unknown node, every choice is forbidden, or nothing
        fits in ``limit`` (the message gives the smallest footprint).
    """
    names, problem, workshop = compile_problem(node_costs, edges)
    space = 1
    for u in problem.unary:
        space *= len(u)
    if limit is not None:
        return within_memory(names, problem, memory or {}, limit, space, states_limit, gap, seed)
    found = run(problem, workshop, states_limit, seed)
    if not np.isfinite(found.total):
        raise PlanError("search: every choice is forbidden (cost inf); allow at least one configuration for each node")
    used = None
    if memory is not None:
        used = float(
            sum(np.asarray(memory[n], float)[c] for n, c in zip(names, found.choice, strict=True) if n in memory)
        )
    return found.named(names, space, used)


def compile_problem(
    node_costs: Mapping[Name, ArrayLike], edges: Mapping[tuple[Name, Name], ArrayLike | EdgeTable]
) -> tuple[list[Name], Problem, Workshop]:
    """Check the input and turn it into numbered variables and compressed factors."""
    workshop = Workshop()
    names = list(node_costs)
    number = {n: i for i, n in enumerate(names)}
    unary: list[Floats] = []
    for n in names:
        u = np.asarray(node_costs[n], np.float64)
        if u.ndim != 1 or u.size == 0:
            raise PlanError(f"search: node {n!r} has costs of shape {u.shape}; expected (k,), k >= 1 configurations")
        if np.isnan(u).any() or (u == -np.inf).any():
            raise PlanError(f"search: node {n!r} has a cost that is NaN or -inf at configuration {_first_bad(u)}")
        unary.append(workshop.intern(u))
    factors: list[Factor] = []
    for (a, b), given in edges.items():
        for end in (a, b):
            if end not in number:
                raise PlanError(f"search: edge {(a, b)!r} names {end!r}, which has no node costs")
        i, j = number[a], number[b]
        shape = (unary[i].size, unary[j].size)
        rows, columns, table = _edge((a, b), given, shape, workshop)
        if i == j:
            unary[i] = unary[i] + table[rows.index, columns.index]
        else:
            factors.append(Factor((i, j), (rows, columns), table))
    return names, Problem(unary, factors), workshop


def _edge(
    name: tuple, given: ArrayLike | EdgeTable, shape: tuple[int, int], workshop: Workshop
) -> tuple[Classes, Classes, Floats]:
    known = workshop.recall(("edge", id(given)))
    if known is not None and known[0].index.size == shape[0] and known[1].index.size == shape[1]:
        return known
    if isinstance(given, EdgeTable):
        _check_edge(name, given.table)
        if (given.rows.size, given.columns.size) != shape:
            raise PlanError(
                f"search: edge {name!r} maps {given.rows.size} x {given.columns.size} configurations; "
                f"its nodes have {shape[0]} x {shape[1]}"
            )
        for side, size in ((given.rows, given.table.shape[0]), (given.columns, given.table.shape[1])):
            if np.min(side) < 0 or np.max(side) >= size:
                raise PlanError(
                    f"search: edge {name!r} maps a configuration outside its table of shape {given.table.shape}"
                )
        rows, first = _used(given.rows)  # classes that no configuration has are left out
        columns, second = _used(given.columns)
        table = np.asarray(given.table, np.float64)
        if table.shape != (len(first), len(second)):
            table = table[np.ix_(first, second)]
        table = workshop.intern(table)
        out = (workshop.classes(rows, len(first)), workshop.classes(columns, len(second)), table)
    else:
        matrix = np.asarray(given, np.float64)
        if matrix.shape != shape:
            raise PlanError(f"search: edge {name!r} has costs of shape {matrix.shape}; its nodes expect {shape}")
        _check_edge(name, matrix)
        out = workshop.compress(workshop.intern(matrix))
    return workshop.remember(("edge", id(given)), out, given)


def _check_edge(name: tuple, matrix: Floats) -> None:
    if np.isnan(matrix).any() or (matrix == -np.inf).any():
        raise PlanError(f"search: edge {name!r} has a cost that is NaN or -inf")


def _first_bad(u: Floats) -> int:
    return int(np.flatnonzero(np.isnan(u) | (u == -np.inf))[0])


def _used(index: Ints) -> tuple[Ints, Ints]:
    index = np.asarray(index, np.int64)
    counts = np.bincount(index)
    used = np.flatnonzero(counts)
    return (index if used.size == counts.size else np.searchsorted(used, index)), used
