"""Narrowing a search by bounds: configurations that no optimal choice can contain are dropped before elimination.

Costs are moved between nodes and edges without changing any choice's total (sequential tree-reweighted message passing,
Kolmogorov 2006, in its explicit form): a sweep visits the nodes in order, pulls into each node what its edges to visited
nodes must cost at least, and pushes the node's cost on to its edges to the nodes still to come. At any moment the sum of
all nodes' and edges' minima is a lower bound of the optimum, and with one node's minimum replaced by another of its
configurations' cost, of every choice with that configuration. What exceeds the best choice known is dropped. Two sweeps, there and
back, are exact on a chain; networks are close to one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lbpar.solver.cache import Cache
from lbpar.solver.exact import solve_within
from lbpar.solver.factors import Floats, Found, Ints, Problem
from lbpar.solver.reduce import restrict

SLACK = 1e-11  # relative: rounding must never drop the optimum
PROMISING = 12  # configurations per node in the small exact search that gives a good choice
SWEEPS = 100  # pairs of sweeps at most
PATIENCE = 3  # pairs of sweeps in a row that gain little, after which narrowing stops
SMALL_SEARCHES = (0, 2, 8, 24)  # after which pairs a small exact search looks for a better choice
WORTH = 0.95  # part of the configurations that must be all that is left before the others are taken out: it costs as much as some sweeps
FORBIDDEN = 16.0  # times the largest possible total: what stands for a cost of inf


@dataclass(frozen=True)
class Narrowed:
    """A problem over fewer configurations with the same optimum.

    ``kept``: their original numbers; ``best``: the best choice met, in original numbers (empty if all met are forbidden).
    """

    problem: Problem
    kept: list[Ints]
    best: Found


class _Sweeper:
    """Messages of one problem. ``messages[f][side]`` is what factor f has given to its variable ``side``, by class."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.kept = [np.arange(u.size) for u in problem.unary]
        self.unary, self.tables, self.rounding = _finite(problem)
        self.messages = [[np.zeros(m.count) for m in f.maps] for f in problem.factors]
        self.factor_least = np.array([t.min() for t in self.tables])
        self.node_least = np.array([u.min() for u in self.unary])
        self.costs: list[Floats] = list(self.unary)  # a node's configurations' costs when it was last visited
        self.lows = [-np.inf] * len(self.unary)  # the bound at that moment, less the node's least cost
        self.touching: list[list[tuple[int, int]]] = [[] for _ in self.unary]
        for i, f in enumerate(problem.factors):
            for side, v in enumerate(f.scope):
                self.touching[v].append((i, side))
        self.cells = 0

    @property
    def bound(self) -> float:
        return float(self.node_least.sum() + self.factor_least.sum())

    def sweep(self, order: Sequence[int]) -> list[int]:
        """Visit every node in ``order``; return the choice that picks each node's best beside those chosen before."""
        place = {v: i for i, v in enumerate(order)}
        choice = [-1] * len(order)
        for v in order:
            behind: list[tuple[int, int]] = []
            ahead: list[tuple[int, int]] = []
            for i, side in self.touching[v]:
                other = self.problem.factors[i].scope[1 - side]
                (behind if place[other] < place[v] else ahead).append((i, side))
            for i, side in behind:
                given = self.messages[i][1 - side]
                table = self.tables[i] if side == 1 else self.tables[i].T
                self.messages[i][side] = (table - given[:, None]).min(axis=0)
                self.factor_least[i] = 0.0
                self.cells += table.size
            cost = self.unary[v]
            beside = self.unary[v]
            for i, side in self.touching[v]:
                index = self.problem.factors[i].maps[side].index
                cost = cost + self.messages[i][side][index]
                if (i, side) in ahead:
                    beside = beside + self.messages[i][side][index]
                else:
                    f = self.problem.factors[i]
                    there = int(f.maps[1 - side].index[choice[f.scope[1 - side]]])
                    beside = beside + (self.tables[i][there] if side == 1 else self.tables[i][:, there])[index]
            choice[v] = int(np.argmin(beside))
            self.node_least[v] = cost.min()
            self.costs[v] = cost
            self.lows[v] = self.bound - self.node_least[v]
            share = 1.0 / max(len(behind), len(ahead), 1)
            rest = cost
            for i, side in ahead:
                classes = self.problem.factors[i].maps[side]
                push = np.full(classes.count, np.inf)
                np.minimum.at(push, classes.index, share * cost)
                self.messages[i][side] = self.messages[i][side] - push
                self.factor_least[i] += push.min()
                rest = rest - push[classes.index]
            self.node_least[v] = rest.min()
        return choice

    def shrink(self, kept: list[Ints]) -> None:
        """Go on with the configurations ``kept`` (present numbers), keeping the messages."""
        if all(k.size == u.size for k, u in zip(kept, self.unary, strict=True)):
            return
        for i, f in enumerate(self.problem.factors):
            old = [m.among(kept[v])[0] for v, m in zip(f.scope, f.maps, strict=True)]
            self.messages[i] = [m[o] for m, o in zip(self.messages[i], old, strict=True)]
            self.tables[i] = self.tables[i][np.ix_(*old)]
            left, right = self.messages[i]
            self.factor_least[i] = (self.tables[i] - left[:, None] - right[None, :]).min()
        self.problem = restrict(self.problem, kept, Cache())
        self.unary = [u[k] for u, k in zip(self.unary, kept, strict=True)]
        # `lows` stay bounds: fewer choices cost no less.
        self.costs = [c[k] for c, k in zip(self.costs, kept, strict=True)]
        self.kept = [old[k] for old, k in zip(self.kept, kept, strict=True)]
        for v, u in enumerate(self.unary):
            for i, side in self.touching[v]:
                u = u + self.messages[i][side][self.problem.factors[i].maps[side].index]
            self.node_least[v] = u.min()

    def promising(self) -> list[Ints]:
        """The cheapest few configurations of every node, in increasing order."""
        return [np.sort(np.argsort(c, kind="stable")[:PROMISING]) for c in self.costs]

    def within(self, total: float) -> list[Ints]:
        """Configurations that a choice no dearer than ``total`` may contain."""
        most = total + SLACK * abs(total) + self.rounding
        kept = [np.flatnonzero(c + low <= most) for c, low in zip(self.costs, self.lows, strict=True)]
        return [k if k.size else np.array([int(np.argmin(c))]) for k, c in zip(kept, self.costs, strict=True)]


def _finite(problem: Problem) -> tuple[list[Floats], list[Floats], float]:
    """Costs with inf replaced by more than any allowed choice can cost, and the rounding that this may bring."""
    arrays = [*problem.unary, *(f.table for f in problem.factors)]
    if all(np.isfinite(a).all() for a in arrays):
        return list(problem.unary), [f.table for f in problem.factors], 0.0
    most = FORBIDDEN * (1.0 + sum(float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) for a in arrays))
    unary = [np.where(np.isfinite(u), u, most) for u in problem.unary]
    return unary, [np.where(np.isfinite(f.table), f.table, most) for f in problem.factors], 1e-14 * most


def narrow(
    problem: Problem, enough: Callable[[Problem], bool], exact_cells: int, ceiling: float | None = None
) -> Narrowed:
    """Sweep to and fro over the variables in their order, dropping what cannot be optimal.

    With a ``ceiling`` every choice that costs at most that much is kept, not only the optimum.

    Stops when ``enough`` of the smaller problem holds, when bound and total meet, or when sweeps gain little.
    ``exact_cells`` bounds the small exact searches that give good choices.
    """
    sweeper = _Sweeper(problem)
    order = range(len(problem.unary))
    best: list[int] = []
    total, bound, idle, left = float("inf"), -np.inf, 0, sum(u.size for u in problem.unary)
    asked = False  # whether the problem, as small as it is, is enough
    for turn in range(SWEEPS):
        known, count = bound, left
        candidates = [sweeper.sweep(order), sweeper.sweep(order[::-1])]
        if turn in SMALL_SEARCHES:
            small = solve_within(sweeper.problem, sweeper.promising(), lambda order: order.cells <= exact_cells)
            candidates += [small.choice] if small else []
        for choice in candidates:
            value = sweeper.problem.total(choice)
            if value < total:
                best, total = [int(k[c]) for k, c in zip(sweeper.kept, choice, strict=True)], value
        bound = max(bound, sweeper.bound)
        if not best:
            continue
        within = sweeper.within(total if ceiling is None else ceiling)
        mine = [np.searchsorted(k, c) for k, c in zip(sweeper.kept, best, strict=True)]
        kept = [np.union1d(w, [m]) for w, m in zip(within, mine, strict=True)]
        left = sum(k.size for k in kept)
        idle = idle + 1 if left > 0.97 * count and bound - known <= 1e-5 * abs(bound) else 0
        last = total - bound <= SLACK * abs(bound) or idle >= PATIENCE or turn == SWEEPS - 1
        if last or left <= WORTH * sum(u.size for u in sweeper.unary):
            sweeper.shrink(kept)
            asked = False
        if turn and not (last or asked):
            asked, last = True, enough(sweeper.problem)
        if last:
            break
    return Narrowed(sweeper.problem, sweeper.kept, Found(best, total, bound, 0, sweeper.cells))
