"""Exact (min, +) elimination along a given order, and back-substitution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lbpar.solver.factors import Eliminated, Factor, Problem, Workshop


@dataclass(frozen=True)
class Outcome:
    """One configuration per variable, its objective, the width met and the table cells evaluated."""

    choice: list[int]
    total: float
    width: int
    cells: int


def solve(problem: Problem, sequence: Sequence[int], workshop: Workshop) -> Outcome:
    """Minimise ``problem`` exactly, eliminating its variables in ``sequence``.

    Exact for any order; the order decides only how large the tables get. ``cells`` counts what was really evaluated:
    an elimination that repeats an earlier one counts nothing.
    """
    unary = list(problem.unary)
    touching: list[dict[int, Factor]] = [{} for _ in unary]
    number = 0
    for f in problem.factors:
        for v in f.scope:
            touching[v][number] = f
        number += 1
    done: list[tuple[int, Eliminated]] = []
    width = cells = 0
    for v in sequence:
        factors = touching[v]
        left = workshop.eliminate(v, unary[v], list(factors.values()))
        for i, f in factors.items():
            for u in f.scope:
                if u != v:
                    del touching[u][i]
        touching[v] = {}
        done.append((v, left))
        cells += left.cells
        width = max(width, len(left.neighbours))
        if len(left.neighbours) == 1:
            (u,) = left.neighbours
            unary[u] = workshop.add_unary(unary[u], left.table, left.maps[0])
        elif left.neighbours:
            made = Factor(left.neighbours, left.maps, left.table)
            for u in left.neighbours:
                touching[u][number] = made
            number += 1
    choice = [0] * len(unary)
    for v, left in reversed(done):
        choice[v] = left.recall(choice)
    return Outcome(choice, problem.total(choice), width, cells)
