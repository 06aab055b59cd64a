"""Candidate op grids: which axes may split which loops of an op.

The rules that keep the space small (the command prints those that were in force):

1. Axes of one size are interchangeable but for the speed of their links, so only numbers of axes per loop matter: samples,
   depth, height, width take the slowest axes in this order, channels and filters the fastest; idle axes lie between.
2. Where both channels and filters are split, both orders are candidates, so that the filters of one layer can be the channels
   of the next on the same axes. Channels of layers without weights come in every such order, too.
3. No loop is split into more parts than it has indices; only samples are where processes share cores, because a process without a
   sample leaves its core to others, and one that repeats another's work does not.
4. Spatial loops of equal extent are split in the order depth, height, width: a later one never more often.
5. A flattened dimension is split along samples and its first spatial dimension (evenly) only; a concatenation is not split along
   channels; a grouped convolution along whole groups, evenly.
6. More than a certain number of processes get axes of 4, 8 or 16 instead of 2.
7. Idle axes are considered where using them does not shorten the op's computation much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from lbpar.layout.grid import Axes, Grid
from lbpar.layout.layout import Ints

SPATIAL = ("D", "H", "W")
OpGrid = dict[str, Axes]

#: Most axes of a planner's grid; more processes get larger axes.
MOST_AXES = 6


def planning_grid(procs: int, most_axes: int = MOST_AXES) -> Grid:
    """The grid to plan on: prime axes, or products of them where those would be too many.

    Equal axes are worth more than small ones (they are interchangeable), so powers of one prime merge evenly.

    >>> str(planning_grid(64)), str(planning_grid(1024)), str(planning_grid(12))
    ('2·2·2·2·2·2', '4·4·4·4·4', '2·2·3')
    """
    primes = Grid.of(procs).sizes
    if len(primes) <= most_axes:
        return Grid(primes)
    powers = {p: primes.count(p) for p in dict.fromkeys(primes)}
    step = 2
    while True:
        sizes: list[int] = []
        for p, n in powers.items():
            whole, rest = divmod(n, step)
            sizes += [p**rest] * (rest > 0) + [p**step] * whole
        if len(sizes) <= max(most_axes, len(powers)):
            return Grid(tuple(sizes))
        step += 1


@lru_cache(maxsize=256)
def _splits(count: int, loops: int) -> Ints:
    """Ways to deal ``count`` equal axes to ``loops`` loops, some left over: a row each."""
    if loops == 0:
        return np.zeros((1, 0), np.int64)
    rows = [(first, _splits(count - first, loops - 1)) for first in range(count + 1)]
    return np.concatenate([np.insert(rest, 0, first, axis=1) for first, rest in rows])


def candidates(
    loops: Mapping[str, int],
    grid: Grid,
    splits: Mapping[str, bool] | None = None,
    *,
    weighted: bool = False,
    spare: bool = False,
) -> tuple[OpGrid, ...]:
    """All candidate grids of an op, by the rules of this module; idle ones included.

    Parameters
    ----------
    loops : mapping
        Its loops and their extents, as `Op.loops` gives them.
    grid : Grid
        The processes.
    splits : mapping, optional
        Loops that may be split, and whether only evenly, as `Op.splits` gives them; any by default.
    weighted : bool
        The op has weights.
    spare : bool
        Samples may be split into more parts than there are.
    """
    extents = dict(loops)
    if spare and "N" in extents:
        extents["N"] = max(extents["N"], grid.size)
    splits = dict.fromkeys(extents, False) if splits is None else splits
    names = [n for n, e in extents.items() if e > 1 and n in splits]
    slow = tuple(n for n in ("N", *SPATIAL) if n in names)
    fast = tuple(n for n in ("F", "C", "G") if n in names)
    even = tuple(n for n in names if splits[n])
    # How often a loop may be split: at most once per index, evenly where the op says so.
    most = tuple(grid.size if extents[n] >= grid.size and n not in even else extents[n] for n in (*slow, *fast))
    spatial = [n for n in SPATIAL if n in extents]
    pairs = pairwise(spatial)
    ordered = tuple((a, b) for a, b in pairs if extents[a] == extents[b] and a in slow and b in slow)
    return _candidates(slow, fast, most, ordered, even, not weighted, grid)


@lru_cache(maxsize=4096)
def _candidates(
    slow: tuple[str, ...],
    fast: tuple[str, ...],
    most: tuple[int, ...],
    ordered: tuple[tuple[str, str], ...],
    even: tuple[str, ...],
    weightless: bool,
    grid: Grid,
) -> tuple[OpGrid, ...]:
    """Deal the axes of each size to the loops in every way that ``most`` (parts per loop) allows."""
    names = (*slow, *fast)
    if not names:
        return ({},)
    by_size: dict[int, list[int]] = {}
    for a in reversed(grid.axes):  # slowest first
        if grid.sizes[a] > 1:
            by_size.setdefault(grid.sizes[a], []).append(a)
    dealt, ways = np.zeros((1, 0, len(names)), np.int64), np.ones((1, len(names)), np.int64)
    for size, axes in by_size.items():
        split = _splits(len(axes), len(names))
        longer = (ways[:, None] * size ** split[None]).reshape(-1, len(names))
        fits = np.flatnonzero((longer <= np.array(most)).all(1))
        before, last = np.divmod(fits, len(split))
        dealt, ways = np.concatenate([dealt[before], split[last][:, None]], 1), longer[fits]
    at = {n: i for i, n in enumerate(names)}
    good = np.ones(len(ways), bool)
    for first, later in ordered:
        good &= ways[:, at[later]] <= ways[:, at[first]]
    for loop in even:
        good &= most[at[loop]] % ways[:, at[loop]] == 0
    out: dict[tuple[tuple[str, Axes], ...], OpGrid] = {}
    axes_by_size = tuple(map(tuple, by_size.values()))
    for numbers in dealt[good].tolist():
        out |= _assigned(slow, fast, axes_by_size, tuple(map(tuple, numbers)), weightless)
    return tuple(out.values())


@lru_cache(maxsize=1 << 16)
def _assigned(*args: Any) -> dict[tuple[tuple[str, Axes], ...], OpGrid]:
    """`_assign`, each by what it says; layers of other extents ask for most of them again."""
    return {tuple(sorted(made.items())): made for made in _assign(*args)}


def _assign(
    slow: Sequence[str],
    fast: Sequence[str],
    by_size: Sequence[Sequence[int]],
    dealt: Sequence[Sequence[int]],
    weightless: bool,
) -> Iterator[OpGrid]:
    """Axes for the dealt numbers: one grid, or one per order of the fast loops."""
    base: dict[str, list[int]] = {n: [] for n in (*slow, *fast)}
    ends: list[Sequence[int]] = []
    for axes, numbers in zip(by_size, dealt, strict=True):
        at = 0
        for loop, k in zip(slow, numbers, strict=False):
            base[loop] += axes[at : at + k]
            at += k
        left = sum(numbers[len(slow) :])
        ends.append(axes[len(axes) - left :] if left else [])
    counts = {loop: [d[len(slow) + i] for d in dealt] for i, loop in enumerate(fast)}
    used = [loop for loop in fast if any(counts[loop])]
    start = {n: tuple(sorted(v, reverse=True)) for n, v in base.items() if v}
    if not used:
        yield start
    elif len(used) == 1:
        all_of = tuple(sorted((a for e in ends for a in e), reverse=True))
        yield {**start, used[0]: all_of}
        if weightless:
            for i in range(1, len(all_of)):
                yield {**start, used[0]: (*all_of[i:], *all_of[:i])}
    else:
        for order in (used, used[::-1]):
            made = dict(start)
            for i, end in enumerate(ends):
                at = 0
                for loop in order:
                    k = counts[loop][i]
                    made[loop] = (*made.get(loop, ()), *end[at : at + k])
                    at += k
            yield {n: tuple(sorted(v, reverse=True)) for n, v in made.items()}
