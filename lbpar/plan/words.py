"""Plans in words."""

from __future__ import annotations

from collections.abc import Mapping

from lbpar.layout.grid import Axes, Grid

WORDS = {"N": "samples", "C": "channels", "F": "filters", "D": "depth", "H": "height", "W": "width", "G": "groups"}


def grid_words(op_grid: Mapping[str, Axes], grid: Grid) -> str:
    """An op grid in words: ``samples 8 × height 2``; axes left idle are said to repeat the work."""
    ways = {loop: grid.ways(axes) for loop, axes in op_grid.items() if axes}
    text = " × ".join(f"{WORDS[loop]} {n}" for loop, n in sorted(ways.items(), key=_order)) or "not split"
    used = grid.ways(tuple(a for axes in op_grid.values() for a in axes))
    return text if used == grid.size else f"{text}, {grid.size // used} copies"


def _order(item: tuple[str, int]) -> int:
    return list("NDHWGFC").index(item[0])
