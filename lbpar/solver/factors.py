"""Cost tables over *classes* of configurations.

An edge cost depends on a configuration only through the layout it gives one tensor, so many configurations of a
layer share a row of an edge matrix. A :class:`Factor` stores the distinct rows and columns once, with a map from
configuration to row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Classes:
    """A map from configurations to classes: ``index`` has shape (k,) and values in ``range(count)``."""

    index: Ints
    count: int

    def among(self, kept: Ints) -> tuple[Ints, Ints]:
        """The classes that configurations ``kept`` have, in increasing order, and of each configuration the place of its class among them."""
        index, has = self.index[kept], np.zeros(self.count, bool)
        has[index] = True
        return np.flatnonzero(has), (np.cumsum(has) - 1)[index]


@dataclass(frozen=True, eq=False)
class Factor:
    """A term of the objective: ``table[maps[0].index[c0], maps[1].index[c1], ...]`` for the variables in ``scope``."""

    scope: tuple[int, ...]
    maps: tuple[Classes, ...]
    table: Floats

    def place(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Where ``choice``, one configuration per variable of the problem, stands in the table."""
        return tuple(int(m.index[choice[v]]) for v, m in zip(self.scope, self.maps, strict=True))

    def costs(self, v: int, choice: Sequence[int]) -> Floats:
        """Cost of every configuration of ``v``, shape (k_v,), the other variables being chosen."""
        where = tuple(
            slice(None) if u == v else int(m.index[choice[u]]) for u, m in zip(self.scope, self.maps, strict=True)
        )
        return self.table[where][self.map(v).index]

    def map(self, v: int) -> Classes:
        """Classes of the configurations of ``v``."""
        return self.maps[self.scope.index(v)]


@dataclass(frozen=True)
class Problem:
    """Variables 0..n-1 with unary costs (shape (k_v,)) and factors over pairs of variables or more."""

    unary: list[Floats]
    factors: list[Factor]

    @cached_property
    def touching(self) -> list[list[Factor]]:
        """The factors of each variable."""
        found: list[list[Factor]] = [[] for _ in self.unary]
        for f in self.factors:
            for v in f.scope:
                found[v].append(f)
        return found

    def total(self, choice: Sequence[int]) -> float:
        """Objective of ``choice``."""
        terms = [float(u[c]) for u, c in zip(self.unary, choice, strict=True)]
        return sum(terms + [float(f.table[f.place(choice)]) for f in self.factors])

    def costs(self, v: int, choice: Sequence[int]) -> Floats:
        """Cost of every configuration of ``v`` beside the others' choice."""
        return sum((f.costs(v, choice) for f in self.touching[v]), self.unary[v])


@dataclass(frozen=True)
class Found:
    """A choice, its total, and what is known of the optimum.

    ``choice``: one configuration per variable; ``bound``: no choice costs less; ``width``: most neighbours of a variable
    when it was eliminated; ``cells``: table cells evaluated.
    """

    choice: list[int]
    total: float
    bound: float
    width: int
    cells: int

    def of(self, problem: Problem, kept: Sequence[Ints]) -> Found:
        """The same in the numbers of ``problem``, of which only the configurations ``kept`` were searched."""
        choice = [int(k[c]) for k, c in zip(kept, self.choice, strict=True)]
        total = problem.total(choice)
        return Found(
            choice, total, total if self.bound == self.total else min(self.bound, total), self.width, self.cells
        )
