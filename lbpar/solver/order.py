"""Elimination orders: which variable to minimise out next, judged by the tables that it would make.

The cost of an order is found without touching a table, from the numbers of classes alone, so several rules can be
tried and the cheapest kept.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import prod

from lbpar.solver.factors import Problem


@dataclass(frozen=True)
class Order:
    """An elimination order and what it would cost.

    ``cells``: sum of the table cells evaluated; ``kept``: cells of the result tables that
    back-substitution needs; ``width``: most neighbours of a variable when it is eliminated. Upper bounds: classes
    may coincide.
    """

    sequence: tuple[int, ...]
    cells: int
    kept: int
    width: int


def plan_order(problem: Problem, rule: str = "size") -> Order:
    """Greedy order by ``rule``: smallest table first ("size") or fewest neighbours first ("degree").

    Ties go to the variable with the lowest number, so the order is deterministic.
    """
    sizes = [len(u) for u in problem.unary]
    scopes: dict[int, dict[int, int]] = {}  # factor number -> {variable: classes}
    touching: list[set[int]] = [set() for _ in sizes]
    for i, f in enumerate(problem.factors):
        scopes[i] = {v: m.count for v, m in zip(f.scope, f.maps, strict=True)}
        for v in f.scope:
            touching[v].add(i)
    number = len(scopes)

    def look(v: int) -> tuple[int, dict[int, int]]:
        classes: dict[int, int] = {}
        for i in touching[v]:
            for u, c in scopes[i].items():
                classes[u] = min(sizes[u], classes.get(u, 1) * c)
        table = prod(classes.values())
        classes.pop(v, 1)
        return table, classes

    def score(v: int) -> tuple[int, ...]:
        table, classes = seen[v]
        return (table, len(classes)) if rule == "size" else (len(classes), table)

    seen = {v: look(v) for v in range(len(sizes))}
    keys = {v: score(v) for v in seen}
    heap = [(k, v) for v, k in keys.items()]  # an entry is stale when its key is no longer the variable's
    heapq.heapify(heap)
    sequence: list[int] = []
    cells = kept = width = 0
    while keys:
        key, v = heapq.heappop(heap)
        if keys.get(v) != key:
            continue
        table, classes = seen[v]
        sequence.append(v)
        cells += table
        width = max(width, len(classes))
        kept += prod(classes.values())
        for i in touching[v]:
            for u in scopes.pop(i):
                if u != v:
                    touching[u].discard(i)
        touching[v] = set()
        del keys[v]
        if classes:
            scopes[number] = classes
            for u in classes:
                touching[u].add(number)
            number += 1
        for u in classes:
            seen[u] = look(u)
            keys[u] = score(u)
            heapq.heappush(heap, (keys[u], u))
    return Order(tuple(sequence), cells, kept, width)


def best_order(problem: Problem, good_enough: int) -> Order:
    """The cheaper of the orders by either rule; the first if it takes at most ``good_enough`` cells."""
    found = plan_order(problem)
    return found if found.cells <= good_enough else min(found, plan_order(problem, "degree"), key=lambda o: o.cells)
