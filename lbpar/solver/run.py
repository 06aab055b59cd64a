"""One search: exact elimination where its tables fit, bounded from both sides otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lbpar.solver.cache import Cache
from lbpar.solver.exact import solve
from lbpar.solver.factors import Found, Problem
from lbpar.solver.improve import ROUNDS, improve
from lbpar.solver.order import Order, best_order
from lbpar.solver.reduce import settle
from lbpar.solver.tighten import narrow

# Orders up to this many cells are run as they are: narrowing the search first would cost more than it saves.
CHEAP_CELLS = 50_000_000
# Result tables are kept for back-substitution (2 to 4 bytes a cell) and live for a while as float64: this bounds the
# search to about 1 GB.
KEPT_LIMIT = 80_000_000


def run(problem: Problem, cache: Cache, states_limit: int) -> Found:
    """Search ``problem``: exactly where the tables fit, bounded from both sides otherwise."""
    order = best_order(problem, CHEAP_CELLS)
    if order.cells <= CHEAP_CELLS:
        return solve(problem, order.sequence, cache)
    narrowed = narrow(problem, lambda p: best_order(p, CHEAP_CELLS).cells <= CHEAP_CELLS, CHEAP_CELLS)
    smaller, kept, best = settle(narrowed.problem), narrowed.kept, narrowed.best
    order = best_order(smaller, CHEAP_CELLS)
    if order.cells <= states_limit and order.kept <= KEPT_LIMIT:
        found = solve(smaller, order.sequence, Cache()).of(problem, kept)
        return replace(found, cells=found.cells + best.cells)

    def fits(o: Order) -> bool:
        """All sets of fixed variables together stay near the limit."""
        return o.cells <= states_limit // ROUNDS and o.kept <= KEPT_LIMIT

    start = best.choice or [int(np.argmin(u)) for u in problem.unary]
    inside = [int(np.searchsorted(k, c)) for k, c in zip(kept, start, strict=True)]
    choice, cells = improve(smaller, inside, best.bound, fits)
    return Found(choice, smaller.total(choice), best.bound, order.width, best.cells + cells).of(problem, kept)
