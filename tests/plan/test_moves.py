"""The planner's tables of moves against `transition` and the price of its moves, pair by pair."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.cost.machine import find_machine
from lbpar.cost.price import move_price
from lbpar.graph.loops import Index, Window
from lbpar.layout.grid import Grid
from lbpar.layout.layout import Dim, Layout
from lbpar.layout.transition import transition
from lbpar.plan.candidates import OpGrid, candidates
from lbpar.plan.cuts import Cuts, mask_of
from lbpar.plan.moves import Links, Read, move_table

EXTENTS = {"N": 16, "H": 16, "W": 16, "C": 32}


def layout(grid: Grid, g: OpGrid, names: str, window: Window | None, partial: tuple[int, ...]) -> Layout:
    dims = []
    for e, loop in zip(EXTENTS.values(), names, strict=True):
        index = Index(e, (loop,), window if window and loop in "HW" else None)
        dims.append(Dim.of(index, {loop: e}, grid, g))
    return Layout(grid, tuple(dims), tuple(sorted(partial)))


def ratios(procs: int, machine: str, window: Window | None, pairs: int) -> tuple[np.ndarray, list[set[str]]]:
    m, grid = find_machine(machine), Grid.of(procs)
    cuts, links = Cuts(grid), Links(m, grid)
    src = candidates("conv", {"N": 16, "H": 16, "W": 16, "F": 32, "C": 64}, grid)
    dst = candidates("conv", {"N": 16, "H": 16, "W": 16, "F": 64, "C": 32}, grid)
    dst += candidates("norm", EXTENTS, grid)

    def numbers(gs: tuple[OpGrid, ...], names: str) -> np.ndarray:
        return np.array([[cuts.add(g.get(n, ())) for n in names] for g in gs])

    partial = np.array([mask_of(g.get("C", ())) for g in src])
    reads = [Read(), *(Read(window, 16) if window else Read() for _ in "HW"), Read()]
    table = move_table(
        links, cuts, tuple(EXTENTS.values()), numbers(src, "NHWF"), partial, numbers(dst, "NHWC"), reads, 4
    )
    rng = np.random.default_rng(0)
    out, kinds = [], []
    for _ in range(pairs):
        i, j = int(rng.integers(len(src))), int(rng.integers(len(dst)))
        a = layout(grid, src[i], "NHWF", None, src[i].get("C", ()))
        moves = transition(a, layout(grid, dst[j], "NHWC", window, ()))
        out.append((table[i, j] + 1e-12) / (sum(move_price(x, 4, m)[0] for x in moves) + 1e-12))
        kinds.append({x.kind for x in moves})
    return np.array(out), kinds


@pytest.mark.parametrize(("procs", "machine"), [(16, "perlmutter-a100"), (8, "abci-v100"), (8, "cori-knl")])
def test_even_blocks_are_priced_exactly(procs: int, machine: str) -> None:
    got, kinds = ratios(procs, machine, None, 700)
    assert np.allclose(got, 1, rtol=1e-9)
    assert {"allreduce", "reduce_scatter", "allgather", "alltoall", "p2p", "slice"} <= set().union(*kinds)


def test_uneven_blocks_are_priced_by_the_largest() -> None:
    got, _ = ratios(12, "cori-knl", None, 700)  # thirds of 16
    assert np.isclose(np.median(got), 1, rtol=1e-9)
    assert np.quantile(got, 0.05) > 0.7 and np.quantile(got, 0.95) < 1.25


def test_ghosts_are_exact_but_where_blocks_change_hands_as_well() -> None:
    got, kinds = ratios(16, "perlmutter-a100", Window(3, 1, 1, 1), 700)
    simple = np.array([not k & {"alltoall", "p2p"} for k in kinds])
    assert any("halo" in k for k in kinds)
    assert np.allclose(got[simple], 1, rtol=1e-9)
    assert np.quantile(got, 0.05) > 0.85 and np.quantile(got, 0.95) < 1.15
