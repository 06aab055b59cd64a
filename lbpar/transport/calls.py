"""What a rank asked of a transport, as data, and the check that the ranks of a group ask for the same.

Used by the virtual world and by the checked mode; knows no buffers.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from lbpar.errors import CommError
from lbpar.layout.grid import Axes
from lbpar.layout.runs import block


@dataclass(slots=True)
class Call:
    """One operation that one rank started.

    Attributes
    ----------
    kind, tag : str
        Operation and name.
    axes : tuple of int
        Axes of the group, without those of size 1.
    dtype, op
        Element type and reduction, None and empty where there is none.
    counts : sequence of int
        Counts that must be the same on all members.
    send, recv : dict of world rank to int
        Elements that go to and are expected from single ranks; must mirror each other.
    blocking : bool
        Started and waited for in one call, by all members alike.
    part : int
        Which part of an exchange or all-to-all it is. Those after the first belong to the one that was started last over the same axes.
    """

    kind: str
    tag: str = ""
    axes: Axes = ()
    dtype: np.dtype[Any] | None = None
    op: str = ""
    counts: Sequence[int] = ()
    send: dict[int, int] = field(default_factory=dict)
    recv: dict[int, int] = field(default_factory=dict)
    blocking: bool = False
    part: int = 0

    @property
    def title(self) -> str:
        """``allreduce 'conv1.dw'``."""
        return f"{self.kind} {self.tag!r}" if self.tag else self.kind

    def common(self) -> tuple[Any, ...]:
        """What must be equal on all members."""
        return (self.kind, self.tag, self.axes, self.dtype, self.op, tuple(self.counts), self.blocking)

    def sent(self, group: Sequence[int], rank: int) -> tuple[int, int]:
        """(messages, elements) that ``rank`` sends, by the convention of `lbpar.transport.base`."""
        p, place = len(group), group.index(rank)
        if self.kind == "allreduce":
            lo, hi = block(0, self.counts[0], p, place)
            return 2 * (p - 1), self.counts[0] + (p - 2) * (hi - lo)
        if self.kind == "allgather":
            own = self.counts[place]
            return (p - 1 if own else 0), own * (p - 1)
        pieces = dict(zip(group, self.counts, strict=True)) if self.kind == "reduce_scatter" else self.send
        others = [n for r, n in pieces.items() if r != rank and n]
        return len(others), sum(others)

    def __str__(self) -> str:
        facts = ["" if self.dtype is None else self.dtype.name, self.op, f"axes {self.axes}"]
        if self.counts:
            shown = ", ".join(map(str, self.counts[:8])) + (", ..." if len(self.counts) > 8 else "")
            facts.append(f"counts ({shown})")
        return f"{self.title} [{', '.join(f for f in facts if f)}]"


def pieces(counts: Sequence[int]) -> list[slice]:
    """Where consecutive pieces of these sizes lie."""
    return [slice(end - n, end) for n, end in zip(counts, accumulate(counts), strict=True)]


def check_same(calls: Mapping[int, Call], where: str = "") -> None:
    """Raise CommError naming the odd ranks unless all members started the same operation.

    Parameters
    ----------
    calls : mapping of world rank to Call
        One entry for every member of the group.
    where : str
        Put before the message, for example ``"operation 12 over axes (0,)"``.
    """
    head = f"{where}: " if where else ""
    tally = Tally(c.common() for c in calls.values())
    if len(tally) > 1:
        # The majority is taken to be right; in a tie, the side of the lowest rank.
        first = {c.common(): r for r, c in sorted(calls.items(), reverse=True)}
        usual = min(tally, key=lambda s: (-tally[s], first[s]))
        odd = [r for r in sorted(calls) if calls[r].common() != usual]
        shown = "; ".join(f"rank {r} started {calls[r]}" for r in odd[:4])
        more = f"; and {len(odd) - 4} more" if len(odd) > 4 else ""
        others = [r for r in sorted(calls) if r not in odd]
        raise CommError(
            f"{head}ranks disagree: {shown}{more}; but ranks {_few(others)} started {calls[first[usual]]}. "
            "All ranks of a group must start the same operations in the same order."
        )
    for r, call in sorted(calls.items()):
        for pairs, ours, theirs in (
            (call.send, "sends {} elements to", "expects"),
            (call.recv, "expects {} elements of", "sends"),
        ):
            for peer, n in sorted(pairs.items()):
                said = f"{head}{call.title}: rank {r} {ours.format(n)} rank {peer}"
                if peer not in calls:
                    raise CommError(f"{said}, not in its group {_few(calls)}.")
                there = (calls[peer].recv if pairs is call.send else calls[peer].send).get(r, 0)
                if there != n:
                    raise CommError(f"{said}, but rank {peer} {theirs} {there}.")


def _few(ranks: Any) -> str:
    ranks = sorted(ranks)
    return f"[{', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}]"
