"""Every operation of a transport, on small numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from lbpar.layout.grid import Axes
from lbpar.transport.base import Moves


def held(rank: int, n: int, dtype: Any) -> np.ndarray:
    """Small numbers, whose sums are exact in any order."""
    return ((np.arange(n) * 7 + rank * 3) % 11).astype(dtype)


def moves(t: Moves, axes: Axes, dtype: Any, put: Any) -> list[Any]:
    """Every operation, started one after the other and waited for in reverse."""
    group = t.group(axes)
    place, p = group.index(t.rank), len(group)
    counts = [(5 * i + 3) % 7 for i in range(p)]
    send = [(place * 5 + i * 3) % 4 for i in range(p)]
    recv = [(i * 5 + place * 3) % 4 for i in range(p)]
    near = {group[(place + 1) % p]: put(held(t.rank, 4, dtype)), t.rank: put(held(t.rank, 2, dtype))}
    expected = {group[(place - 1) % p]: 4, t.rank: 2} if p > 1 else {t.rank: 2}
    if p == 1:
        near = {t.rank: near[t.rank]}
    requests = [
        t.allreduce(put(held(t.rank, 13, dtype)), axes, "sum", "a"),
        t.allreduce(put(held(t.rank, 0, dtype)), axes, "sum", "b"),
        t.allreduce(put(held(t.rank, 3, dtype)), axes, "max", "c"),
        t.reduce_scatter(put(held(t.rank, sum(counts), dtype)), counts, axes, "sum", "d"),
        t.reduce_scatter(put(held(t.rank, 4 * p, dtype)), [4] * p, axes, "max", "e"),
        t.allgather(put(held(t.rank, counts[place], dtype)), counts, axes, "f"),
        t.allgather(put(held(t.rank, 3, dtype)), [3] * p, axes, "g"),
        t.alltoall(put(held(t.rank, sum(send), dtype)), send, recv, axes, "h"),
        t.exchange(near, expected, dtype, axes, "i"),
    ]
    while not requests[0].test():
        pass
    return [r.wait() for r in reversed(requests)]


def values(x: Any, get: Any) -> Any:
    return {r: values(a, get) for r, a in sorted(x.items())} if isinstance(x, dict) else get(x).tolist()
