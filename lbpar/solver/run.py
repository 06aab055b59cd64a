"""One search: exact elimination where its tables fit, bounded from both sides otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lbpar.solver.bounded import ROUNDS, bounded
from lbpar.solver.exact import solve
from lbpar.solver.factors import Ints, Problem, Workshop
from lbpar.solver.order import Order, best_order
from lbpar.solver.prune import prune, settle
from lbpar.solver.tighten import narrow

# Orders up to this many cells are run as they are: narrowing the search first would cost more than it saves.
CHEAP_CELLS = 50_000_000
# Result tables are kept for back-substitution (2 to 4 bytes a cell) and live for a while as float64: this bounds the
# search to about 1 GB.
KEPT_LIMIT = 80_000_000


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


@dataclass(frozen=True)
class Found:
    """A solution by variable number."""

    choice: list[int]
    total: float
    bound: float
    exact: bool
    width: int
    states: int

    def named(self, names: Sequence, space: int, memory: float | None) -> Solution:
        """The same by node name."""
        choice = dict(zip(names, self.choice, strict=True))
        bound = self.total if self.exact else self.bound
        return Solution(choice, self.total, self.width, self.states, space, self.exact, bound, memory)


def fits(order: Order, states_limit: int) -> bool:
    """Whether the tables of ``order`` are small enough to be made."""
    return order.cells <= states_limit and order.kept <= KEPT_LIMIT


def run(problem: Problem, workshop: Workshop, states_limit: int, seed: int) -> Found:
    """Search ``problem``: exactly where the tables fit, bounded from both sides otherwise."""
    if not problem.unary:
        return Found([], 0.0, 0.0, True, 0, 0)
    order = best_order(problem, CHEAP_CELLS)
    kept = [np.arange(u.size) for u in problem.unary]
    if order.cells <= CHEAP_CELLS:
        return _finish(problem, problem, kept, order, workshop)
    narrowed = narrow(problem, lambda p: best_order(p, CHEAP_CELLS).cells <= CHEAP_CELLS, CHEAP_CELLS)
    smaller, kept = settle(narrowed.problem), narrowed.kept
    order = best_order(smaller, CHEAP_CELLS)
    if order.cells > CHEAP_CELLS:
        workshop = Workshop()
        smaller, again = prune(smaller, workshop)
        smaller = settle(smaller)
        kept = [k[a] for k, a in zip(kept, again, strict=True)]
        order = best_order(smaller, CHEAP_CELLS)
    if fits(order, states_limit):
        found = _finish(problem, smaller, kept, order, Workshop())
        return replace(found, states=found.states + narrowed.cells)
    share = states_limit // ROUNDS  # so that all cuts together stay near the limit
    rough = bounded(smaller, order, lambda o: fits(o, share), states_limit, seed)
    choice = [int(k[c]) for k, c in zip(kept, rough.choice, strict=True)]
    total = problem.total(choice)
    if narrowed.choice and narrowed.total < total:
        choice, total = narrowed.choice, narrowed.total
    bound = min(max(rough.bound, narrowed.bound), total)
    exact = bound >= total - 1e-11 * abs(total)
    return Found(choice, total, bound, exact, order.width, rough.cells + narrowed.cells)


def _finish(problem: Problem, smaller: Problem, kept: list[Ints], order: Order, workshop: Workshop) -> Found:
    """Minimise ``smaller`` exactly and give the outcome in ``problem``'s numbers."""
    out = solve(smaller, order.sequence, workshop)
    choice = [int(k[c]) for k, c in zip(kept, out.choice, strict=True)]
    total = problem.total(choice)
    return Found(choice, total, total, True, out.width, out.cells)
