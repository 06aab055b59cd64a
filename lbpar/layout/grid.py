"""The grid of processes: P ranks factored into small atomic axes.

Axis 0 is the fastest link (neighbouring ranks inside a node), the last axis the slowest.
No MPI here: a grid is integer arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from lbpar.errors import LayoutError
from lbpar.text import shorten

Axes = tuple[int, ...]
MOST_PROCS = 2**20
"""Processes of a grid: several times what the largest machines have devices."""


@dataclass(frozen=True)
class Grid:
    """P processes as a product of atomic axes.

    Parameters
    ----------
    sizes : tuple of int
        Number of processes along each axis, axis 0 fastest: ``rank = sum(coord[i] * stride[i])`` with
        ``stride[0] = 1``. An empty tuple is the grid of one process.
    """

    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(s < 1 for s in self.sizes):
            raise LayoutError(f"grid: axis sizes {self.sizes} must all be at least 1.")
        if self.size > MOST_PROCS:
            raise LayoutError(f"grid: got {self.size} processes, expected at most {MOST_PROCS}.")

    @classmethod
    def of(cls, procs: int) -> Grid:
        """Factor ``procs`` into its prime factors, smallest (fastest) first."""
        if not 1 <= procs <= MOST_PROCS:
            raise LayoutError(f"grid: got {shorten(procs)} processes, expected 1 to {MOST_PROCS}.")
        sizes, rest, p = [], procs, 2
        while rest > 1:
            while rest % p == 0:
                sizes.append(p)
                rest //= p
            p += 1 if p == 2 else 2
            if p * p > rest > 1:
                sizes.append(rest)
                break
        return cls(tuple(sizes))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.sizes)

    @cached_property
    def size(self) -> int:
        """Number of processes P."""
        return prod(self.sizes)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Distance in rank between neighbours along each axis."""
        out, s = [], 1
        for n in self.sizes:
            out.append(s)
            s *= n
        return tuple(out)

    @cached_property
    def axes(self) -> Axes:
        """All axis numbers, fastest first."""
        return tuple(range(len(self.sizes)))

    def ways(self, axes: Axes) -> int:
        """Number of processes along the given axes together."""
        return prod(self.sizes[a] for a in axes)

    def coords(self, rank: int) -> tuple[int, ...]:
        """Coordinates of a rank, one per axis."""
        return _coords(self.sizes, rank)

    def rank(self, coords: tuple[int, ...]) -> int:
        """Rank at the given coordinates."""
        return sum(c * s for c, s in zip(coords, self.strides, strict=True))

    def group(self, axes: Axes, rank: int) -> tuple[int, ...]:
        """World ranks that share ``rank``'s coordinates outside ``axes``, in increasing order.

        These are the members of the sub-communicator over ``axes`` that contains ``rank``.
        """
        return _group(self, tuple(sorted(axes)), rank)

    def __str__(self) -> str:
        return "·".join(map(str, self.sizes)) or "1"


@lru_cache(maxsize=1 << 16)
def _coords(sizes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    out = []
    for n in sizes:
        rank, c = divmod(rank, n)
        out.append(c)
    return tuple(out)


@lru_cache(maxsize=1 << 16)
def _group(grid: Grid, axes: Axes, rank: int) -> tuple[int, ...]:
    coords, strides = grid.coords(rank), grid.strides
    base = rank - sum(coords[a] * strides[a] for a in axes)
    steps = (range(grid.sizes[a]) for a in axes)
    return tuple(sorted(base + sum(c * strides[a] for c, a in zip(cs, axes, strict=True)) for cs in product(*steps)))
