"""From numbers of ways to grid axes.

Sample and spatial loops take the slowest axes, so that neighbouring ranks share what is exchanged most: filters and channels, which take the
fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any

from lbpar.errors import PlanError
from lbpar.layout.grid import Axes, Grid

SLOW, FAST = ("N", "D", "H", "W"), ("F", "C", "G")


def assign(name: str, wanted: Mapping[Any, int | Sequence[int]], grid: Grid) -> dict[str, Axes]:
    """Axes for each loop of layer ``name``.

    Parameters
    ----------
    name : str
        Where the ways were given, for messages.
    wanted : mapping
        Loop to a number of ways, or to the axes themselves (major first).
    grid : Grid
        The processes; axes left over are idle.

    Raises
    ------
    PlanError
        The ways cannot be made from the grid's axes.
    """
    out: dict[str, Axes] = {loop: tuple(w) for loop, w in wanted.items() if not isinstance(w, int)}
    _check_axes(name, out, grid)
    free = [a for a in grid.axes if all(a not in axes for axes in out.values())]
    for loops, order in ((SLOW, -1), (FAST, 1)):
        for loop in loops:
            ways = wanted.get(loop)
            if not isinstance(ways, int):
                continue
            if ways < 1:
                raise PlanError(f"{name}: got {ways} ways of {loop}, expected at least 1.")
            axes = _pick(ways, free[::order], grid)
            if axes is None:
                raise PlanError(f"{name}: {_misfit(wanted, loop, grid, free)}")
            out[loop] = tuple(sorted(axes, reverse=True))
            free = [a for a in free if a not in axes]
    return out


def _check_axes(name: str, given: Mapping[str, Axes], grid: Grid) -> None:
    owner: dict[int, str] = {}
    for loop, axes in given.items():
        for a in axes:
            if a not in grid.axes:
                raise PlanError(
                    f"{name}.{loop}: there is no grid axis {a}; {_processes(grid.size)} have {len(grid.axes)} axes, numbered from 0."
                )
            if a in owner:
                raise PlanError(f"{name}: axis {a} splits both {owner[a]} and {loop}; give each axis to one loop.")
            owner[a] = loop


def _misfit(wanted: Mapping[Any, int | Sequence[int]], loop: str, grid: Grid, free: Sequence[int]) -> str:
    """Why the ways cannot be made, and what could be."""
    ways = {k: w if isinstance(w, int) else grid.ways(tuple(w)) for k, w in wanted.items()}
    total = prod(ways.values())
    if grid.size % total:
        asked = " x ".join(f"{k} {w}" for k, w in ways.items())
        product = f" = {total} ways" if len(ways) > 1 else f" is {total} ways"
        return (
            f"{asked}{product}, which do not divide {_processes(grid.size)}. "
            f"Take a multiple of {total}, or change the ways."
        )
    left = ", ".join(str(grid.sizes[a]) for a in sorted(free)) or "none"
    return f"{loop}: got {ways[loop]} ways, expected a product of the sizes of the grid axes that are left ({left})."


def _processes(n: int) -> str:
    return f"{n} process" if n == 1 else f"{n} processes"


def _pick(ways: int, free: Sequence[int], grid: Grid) -> Axes | None:
    """The first axes, in the given order, whose sizes multiply to ``ways``."""
    if ways == 1:
        return ()
    for n in range(1, len(free) + 1):
        for axes in combinations(free, n):
            if grid.ways(axes) == ways:
                return axes
    return None
