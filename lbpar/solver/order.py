"""Elimination orders: which variable to minimise out next, judged by the tables that it would make.

The cost of an order is found without touching a table, from the numbers of classes alone, so several rules can be
tried and the cheapest kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from lbpar.solver.factors import Problem

RULES = ("size", "degree")


@dataclass(frozen=True)
class Order:
    """An elimination order and what it would cost.

    ``cells``: sum of the table cells evaluated; ``largest``: of one table; ``kept``: cells of the result tables that
    back-substitution needs; ``width``: most neighbours of a variable when it is eliminated. Upper bounds: classes
    may coincide.
    """

    sequence: tuple[int, ...]
    cells: int
    largest: int
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
        own = classes.pop(v, 1)
        table = own
        for c in classes.values():
            table *= c
        return table, classes

    def score(v: int) -> tuple[int, ...]:
        table, classes = seen[v]
        return (table, len(classes)) if rule == "size" else (len(classes), table)

    seen = {v: look(v) for v in range(len(sizes))}
    keys = {v: score(v) for v in seen}
    heap = [(k, v) for v, k in keys.items()]  # an entry is stale when its key is no longer the variable's
    heapq.heapify(heap)
    sequence: list[int] = []
    cells = largest = kept = width = 0
    while keys:
        key, v = heapq.heappop(heap)
        if keys.get(v) != key:
            continue
        table, classes = seen[v]
        sequence.append(v)
        cells += table
        largest = max(largest, table)
        width = max(width, len(classes))
        result = 1
        for c in classes.values():
            result *= c
        kept += result
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
    return Order(tuple(sequence), cells, largest, kept, width)


def best_order(problem: Problem, good_enough: int, rules: Sequence[str] = RULES) -> Order:
    """The cheapest of the orders that ``rules`` give; stops at the first of at most ``good_enough`` cells."""
    found: Order | None = None
    for rule in rules:
        order = plan_order(problem, rule)
        if found is None or order.cells < found.cells:
            found = order
        if found.cells <= good_enough:
            break
    assert found is not None
    return found
