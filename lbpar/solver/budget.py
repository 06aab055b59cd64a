"""Minimisation under a memory limit: Lagrangian bounds, closed by branch and bound.

For a price lambda per unit of memory, minimising cost + lambda * memory is a search without a limit, and its value less
lambda * limit is a lower bound. The best price is found by walking the lower convex hull of (memory, cost) between one
choice that fits and one that does not. The
points of the hull are repaired and polished into fitting choices. Where hull and best fitting choice do not meet,
configurations whose own bound exceeds that choice are dropped, then the node with the largest difference of memory
between the two is split in two and both halves are bounded again, best bound first. The answer is exact when the bounds
meet; otherwise the gap is reported.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lbpar.errors import PlanError
from lbpar.solver.factors import Factor, Floats, Ints, Problem, Workshop, row
from lbpar.solver.prune import restrict
from lbpar.solver.run import CHEAP_CELLS, Found, Solution, run
from lbpar.solver.tighten import narrow

NODES = 60  # subproblems of the branch and bound
STEPS = 40  # prices tried for one subproblem
CLOSE = 1e-12  # relative difference that counts as equal


@dataclass
class _Best:
    """The best fitting choice so far and what the search has used."""

    choice: list[int] | None = None
    total: float = float("inf")
    width: int = 0
    states: int = 0


@dataclass(frozen=True)
class _Point:
    """A choice with its cost and its memory."""

    choice: list[int]
    cost: float
    memory: float


class _Limited:
    def __init__(self, problem: Problem, memory: list[Floats], limit: float, states_limit: int, seed: int) -> None:
        self.problem, self.memory = problem, memory
        self.limit, self.states_limit, self.seed = limit, states_limit, seed
        self.best = _Best()
        self.touching: list[list[Factor]] = [[] for _ in problem.unary]
        for f in problem.factors:
            for v in f.scope:
                self.touching[v].append(f)
        self.price = 0.0  # the price that gave the last subproblem its best bound

    def priced(self, allowed: list[Ints], price: float) -> tuple[_Point, float]:
        """Best choice within ``allowed`` at ``price``, and a lower bound of cost + price * memory."""
        workshop = Workshop()
        smaller = restrict(self.problem, allowed, workshop)
        unary = [u + price * m[a] for u, m, a in zip(smaller.unary, self.memory, allowed, strict=True)]
        found: Found = run(Problem(unary, smaller.factors), workshop, self.states_limit, self.seed)
        self.best.width = max(self.best.width, found.width)
        self.best.states += found.states
        choice = [int(a[c]) for a, c in zip(allowed, found.choice, strict=True)]
        point = self.point(choice)
        self.offer(point)
        return point, found.total if found.exact else found.bound

    def offer(self, point: _Point) -> None:
        """Remember ``point`` if it fits and is better than what is known."""
        if point.memory <= self.limit and point.cost < self.best.total:
            self.best.choice, self.best.total = list(point.choice), point.cost

    def local_costs(self, v: int, choice: list[int]) -> Floats:
        """Cost of every configuration of ``v`` beside the others' choice."""
        cost = self.problem.unary[v]
        for f in self.touching[v]:
            cost = cost + row(f, v, choice)
        return cost

    def polish(self, point: _Point) -> None:
        """Improve a fitting choice one node at a time, never leaving the limit."""
        choice, used = list(point.choice), point.memory
        moved = True
        while moved:
            moved = False
            for v, m in enumerate(self.memory):
                cost = self.local_costs(v, choice)
                fits = used - m[choice[v]] + m <= self.limit
                fits[choice[v]] = True
                c = int(np.argmin(np.where(fits, cost, np.inf)))
                if cost[c] + CLOSE * abs(cost[c]) < cost[choice[v]]:
                    used += m[c] - m[choice[v]]
                    choice[v], moved = c, True
        self.offer(self.point(choice))

    def repair(self, over: _Point, under: _Point) -> None:
        """Walk from a choice that is too large towards one that fits, cheapest byte first, and polish what fits."""
        choice, used = list(over.choice), over.memory
        while used > self.limit:
            rates = {}
            for v, m in enumerate(self.memory):
                saved = m[choice[v]] - m[under.choice[v]]
                if saved > 0:
                    cost = self.local_costs(v, choice)
                    rates[v] = (cost[under.choice[v]] - cost[choice[v]]) / saved
            if not rates:
                return
            v = min(rates, key=lambda u: (rates[u], u))
            used -= self.memory[v][choice[v]] - self.memory[v][under.choice[v]]
            choice[v] = under.choice[v]
        point = self.point(choice)
        if point.memory <= self.limit:
            self.offer(point)
            self.polish(point)

    def point(self, choice: list[int]) -> _Point:
        used = float(sum(m[c] for m, c in zip(self.memory, choice, strict=True)))
        return _Point(choice, self.problem.total(choice), used)

    def trim(self, allowed: list[Ints]) -> list[Ints] | None:
        """Drop configurations that cannot be part of a fitting choice; None if nothing fits."""
        least = [float(m[a].min()) for m, a in zip(self.memory, allowed, strict=True)]
        slack = self.limit - sum(least)
        if slack < -CLOSE * abs(self.limit):
            return None
        room = slack + CLOSE * abs(self.limit)
        return [a[m[a] <= low + room] for m, a, low in zip(self.memory, allowed, least, strict=True)]

    def dual(self, allowed: list[Ints]) -> tuple[float, _Point | None, _Point | None]:
        """Lower bound over ``allowed``, with the hull's last points that do not and that do fit."""
        over, bound = self.priced(allowed, 0.0)
        self.price = 0.0
        if over.memory <= self.limit:
            return bound, None, over
        tight = [a[m[a] == m[a].min()] for m, a in zip(self.memory, allowed, strict=True)]
        under, _ = self.priced(tight, 0.0)
        for _ in range(STEPS):
            if not np.isfinite(under.cost) or under.cost - over.cost <= CLOSE * abs(under.cost):
                break
            price = (under.cost - over.cost) / (over.memory - under.memory)
            point, value = self.priced(allowed, price)
            if value - price * self.limit > bound:
                bound, self.price = value - price * self.limit, price
            line = over.cost + price * over.memory
            if point.cost + price * point.memory >= line - CLOSE * abs(line):
                break
            if point.memory <= self.limit:
                under = point
            else:
                over = point
        if np.isfinite(under.cost):
            self.polish(under)
            if np.isfinite(over.cost):
                self.repair(over, under)
        return bound, over, under

    def fixed(self, allowed: list[Ints]) -> list[Ints]:
        """Drop configurations whose priced bound exceeds the best fitting choice (Lagrangian variable fixing)."""
        smaller = restrict(self.problem, allowed, Workshop())
        unary = [u + self.price * m[a] for u, m, a in zip(smaller.unary, self.memory, allowed, strict=True)]
        ceiling = self.best.total + self.price * self.limit
        narrowed = narrow(Problem(unary, smaller.factors), lambda p: False, CHEAP_CELLS, ceiling)
        return [a[k] for a, k in zip(allowed, narrowed.kept, strict=True)]


def within_memory(
    names: Sequence[Hashable],
    problem: Problem,
    memory: Mapping,
    limit: float,
    space: int,
    states_limit: int,
    gap: float,
    seed: int,
) -> Solution:
    """Minimise ``problem`` with the memories of the chosen configurations summing to at most ``limit``.

    Raises :class:`PlanError` when nothing fits; the message gives the smallest footprint and the node that needs most.
    """
    occupied = []
    for n, u in zip(names, problem.unary, strict=True):
        m = np.asarray(memory.get(n, np.zeros(u.size)), np.float64)
        if m.shape != u.shape or not np.isfinite(m).all():
            raise PlanError(
                f"search: memory of node {n!r} has shape {m.shape}; expected finite values of shape {u.shape}"
            )
        occupied.append(m)
    limited = _Limited(problem, occupied, limit, states_limit, seed)
    everything = [np.flatnonzero(np.isfinite(u)) for u in problem.unary]
    if any(a.size == 0 for a in everything):
        raise PlanError("search: a node has only forbidden configurations (cost inf); allow at least one for each node")
    start = limited.trim(everything)
    if start is None:
        least = {n: float(m[a].min()) for n, m, a in zip(names, occupied, everything, strict=True)}
        largest = max(least, key=lambda n: least[n])
        raise PlanError(
            f"search: the memory limit {limit:.6g} is too small: the smallest footprint is {sum(least.values()):.6g}, "
            f"of which {largest!r} needs {least[largest]:.6g}; raise the limit or use more processes"
        )
    bound, over, under = limited.dual(start)
    if bound < limited.best.total - max(gap, CLOSE) * abs(limited.best.total) < float("inf"):
        start = limited.trim(limited.fixed(start)) or start
        again, over, under = limited.dual(start)
        bound = max(bound, again)
    heap: list[tuple[float, int, list[Ints], _Point | None, _Point | None]] = [(bound, 0, start, over, under)]
    count = 0
    while heap:
        bound, _, allowed, over, under = heap[0]
        if bound >= limited.best.total - max(gap, CLOSE) * abs(limited.best.total) or count >= NODES:
            break
        heapq.heappop(heap)
        for half in _halves(allowed, occupied, over, under):
            fitting = limited.trim(half)
            if fitting is None:
                continue
            count += 1
            low, above, below = limited.dual(fitting)
            if low < limited.best.total - CLOSE * abs(limited.best.total):
                heapq.heappush(heap, (low, count, fitting, above, below))
    best = limited.best
    if best.choice is None or not np.isfinite(best.total):
        raise PlanError(f"search: no allowed choice was found within the memory limit {limit:.6g}; raise the limit")
    bound = min(heap[0][0], best.total) if heap else best.total
    exact = bound >= best.total - CLOSE * abs(best.total)
    found = Found(best.choice, best.total, bound, exact, best.width, best.states)
    return found.named(names, space, limited.point(best.choice).memory)


def _halves(allowed: list[Ints], memory: list[Floats], over: _Point | None, under: _Point | None) -> list[list[Ints]]:
    """Split one variable's configurations by memory, the one on which the two hull points differ most."""
    gaps = np.zeros(len(allowed))
    if over is not None and under is not None:
        gaps = np.array([abs(m[o] - m[u]) for m, o, u in zip(memory, over.choice, under.choice, strict=True)])
    v = int(np.argmax(gaps))
    if gaps[v] > 0 and over is not None and under is not None:
        middle = (memory[v][over.choice[v]] + memory[v][under.choice[v]]) / 2
        low = memory[v][allowed[v]] <= middle
        parts = [allowed[v][low], allowed[v][~low]]
    else:  # an inexact search left nothing to tell them apart: halve the variable with most configurations
        v = max(range(len(allowed)), key=lambda u: allowed[u].size)
        if allowed[v].size < 2:
            return []
        parts = [allowed[v][: allowed[v].size // 2], allowed[v][allowed[v].size // 2 :]]
    return [[*allowed[:v], part, *allowed[v + 1 :]] for part in parts]
