"""From numbers of ways to grid axes.

Sample and spatial loops take the slowest axes, so that neighbouring ranks share what is exchanged most: filters and channels, which take the
fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from lbpar.errors import PlanError
from lbpar.layout.grid import Axes, Grid

SLOW, FAST = ("N", "D", "H", "W"), ("F", "C", "G")


def assign(name: str, wanted: Mapping[Any, int | Sequence[int]], grid: Grid) -> dict[str, Axes]:
    """Axes for each loop of layer ``name``.

    Parameters
    ----------
    name : str
        For messages.
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
                raise PlanError(
                    f"{name}: cannot split {loop} {ways} ways: {grid.size} processes are {grid}, of which "
                    f"{'·'.join(str(grid.sizes[a]) for a in free) or '1'} is left for {loop}. The ways of a layer must multiply to a divisor of {grid.size}."
                )
            out[loop] = tuple(sorted(axes, reverse=True))
            free = [a for a in free if a not in axes]
    return out


def _pick(ways: int, free: Sequence[int], grid: Grid) -> Axes | None:
    """The first axes, in the given order, whose sizes multiply to ``ways``."""
    if ways == 1:
        return ()
    for n in range(1, len(free) + 1):
        for axes in combinations(free, n):
            if grid.ways(axes) == ways:
                return axes
    return None
