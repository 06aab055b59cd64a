"""What the planner prices with: kernels and moves of many candidates against single ones."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.cost.kernel_time import kernel_seconds
from lbpar.cost.machine import find_machine
from lbpar.cost.moves import move_price
from lbpar.graph.ops.pointwise import Relu
from lbpar.layout.grid import Grid
from lbpar.layout.layout import Layout
from lbpar.layout.many import Layouts
from lbpar.layout.transition import transition
from lbpar.plan.pricing import Pricing

MACHINE, GRID = find_machine("perlmutter-a100"), Grid((2, 2))
SHAPE = (8, 6, 6, 16)
(KERNEL,) = Relu().forward((SHAPE,), True)
GRIDS = [{}, {"N": (1, 0)}, {"C": (0,)}, {"N": (1,), "H": (0,)}]


def layouts(pricing: Pricing) -> tuple[dict[str, np.ndarray], Layouts]:
    of = pricing.moves.cuts.of
    op_grids = {loop: np.array([of(g.get(loop, ())) for g in GRIDS]) for loop, _ in KERNEL.loops}
    return op_grids, Layouts.of(KERNEL.writes[0], KERNEL, GRID, op_grids, written=True)


def test_kernels_cost_what_their_largest_blocks_take() -> None:
    pricing = Pricing(MACHINE, GRID)
    seconds = pricing.kernel(KERNEL, layouts(pricing)[0])
    blocks = [(8, 6, 6, 16), (2, 6, 6, 16), (8, 6, 6, 8), (4, 3, 6, 16)]
    want = [kernel_seconds(MACHINE, KERNEL, dict(zip("NHWC", b, strict=True)), "float32") for b in blocks]
    assert seconds == pytest.approx(want)


def test_tables_of_pairs_are_prices_of_transitions() -> None:
    pricing = Pricing(MACHINE, GRID)
    many = layouts(pricing)[1]
    (table,) = pricing.tables([(many, many)])
    single = [Layout.of(KERNEL.writes[0], KERNEL, GRID, g, written=True) for g in GRIDS]
    want = [[sum(move_price(m, 4, MACHINE)[0] for m in transition(a, b)) for b in single] for a in single]
    assert table == pytest.approx(np.array(want))
    assert (np.diag(table) == 0).all() and (table > 0).sum() == 12


def test_bytes_are_those_of_the_largest_block() -> None:
    pricing = Pricing(MACHINE, GRID, "float64")
    assert pricing.bytes(layouts(pricing)[1]).tolist() == [8 * n for n in (4608, 1152, 2304, 1152)]
