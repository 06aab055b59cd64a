"""What one rank does in a move: which parts of its array it sends to whom, and where what it receives goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lbpar.layout.runs import Box, block, box_intersect, box_shape, box_size, positions
from lbpar.layout.transition import Move

LocalIndex = tuple["slice | np.ndarray", ...]


@dataclass(frozen=True)
class Piece:
    """A box that travels between this rank and ``peer`` (a world rank): its place in the local array, its shape."""

    peer: int
    index: LocalIndex
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Exchange:
    """One rank's part of a move.

    Parameters
    ----------
    members : tuple of int
        World ranks of the sub-communicator, in its order.
    sends, recvs : tuple of Piece
        Non-empty pieces for and from *other* members, in member order; indices are into the source and the
        destination array.
    keep : tuple of LocalIndex, optional
        (place in the source, place in the destination) of what stays on this rank.
    shape : tuple of int
        Shape of the destination array.
    """

    members: tuple[int, ...]
    sends: tuple[Piece, ...]
    recvs: tuple[Piece, ...]
    keep: tuple[LocalIndex, LocalIndex] | None
    shape: tuple[int, ...]


@lru_cache(maxsize=1 << 14)
def exchange(move: Move, rank: int) -> Exchange:
    """Sends, receives and the local copy of ``rank`` in any move but an allreduce.

    For ``reduce_scatter`` the pieces sent are this rank's partial values of each member's block; for ``accumulate``
    received pieces are to be added.
    """
    src, dst = move.src, move.dst
    members = src.grid.group(move.axes, rank)
    held, wanted = src.box(rank), dst.box(rank)
    sends, recvs, keep = [], [], None
    for m in members:
        if m == rank:
            both = box_intersect(held, wanted)
            if box_size(both):
                keep = (_place(both, held), _place(both, wanted))
            continue
        out = _piece(m, box_intersect(held, dst.box(m)), held)
        if out is not None:
            sends.append(out)
        back = _piece(m, box_intersect(src.box(m), wanted), wanted)
        if back is not None:
            recvs.append(back)
    return Exchange(members, tuple(sends), tuple(recvs), keep, box_shape(wanted))


def _piece(peer: int, box: Box, array: Box) -> Piece | None:
    size = box_size(box)
    return Piece(peer, _place(box, array), box_shape(box), size) if size else None


def _place(box: Box, array: Box) -> LocalIndex:
    return tuple(positions(p, w) for p, w in zip(box, array, strict=True))


@dataclass(frozen=True)
class Volume:
    """What one rank sends: number of messages and of elements."""

    messages: int = 0
    elements: int = 0


def volume(move: Move, rank: int) -> Volume:
    """Messages and elements that ``rank`` sends to others in a move.

    An allreduce is counted as a reduce-scatter and an allgather over blocks of the one block rule.
    """
    if move.kind == "slice" or not (move.src.holds(rank) or move.dst.holds(rank)):
        return Volume()
    if move.kind == "allreduce":
        members = move.src.grid.group(move.axes, rank)
        return allreduce_volume(box_size(move.src.box(rank)), len(members), members.index(rank))
    plan = exchange(move, rank)
    if move.kind == "allgather":  # everyone receives all of this rank's block
        others = len(plan.members) - 1
        own = box_size(move.src.box(rank))
        return Volume(others if own else 0, own * others)
    return Volume(len(plan.sends), sum(p.size for p in plan.sends))


def many_volume(moves: Sequence[Move], rank: int) -> Volume:
    """What a rank sends in an allreduce of several arrays over the same axes as one message."""
    members = moves[0].src.grid.group(moves[0].axes, rank)
    return allreduce_volume(sum(box_size(m.src.box(rank)) for m in moves), len(members), members.index(rank))


def allreduce_volume(elements: int, members: int, member: int = 0) -> Volume:
    """What one of ``members`` sends in an allreduce of so many elements, be they one array or several in one message.

    The first member has the largest piece and sends most.
    """
    if members == 1:
        return Volume()
    lo, hi = block(0, elements, members, member)
    own, others = hi - lo, members - 1
    return Volume(2 * others, (elements - own) + others * own)
