"""Prices of moves over arrays of layouts against `transition` and the price of its moves, pair by pair, and against what ranks send."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lbpar.cost.machine import Machine, find_machine
from lbpar.cost.moves import MovePrices, move_price
from lbpar.cost.traffic import largest_exchange, longest, traffic
from lbpar.graph.loops import Window
from lbpar.layout.cuts import bits, cuts_of
from lbpar.layout.grid import Grid
from lbpar.layout.layout import Dim, Layout
from lbpar.layout.transition import stages, transition
from tests.util.layouts import random_layout

SHAPE = ((16,), (12,), (64,))


def measured(machine: Machine) -> Machine:
    """A machine whose copies of parts have been measured: 100 µs and 1 ns a byte, of columns 2 ns."""
    compute = machine.file.compute
    more = {"starts": {"slice": 1e-4}, "speeds": compute.speeds | {"rows": 2e9, "columns": 1e9}}
    return Machine(machine.file.model_copy(update={"compute": compute.model_copy(update=more)}))


def layouts(
    grid: Grid, count: int, rng: np.random.Generator, *, ghosts: bool, partial: bool, at: float
) -> list[Layout]:
    made = [
        random_layout(SHAPE, grid, rng, ghosts=ghosts, partial=partial, composite=False, at=at) for _ in range(count)
    ]
    return made if partial else [replace(x, partial=()) for x in made]


def numbers(found: list[Layout]) -> tuple[list[Any], Any]:
    cuts = cuts_of(found[0].grid)
    dims = [np.array([cuts.number(x.cuts[i]) for x in found]) for i in range(len(SHAPE) + 1)]
    return dims, np.array([bits(x.partial) for x in found])


@pytest.mark.parametrize(
    ("sizes", "machine"), [((2, 2, 2, 2), "perlmutter-a100"), ((2, 3), "abci-v100"), ((2, 2, 3), "cori-knl")]
)
@pytest.mark.parametrize(("ghosts", "at"), [(False, 0.0), (True, 0.0), (True, 0.4)])
def test_arrays_of_layouts_cost_what_single_transitions_cost(
    sizes: tuple[int, ...], machine: str, ghosts: bool, at: float
) -> None:
    m, grid, rng = measured(find_machine(machine)), Grid(sizes), np.random.default_rng(0)
    prices = MovePrices(m, grid)
    src = layouts(grid, 30, rng, ghosts=False, partial=True, at=at)
    dst = layouts(grid, 30, rng, ghosts=ghosts, partial=False, at=at)
    (rows, partial), (columns, none) = numbers(src), numbers(dst)
    made = stages(
        prices.cuts, [d[:, None] for d in rows], [d[None, :] for d in columns], partial[:, None], shape=(30, 30)
    )
    (flat,) = prices.seconds([(src[0].shape, 4, prices.transitions(made, 900))])
    table = flat.reshape(30, 30)
    places = [
        [prices.cuts.places((*c, p)) for c, p in zip(zip(*d, strict=True), p, strict=True)]
        for d, p in ((rows, partial), (columns, none))
    ]
    (between,) = prices.between((np.array(places[0])[:, None], np.array(places[1])[None, :]))
    assert (prices.seconds([(src[0].shape, 4, between)])[0] == table).all()
    kinds = set()
    for i, a in enumerate(src):
        for j, b in enumerate(dst):
            moves = transition(a, b)
            kinds |= {x.kind for x in moves}
            assert table[i, j] == pytest.approx(sum(move_price(x, 4, m)[0] for x in moves), rel=1e-12)
    assert {"allreduce", "reduce_scatter", "allgather", "p2p", "slice"} <= kinds
    assert at or ("alltoall" in kinds and ("halo" in kinds) == ghosts)


def test_seconds_are_those_of_the_bytes_that_the_busiest_rank_sends() -> None:
    """Exactly where blocks are even; nearly where they are not."""
    m, grid, rng = find_machine("perlmutter-a100"), Grid((2, 2, 2)), np.random.default_rng(1)
    shape = ((16,), (8,), (32,))
    for _ in range(200):
        at = float(rng.choice([0.0, 0.4]))
        a = random_layout(shape, grid, rng, partial=True, composite=False, at=at)
        b = replace(random_layout(shape, grid, rng, composite=False, at=at), partial=())
        for move in transition(a, b):
            busiest = traffic(move).busiest
            after = m.copy_seconds(4 * np.prod([longest(d, grid) for d in move.dst.dims]))
            want = m.move_seconds(move.kind, m.parts(grid, move.axes), 4.0 * busiest.elements, busiest.messages)
            want += 0.0 if move.kind == "allreduce" else after
            assert move_price(move, 4, m) == pytest.approx((want, 4 * busiest.elements, busiest.messages))


@pytest.mark.parametrize(("dim", "byte"), [(0, 1e-9), (1, 2e-9)])
def test_parts_of_rows_take_longer_to_copy_than_rows(dim: int, byte: float) -> None:
    """A slice starts, too; of a sum the blocks of both ranks are packed. A last dimension of one index has no parts."""
    machine, grid = measured(find_machine("laptop")), Grid((2,))
    for shape in ((8, 64), (8, 64, 1)):
        whole = Layout(grid, tuple(Dim.whole(n) for n in shape))
        dims = [Dim(n, (n,), ((0,) if i == dim else (),)) for i, n in enumerate(shape)]
        half = Layout(grid, tuple(dims))
        (cut,), (summed,) = transition(whole, half), transition(replace(whole, partial=(0,)), half)
        assert (cut.kind, summed.kind) == ("slice", "reduce_scatter")
        assert move_price(cut, 4, machine)[0] == pytest.approx(1e-4 + 4 * 256 * byte)
        copies = 4 * 256 * (1e-9 if dim == 0 else byte + (byte - 1e-9))
        sent = machine.move_seconds("reduce_scatter", machine.parts(grid, (0,)), 1024.0, 1.0)
        assert move_price(summed, 4, machine)[0] == pytest.approx(sent + copies)


def test_a_dimension_sends_most_from_its_middle() -> None:
    """Blocks of 4 of 16 with a window of three: both neighbours get a row from a block that has two."""
    grid = Grid((4,))
    plain = Dim(16, (16,), ((0,),))
    ghosts = replace(plain, window=Window(3, pad=1))
    assert largest_exchange(plain, ghosts, (0,), grid) == (4 + 2, 3, 4)
    assert largest_exchange(plain, Dim.whole(16), (0,), grid) == (4, 1, 4)  # to each of the others alike
