"""Minimisation under a memory limit: Lagrangian bounds, closed by branch and bound.

For a price lambda per unit of memory, minimising cost + lambda * memory is a search without a limit, and its value less
lambda * limit is a lower bound. The best price is found by walking the lower convex hull of (memory, cost) between one
choice that fits and one that does not. The points of the hull are repaired and improved into fitting choices. Where hull
and best fitting choice do not meet, configurations whose own bound exceeds that choice are dropped, then the node with the
largest difference of memory between the two is split in two and both halves are bounded again, best bound first. The answer
is exact when the bounds meet; otherwise the gap is reported.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from lbpar.errors import PlanError
from lbpar.solver.cache import Cache
from lbpar.solver.factors import Floats, Found, Ints, Problem
from lbpar.solver.improve import descend
from lbpar.solver.reduce import restrict
from lbpar.solver.run import CHEAP_CELLS, run
from lbpar.solver.tighten import narrow

NODES = 60  # subproblems of the branch and bound
STEPS = 40  # prices tried for one subproblem
CLOSE = 1e-12  # relative difference that counts as equal


@dataclass(frozen=True)
class _Point:
    """A choice with its cost and its memory."""

    choice: list[int]
    cost: float
    memory: float


@dataclass(frozen=True)
class _Bounded:
    """A subproblem: the configurations allowed, a lower bound, and the hull's last points that do not and that do fit."""

    allowed: list[Ints]
    bound: float
    over: _Point | None
    under: _Point


class _Limited:
    """The search of one problem: the best fitting choice so far and what it has used."""

    def __init__(self, problem: Problem, memory: list[Floats], limit: float, states_limit: int) -> None:
        self.problem, self.memory = problem, memory
        self.limit, self.states_limit = limit, states_limit
        self.best = _Point([], float("inf"), 0.0)
        self.width = self.cells = 0
        self.price = 0.0  # the price that gave the last subproblem its best bound

    def point(self, choice: list[int]) -> _Point:
        """A choice, remembered if it fits and is better than what is known."""
        used = float(sum(m[c] for m, c in zip(self.memory, choice, strict=True)))
        point = _Point(choice, self.problem.total(choice), used)
        if used <= self.limit and point.cost < self.best.cost:
            self.best = point
        return point

    def closed(self, bound: float, gap: float = 0.0) -> bool:
        """Whether no choice above ``bound`` is better than the best known by more than ``gap``."""
        return bound >= self.best.cost - max(gap, CLOSE) * abs(self.best.cost)

    def priced(self, problem: Problem, allowed: list[Ints], price: float, cache: Cache) -> tuple[_Point, float]:
        """Best choice of ``problem`` (that over ``allowed``) at ``price``, and a lower bound of cost + price * memory."""
        found = run(self.with_memory(problem, allowed, price, cache), cache, self.states_limit)
        self.width, self.cells = max(self.width, found.width), self.cells + found.cells
        return self.point([int(a[c]) for a, c in zip(allowed, found.choice, strict=True)]), found.bound

    def with_memory(self, problem: Problem, allowed: list[Ints], price: float, cache: Cache) -> Problem:
        """``problem`` with the memory at ``price`` added to its costs."""
        if not price:
            return problem
        unary = [cache.intern(u + price * m[a]) for u, m, a in zip(problem.unary, self.memory, allowed, strict=True)]
        return Problem(unary, problem.factors)

    def repair(self, over: _Point, under: _Point) -> None:
        """Walk from a choice that is too large towards one that fits, cheapest byte first, and improve what fits."""
        choice, used = list(over.choice), over.memory
        while used > self.limit:
            rates = {}
            for v, m in enumerate(self.memory):
                saved = m[choice[v]] - m[under.choice[v]]
                if saved > 0:
                    cost = self.problem.costs(v, choice)
                    rates[v] = (cost[under.choice[v]] - cost[choice[v]]) / saved
            if not rates:
                return
            v = min(rates, key=lambda u: (rates[u], u))
            used -= self.memory[v][choice[v]] - self.memory[v][under.choice[v]]
            choice[v] = under.choice[v]
        if self.point(choice).memory <= self.limit:
            self.point(descend(self.problem, choice, self.memory, self.limit))

    def trim(self, allowed: list[Ints]) -> list[Ints] | None:
        """Drop configurations that cannot be part of a fitting choice; None if nothing fits."""
        least = [float(m[a].min()) for m, a in zip(self.memory, allowed, strict=True)]
        room = self.limit - sum(least) + CLOSE * abs(self.limit)
        if room < 0:
            return None
        return [a[m[a] <= low + room] for m, a, low in zip(self.memory, allowed, least, strict=True)]

    def dual(self, allowed: list[Ints]) -> _Bounded:
        """The best lower bound over ``allowed`` by any price."""
        cache = Cache()
        problem = restrict(self.problem, allowed, cache)
        over, bound = self.priced(problem, allowed, 0.0, cache)
        self.price = 0.0
        if over.memory <= self.limit:
            return _Bounded(allowed, bound, None, over)
        tight = [a[m[a] == m[a].min()] for m, a in zip(self.memory, allowed, strict=True)]
        under, _ = self.priced(restrict(self.problem, tight, cache), tight, 0.0, cache)
        for _ in range(STEPS):
            if not np.isfinite(under.cost) or under.cost - over.cost <= CLOSE * abs(under.cost):
                break
            price = (under.cost - over.cost) / (over.memory - under.memory)
            point, value = self.priced(problem, allowed, price, cache)
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
            self.point(descend(self.problem, under.choice, self.memory, self.limit))
            if np.isfinite(over.cost):
                self.repair(over, under)
        return _Bounded(allowed, bound, over, under)

    def fixed(self, allowed: list[Ints]) -> list[Ints]:
        """Drop configurations whose priced bound exceeds the best fitting choice (Lagrangian variable fixing)."""
        cache = Cache()
        priced = self.with_memory(restrict(self.problem, allowed, cache), allowed, self.price, cache)
        kept = narrow(priced, lambda p: False, CHEAP_CELLS, self.best.cost + self.price * self.limit).kept
        return [a[k] for a, k in zip(allowed, kept, strict=True)]

    def halves(self, part: _Bounded) -> list[list[Ints]]:
        """Split one variable's configurations by memory, the one on which the two hull points differ most."""
        allowed, gaps = part.allowed, np.zeros(len(part.allowed))
        if part.over is not None:
            ends = [(m[o], m[u]) for m, o, u in zip(self.memory, part.over.choice, part.under.choice, strict=True)]
            gaps = np.array([abs(a - b) for a, b in ends])
        v = int(np.argmax(gaps))
        if gaps[v] > 0:
            low = self.memory[v][allowed[v]] <= sum(ends[v]) / 2
            parts = [allowed[v][low], allowed[v][~low]]
        else:  # an inexact search left nothing to tell them apart: halve the variable with most configurations
            v = max(range(len(allowed)), key=lambda u: allowed[u].size)
            if allowed[v].size < 2:
                return []
            parts = np.array_split(allowed[v], 2)
        return [[*allowed[:v], part, *allowed[v + 1 :]] for part in parts]


def within_memory(
    names: Sequence[Hashable], problem: Problem, memory: list[Floats], limit: float, states_limit: int, gap: float
) -> Found:
    """Minimise ``problem`` with the memories of the chosen configurations summing to at most ``limit``.

    Raises :class:`PlanError` when nothing fits; the message gives the smallest footprint and the node that needs most.
    """
    limited = _Limited(problem, memory, limit, states_limit)
    everything = [np.flatnonzero(np.isfinite(u)) for u in problem.unary]
    if any(a.size == 0 for a in everything):
        raise PlanError("search: a node has only forbidden configurations (cost inf); allow at least one for each node")
    start = limited.trim(everything)
    if start is None:
        least = {n: float(m[a].min()) for n, m, a in zip(names, memory, everything, strict=True)}
        largest = max(least, key=lambda n: least[n])
        raise PlanError(
            f"search: the memory limit {limit:.6g} is too small: the smallest footprint is {sum(least.values()):.6g}, "
            f"of which {largest!r} needs {least[largest]:.6g}; raise the limit or use more processes"
        )
    root = limited.dual(start)
    if limited.best.choice and not limited.closed(root.bound, gap):
        again = limited.dual(limited.trim(limited.fixed(start)) or start)
        root = again if again.bound > root.bound else _Bounded(again.allowed, root.bound, again.over, again.under)
    heap, count = [(root.bound, 0, root)], 0
    while heap and not limited.closed(heap[0][0], gap) and count < NODES:
        for half in limited.halves(heapq.heappop(heap)[2]):
            fitting = limited.trim(half)
            if fitting is not None:
                count += 1
                part = limited.dual(fitting)
                if not limited.closed(part.bound):
                    heapq.heappush(heap, (part.bound, count, part))
    best = limited.best
    if not best.choice:
        raise PlanError(f"search: no allowed choice was found within the memory limit {limit:.6g}; raise the limit")
    bound = min(heap[0][0], best.cost) if heap else best.cost
    return Found(best.choice, best.cost, bound, limited.width, limited.cells)
