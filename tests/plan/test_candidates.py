from __future__ import annotations

import pytest

from lbpar.graph.builder import GraphBuilder
from lbpar.graph.op import Op
from lbpar.graph.ops.shape import Concat, Flatten
from lbpar.layout.grid import Grid
from lbpar.plan.candidates import OpGrid, candidates, planning_grid

CONV = {"N": 256, "H": 56, "W": 56, "F": 64, "C": 64}


def ways(grid: Grid, g: dict[str, tuple[int, ...]]) -> dict[str, int]:
    return {loop: grid.ways(a) for loop, a in g.items()}


def test_numbers_of_parts_are_products_of_axes_and_no_grid_comes_twice() -> None:
    grid = Grid.of(8)
    found = candidates(CONV, grid, weighted=True)
    assert len({tuple(sorted(g.items())) for g in found}) == len(found)
    for g in found:
        used = [a for axes in g.values() for a in axes]
        assert len(used) == len(set(used))
        assert all(CONV[loop] >= n for loop, n in ways(grid, g).items())


def test_all_distributions_of_three_axes_over_four_loops() -> None:
    """Brute force: every way to give 3 equal axes to N, H, F, C or nobody, W never more than H, both orders of F and C."""
    grid = Grid.of(8)
    got = {tuple(sorted(ways(grid, g).items())) for g in candidates({**CONV, "W": 1}, grid, weighted=True)}
    want = set()
    for n in range(4):
        for h in range(4 - n):
            for f in range(4 - n - h):
                for c in range(4 - n - h - f):
                    full = {"N": 2**n, "H": 2**h, "F": 2**f, "C": 2**c}
                    want.add(tuple(sorted((k, v) for k, v in full.items() if v > 1)))
    assert got == want


def test_samples_take_the_slow_axes_and_channels_the_fast_ones() -> None:
    grid = Grid.of(16)
    for g in candidates({"N": 64, "F": 64, "C": 64}, grid, weighted=True):
        channel = [a for loop in ("F", "C") for a in g.get(loop, ())]
        assert not g.get("N") or not channel or min(g["N"]) > max(channel)
        assert all(axes == tuple(sorted(axes, reverse=True)) for axes in g.values())


def test_alternating_splits_of_linear_layers_share_axes() -> None:
    """PaSE's (n, c) = (4, 8), (8, 4), (4, 8): each layer's filters are the next one's channels, on the same axes."""
    grid = Grid.of(32)
    found = candidates({"N": 128, "F": 4096, "C": 4096}, grid, weighted=True)
    one = [g for g in found if ways(grid, g) == {"F": 4, "C": 8}]
    two = [g for g in found if ways(grid, g) == {"F": 8, "C": 4}]
    assert any(a["F"] == b["C"] and a["C"] == b["F"] for a in one for b in two)


def test_what_the_papers_found_is_in_the_space() -> None:
    four = Grid.of(4)
    late = candidates({"N": 128, "H": 14, "W": 14, "F": 512, "C": 512}, four, weighted=True)
    assert {"H": (1,), "W": (0,)} in late  # OptCNN's h = 2, w = 2
    sixteen = Grid.of(16)
    fc = [ways(sixteen, g) for g in candidates({"N": 512, "F": 1000, "C": 2048}, sixteen, weighted=True)]
    assert {"F": 4} in fc and {} in fc  # a small group, or one device
    w = candidates(CONV, sixteen, weighted=True)
    assert any(set(g) == {"C", "F"} and len(g["C"]) == len(g["F"]) == 2 for g in w)  # stationary-W
    volume = candidates({"N": 2, "D": 64, "H": 64, "W": 64, "F": 16, "C": 1}, sixteen, weighted=True)
    assert any(ways(sixteen, g) == {"N": 2, "D": 2, "H": 2, "W": 2} for g in volume)


def test_later_spatial_loops_of_equal_extent_are_not_split_more() -> None:
    for g in candidates(CONV, Grid.of(16), weighted=True):
        assert len(g.get("W", ())) <= len(g.get("H", ()))
    flat = candidates({**CONV, "H": 8, "W": 200}, Grid.of(16), weighted=True)
    assert any(len(g.get("W", ())) > len(g.get("H", ())) for g in flat)


def test_special_ops_keep_their_rules() -> None:
    grid = Grid.of(8)

    def of(op: Op, *xs: tuple[int, ...]) -> tuple[OpGrid, ...]:
        return candidates(op.loops(xs), grid, op.splits(xs), weighted=op.weighted)

    assert all("C" not in g for g in of(Concat(), (8, 8, 8, 32), (8, 8, 8, 32)))
    assert all(set(g) <= {"N", "H"} for g in of(Flatten(), (8, 8, 8, 64)))
    assert all(set(g) <= {"N"} for g in of(Flatten(), (8, 7, 7, 64)))
    g = GraphBuilder(input=(8, 8, 48))
    grouped = of(g.build(g.conv(g.input, 48, 3, pad=1, groups=12, name="c"))["c"].op, (8, 8, 8, 48))
    assert all("F" not in g and "C" not in g for g in grouped)
    assert {4} == {grid.ways(g["G"]) for g in grouped if len(g) == 1 and "G" in g and len(g["G"]) > 1}


@pytest.mark.parametrize(
    ("procs", "sizes"),
    [(1, ()), (64, (2,) * 6), (12, (2, 2, 3)), (1024, (4,) * 5), (61, (61,)), (65536, (2, 8, 8, 8, 8, 8))],
)
def test_grids_to_plan_on(procs: int, sizes: tuple[int, ...]) -> None:
    grid = planning_grid(procs)
    assert grid.size == procs and len(grid.sizes) <= 6
    assert grid.sizes == sizes


def test_samples_are_split_further_than_there_are_only_where_cores_are_shared() -> None:
    grid = Grid.of(4)
    loops = {"N": 2, "H": 8, "W": 8, "F": 8, "C": 8}
    most = {
        s: max(ways(grid, g).get("N", 1) for g in candidates(loops, grid, weighted=True, spare=s))
        for s in (False, True)
    }
    assert most == {False: 2, True: 4}
    one = {"N": 1, "H": 8, "W": 8, "C": 8}
    assert any(ways(grid, g) == {"N": 2, "H": 2} for g in candidates(one, grid, spare=True))
