"""Seconds of moves between many layouts at once: `lbpar.layout.transition` and its price, in arrays.

Layouts are rows of cut numbers (`lbpar.plan.cuts`), one per dimension, and a set of partial axes. The tables agree with
transition and price for even blocks; for uneven ones they take the largest block everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.cost.machine import Machine
from lbpar.graph.loops import Window
from lbpar.layout.grid import Grid
from lbpar.layout.transition import MoveKind
from lbpar.plan.cuts import Cuts, Floats, Ghosts, Ints, ghosts


class Links:
    """`Machine.move_seconds` for groups given as sets of axes, as arrays over all sets."""

    def __init__(self, machine: Machine, grid: Grid) -> None:
        self.machine, self.grid = machine, grid
        n = 1 << len(grid.sizes)
        self.ways = np.ones(n, np.int64)
        for m in range(1, n):
            low = (m & -m).bit_length() - 1
            self.ways[m] = self.ways[m & (m - 1)] * grid.sizes[low]
        self._linear: dict[MoveKind, tuple[Floats, Floats]] = {}
        self._pairwise: tuple[Floats, Floats, Floats, Floats] | None = None

    def _terms(self, kind: MoveKind) -> tuple[Floats, Floats]:
        """Seconds of no bytes, and per byte, for every set of axes; messages as in a full group."""
        known = self._linear.get(kind)
        if known is None:
            zero, one = np.zeros(self.ways.size), np.zeros(self.ways.size)
            for m in range(1, self.ways.size):
                parts = self.machine.parts(self.grid, tuple(a for a in self.grid.axes if m >> a & 1))
                if parts:
                    zero[m] = self.machine.move_seconds(kind, parts, 0.0, 1.0)
                    one[m] = self.machine.move_seconds(kind, parts, 1.0, 1.0) - zero[m]
            known = self._linear[kind] = (zero, one)
        return known

    def collective(self, kind: MoveKind, group: Ints, sent: Floats) -> Floats:
        """Allreduce, reduce-scatter, allgather of ``sent`` bytes over the axes ``group``; no time over none."""
        zero, one = self._terms(kind)
        return zero[group] + one[group] * sent

    def messages(self, group: Ints, sent: Floats, count: Any) -> Floats:
        """Point-to-point messages over the slowest links of ``group``."""
        zero, one = self._terms("p2p")
        return zero[group] * count + one[group] * sent

    def alltoall(self, group: Ints, sent: Floats, count: Any) -> Floats:
        """Exchange of everyone with everyone in ``group``."""
        if self._pairwise is None:
            self._pairwise = self._pairwise_terms()
        alpha, beta, floor, slope = self._pairwise
        out = count * alpha[group] + sent * beta[group]
        return np.minimum(out, floor[group] * (count > 0) + sent * slope[group])

    def _pairwise_terms(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Seconds per message and per byte of a pairwise exchange; start and seconds per byte of one in log p rounds."""
        m, n = self.machine, self.ways.size
        alpha, beta, floor, slope = np.zeros(n), np.zeros(n), np.full(n, np.inf), np.zeros(n)
        for g in range(1, n):
            parts = m.parts(self.grid, tuple(a for a in self.grid.axes if g >> a & 1))
            if parts:
                alpha[g], beta[g] = m.pairwise(parts)
                if m.file.latency == "log":
                    floor[g], slope[g] = m.rounds(parts)
        floor[0] = 0.0
        return alpha, beta, floor, slope

    def allreduce(self, group: Ints, size: Floats) -> Floats:
        """Allreduce of arrays of ``size`` bytes."""
        p = self.ways[group]
        return self.collective("allreduce", group, 2 * size * (p - 1) / p)


@dataclass(frozen=True)
class Read:
    """How one dimension of the destination is read: through a window of a loop of this extent, or plainly (None)."""

    window: Window | None = None
    loop: int = 0
    transposed: bool = False


def move_table(
    links: Links,
    cuts: Cuts,
    shape: Sequence[int],
    src: Ints,
    partial: Ints,
    dst: Ints,
    reads: Sequence[Read],
    item: int,
) -> Floats:
    """Seconds to go from each of R layouts to each of C complete ones.

    Parameters
    ----------
    shape : sequence of int
        Global shape of the tensor.
    src, dst : integer arrays, shapes (R, dims) and (C, dims)
        Cut of every dimension.
    partial : integer array, shape (R,)
        Axes over which the source is partial, as bits.
    reads : sequence of Read
        How the destination reads each dimension.
    item : int
        Bytes per element.

    Returns
    -------
    float64 array, shape (R, C)
    """
    size = (src.shape[0], dst.shape[0])
    out = np.zeros(size[0] * size[1])
    if not shape:
        return out.reshape(size) + links.allreduce(partial, np.full(size[0], float(item)))[:, None]
    windows = [_windows(cuts, e, dst[:, i], r) for i, (e, r) in enumerate(zip(shape, reads, strict=True))]
    pattern = _pattern(links, cuts, src, partial, dst, windows)
    # Lengths by cut number: plain blocks, blocks with ghosts, and what a halo exchange sends, keeps and to how many.
    lengths = [_lengths(cuts, e, w) for e, w in zip(shape, windows, strict=True)]
    copy = links.machine.copy_seconds

    def product(which: list[Ints], at: Ints) -> Floats:
        total = lengths[0][which[0][at]]
        for d in range(1, len(shape)):
            total = total * lengths[d][which[d][at]]
        return total * item

    at = pattern.scatters
    if at.size:
        g, n = links.ways[pattern.scattered[at]], product(pattern.scattered_blocks, at)
        out[at] += links.collective("reduce_scatter", pattern.scattered[at], n * (g - 1)) + copy(n)
    at = pattern.sums
    if at.size:
        out[at] += links.allreduce(pattern.summed[at], product(pattern.summed_blocks, at))
    at = pattern.early
    if at.size:
        out[at] += copy(product(pattern.summed_blocks, at))
    at = pattern.slices
    if at.size:
        out[at] += copy(product(pattern.sliced, at))
    at = pattern.halos
    if at.size:
        sent, own = product(pattern.halo_sent, at), product(pattern.halo_own, at)
        readers = product(pattern.halo_readers, at) / item
        out[at] += links.messages(pattern.halo[at], sent - own, readers - 1) + copy(product(pattern.haloed, at))
    at = pattern.gathers
    if at.size:
        p = links.ways[pattern.moved[at]]
        out[at] += links.collective("allgather", pattern.moved[at], product(pattern.haloed, at) * (p - 1))
        out[at] += copy(product(pattern.final, at))
    at = pattern.exchanges
    if at.size:
        sent, count = pattern.exchange(lengths, item)
        moved, swap = pattern.moved[at], pattern.swaps
        seconds = np.empty(at.size)
        seconds[swap] = links.alltoall(moved[swap], sent[swap], count[swap])
        other = ~swap
        seconds[other] = links.messages(moved[other], sent[other], count[other])
        out[at] += seconds + copy(product(pattern.final, at))
    return out.reshape(size)


#: Sections of the vector of lengths of one dimension, each `Cuts.capacity` long; then a one.
PLAIN, HELD, SENT, OWN, READERS = range(5)


def _windows(cuts: Cuts, extent: int, numbers: Ints, read: Read) -> dict[int, Ghosts]:
    """Ghosts of the cuts that have any."""
    if read.window is None:
        return {}
    found = {int(c): ghosts(extent, read.loop, cuts.sizes[c], read.window, read.transposed) for c in np.unique(numbers)}
    return {c: g for c, g in found.items() if g.active}


def _lengths(cuts: Cuts, extent: int, windows: dict[int, Ghosts]) -> Floats:
    n = cuts.capacity
    plain = np.ones(n)
    plain[: len(cuts.axes)] = cuts.blocks(extent)
    out = np.concatenate([plain, plain, plain, plain, np.ones(n), [1.0]])
    for c, g in windows.items():
        out[[HELD * n + c, SENT * n + c, OWN * n + c, READERS * n + c]] = g.held, g.sent, g.own, g.readers
    return out


class _Pattern:
    """What happens between every pair of layouts, whatever the extents: which moves, over which axes, of which blocks.

    Lists of index arrays (one per dimension, flat over pairs) point into the vectors of lengths.
    """

    def __init__(
        self, links: Links, cuts: Cuts, src: Ints, partial: Ints, dst: Ints, windows: list[dict[int, Ghosts]]
    ) -> None:
        ways = self.ways = links.ways
        size = (src.shape[0], dst.shape[0])
        dims = range(src.shape[1])
        src, partial, dst = (a.astype(np.int32) for a in (src, partial, dst))  # half the memory, and faster
        masks = cuts.mask_array()
        shards = np.bitwise_or.reduce(masks[src], axis=1)
        free = ~(partial | shards) & ((1 << len(cuts.grid.sizes)) - 1)
        features = [_structure(cuts, src[:, i], partial, free, dst[:, i]) for i in dims]
        n, masks = cuts.capacity, cuts.mask_array()  # after the pairs, which may make new cuts
        used, scattered = np.zeros(size, np.int32), np.zeros(size, np.int32)
        for f in features:
            used |= masks[f.c1]
            scattered |= f.scattered
        summed = partial[:, None] & ~scattered
        # What is replicated is cut before an allreduce, over axes that are neither used nor still to be summed.
        early, cut_now, now = np.zeros(size, bool), np.zeros(size, np.int32), []
        for i, f in zip(dims, features, strict=True):
            md = masks[dst[None, :, i]]
            pre = (summed > 0) & f.sliceable & (((used | summed) & md & ~masks[f.c1]) == 0)
            now.append((pre, np.where(pre, dst[None, :, i], f.c1)))
            cut_now |= masks[now[-1][1]]
            early |= pre
        used = cut_now
        halo, moved, after, goal = (np.zeros(size, np.int32) for _ in range(4))
        sliced, gathers, any_left = np.zeros(size, bool), np.ones(size, bool), np.zeros(size, bool)
        self.scattered_blocks, self.summed_blocks, self.sliced, self.haloed, self.final = [], [], [], [], []
        self.halo_sent, self.halo_own, self.halo_readers = [], [], []
        lefts, inside = [], []
        for i, f, (pre, c) in zip(dims, features, now, strict=True):
            d = np.broadcast_to(dst[None, :, i], size)
            win = np.isin(dst[:, i], list(windows[i]))[None, :] if windows[i] else np.zeros((1, size[1]), bool)
            m1, md = masks[c], masks[d]
            same, whole = c == d, c == 0
            changed = ~same | win
            cut = changed & f.sliceable & ~pre & ((used & md & ~m1) == 0)
            fresh = cut & whole  # ghosts come with the slice
            edge = win & ~whole & (cut | same)
            left = changed & ~cut & ~edge
            two = np.where(fresh, d + HELD * n, np.where(cut, d, c))
            three = np.where(edge, d + HELD * n, two)
            self.scattered_blocks.append(f.c1.reshape(-1))
            self.summed_blocks.append(c.reshape(-1))
            self.sliced.append(two.reshape(-1))
            self.haloed.append(three.reshape(-1))
            self.final.append(np.where(left, d + HELD * n, three).reshape(-1))
            self.halo_sent.append(np.where(edge, d + SENT * n, two).reshape(-1))
            self.halo_own.append(np.where(edge, d + OWN * n, two).reshape(-1))
            self.halo_readers.append(np.where(edge, d + READERS * n, 5 * n).reshape(-1))
            sliced |= cut
            halo |= np.where(edge, md, 0)
            # Nothing is known to stay in place under a window that cannot be served by a halo exchange.
            moved |= np.where(left, np.where(win, m1, f.before), 0)
            after |= np.where(left, np.where(win, md, f.after), 0)
            gathers &= ~left | (f.gathers & ~win)
            any_left |= left
            goal |= md
            lefts.append(left)
            inside.append((f, d, win, three))
        self.scattered, self.summed, self.halo, self.moved = (x.reshape(-1) for x in (scattered, summed, halo, moved))
        self.scatters, self.sums = np.flatnonzero(scattered), np.flatnonzero(summed)
        self.early = np.flatnonzero(early)
        self.slices, self.halos = np.flatnonzero(sliced), np.flatnonzero(halo)
        self.gathers = np.flatnonzero(any_left & gathers & (moved > 0))
        at = self.exchanges = np.flatnonzero(any_left & ~gathers)
        self.swaps = (moved == after).reshape(-1)[at]
        here = self.moved[at]
        # Digit by digit (a place in a cut is a digit of the index): where both layouts cut, one reader per digit wants what is
        # held; beyond the source's cut all values of a digit are held, for as many readers as the axis has.
        copies = ways[here & ~goal.reshape(-1)[at]].astype(float)
        self.share, self.count, self.overlaps = copies.copy(), copies.copy(), np.ones(at.size)
        self.offered, self.kept, self.ghosted, self.length = [], [], [], n
        cut_ways = ways[masks]
        for left, (f, d, win, three) in zip(lefts, inside, strict=True):
            here_left, c1, d = left.reshape(-1)[at], f.c1.reshape(-1)[at], d.reshape(-1)[at]
            stay = three.reshape(-1)[at]
            tail, differ = f.tail.reshape(-1)[at], f.differ.reshape(-1)[at]
            self.share /= np.where(here_left, ways[tail & ~here], 1)
            self.count *= np.where(here_left, ways[tail & here], 1)
            self.overlaps *= ~here_left | ((differ & here) == 0)
            self.offered.append(np.where(here_left, c1, stay))
            self.kept.append(np.where(here_left, np.where(cut_ways[c1] >= cut_ways[d], c1, d), stay))
            some = np.flatnonzero(here_left & np.broadcast_to(win, size).reshape(-1)[at])
            self.ghosted.append((some, c1[some], d[some]))

    def exchange(self, lengths: list[Floats], item: int) -> tuple[Floats, Floats]:
        """Bytes and messages sent in each exchange of everyone with everyone."""
        sent, kept, count = self.share * item, self.overlaps * item, self.count
        for length, offered, own, (some, c1, d) in zip(lengths, self.offered, self.kept, self.ghosted, strict=True):
            sent, kept = sent * length[offered], kept * length[own]
            if some.size:
                grown, readers = _with_ghosts(length, c1, d, self.length)
                count = count.copy() if count is self.count else count
                sent[some] *= grown
                count[some] *= readers
        return np.maximum(0.0, sent - kept), np.maximum(0, count - (kept > 0))


def _with_ghosts(length: Floats, c1: Ints, d: Ints, n: int) -> tuple[Floats, Floats]:
    """How much more than blocks is wanted, and by how many more, where the readers want ghosts.

    All readers' ghosts where the source's block covers several of their blocks, a part of one's where it lies inside.
    """
    b1, bd = length[c1], length[d]
    extra, readers = length[d + SENT * n] - length[d + OWN * n], length[d + READERS * n]
    inside = b1 < bd
    edges = np.where(inside, np.minimum(b1, (extra + 1) // 2), extra)
    grown = np.where(b1 > bd, length[d + HELD * n] / np.maximum(1, bd), 1 + edges / np.maximum(1, b1))
    return grown, np.where(b1 <= bd, np.where(inside, np.minimum(2, readers), readers), 1)


def _pattern(
    links: Links, cuts: Cuts, src: Ints, partial: Ints, dst: Ints, windows: list[dict[int, Ghosts]]
) -> _Pattern:
    key = ("pattern", src.tobytes(), partial.tobytes(), dst.tobytes(), tuple(tuple(w) for w in windows))
    known = cuts.structures.get(key)
    # A pattern points into vectors of a certain length: it is of no use once there are more cuts than that.
    if known is None or known.length != cuts.capacity:
        known = cuts.structures[key] = _Pattern(links, cuts, src, partial, dst, windows)
    return known


@dataclass(frozen=True)
class _Structure:
    """`Cuts.pair` of one dimension for all pairs of layouts, shapes (R, C)."""

    c1: Ints
    scattered: Ints
    sliceable: NDArray[np.bool_]
    before: Ints
    after: Ints
    gathers: NDArray[np.bool_]
    tail: Ints
    differ: Ints


def _structure(cuts: Cuts, c: Ints, partial: Ints, free: Ints, d: Ints) -> _Structure:
    free = np.where(partial > 0, free, 0)  # they matter on the way of sums only
    key = (c.tobytes(), partial.tobytes(), free.tobytes(), d.tobytes())
    known = cuts.structures.get(key)
    if known is None:
        bits = len(cuts.grid.sizes)
        both, row = np.unique((((c.astype(np.int64) << bits) | partial) << bits) | free, return_inverse=True)
        goals, column = np.unique(d, return_inverse=True)
        low = (1 << bits) - 1
        parts = [(int(s >> 2 * bits), int(s >> bits & low), int(s & low)) for s in both]
        ends = goals.tolist()
        table = np.array([[cuts.pair(*p, b) for b in ends] for p in parts], np.int32)
        x = table[np.ix_(row.reshape(-1), column.reshape(-1))].transpose(2, 0, 1).copy()
        known = _Structure(x[0], x[1], x[2].astype(bool), x[3], x[4], x[5].astype(bool), x[6], x[7])
        cuts.structures[key] = known
    return known
