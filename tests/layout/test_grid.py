"""Ranks, coordinates and groups of a grid."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest

from lbpar.errors import LayoutError
from lbpar.layout.grid import Grid


@pytest.mark.parametrize("procs", [*range(1, 65), 97, 360, 65536])
def test_prime_factors(procs: int) -> None:
    sizes = Grid.of(procs).sizes
    assert prod(sizes) == procs and list(sizes) == sorted(sizes)
    assert all(all(s % d for d in range(2, s)) for s in sizes)


@pytest.mark.parametrize("sizes", [(), (1,), (2, 3), (3, 2), (2, 2, 3), (1, 4, 1, 3)])
def test_ranks_and_groups(sizes: tuple[int, ...]) -> None:
    grid = Grid(sizes)
    seen = [grid.coords(r) for r in range(grid.size)]
    assert sorted(seen) == sorted(product(*map(range, sizes)))
    assert [grid.rank(c) for c in seen] == list(range(grid.size))
    if sizes:
        assert grid.coords(1 % grid.size)[0] == 1 % sizes[0], "axis 0 is fastest"
    for n in range(len(sizes) + 1):
        for axes in combinations(grid.axes, n):
            groups = {grid.group(axes, r) for r in range(grid.size)}
            assert sorted(r for g in groups for r in g) == list(range(grid.size))
            for g in groups:
                assert len(g) == grid.ways(axes) and list(g) == sorted(g)
                assert len({tuple(c for a, c in enumerate(grid.coords(r)) if a not in axes) for r in g}) == 1


def test_order_of_axes_does_not_matter_to_a_group() -> None:
    grid = Grid((2, 3, 2))
    assert grid.group((2, 0), 5) == grid.group((0, 2), 5)


@pytest.mark.parametrize("procs", [0, -3, 2**20 + 1, 10**9])
def test_no_grid(procs: int) -> None:
    with pytest.raises(LayoutError, match="expected 1 to 1048576"):
        Grid.of(procs)


def test_empty_axis() -> None:
    with pytest.raises(LayoutError, match="axis sizes"):
        Grid((2, 0))
