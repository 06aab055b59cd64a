"""Cut a chain into stretches so that the most expensive one costs least: exact, by dynamic programming over the cuts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def cut_chain(
    costs: Sequence[float], borders: Sequence[float], parts: int, pinned: Sequence[int | None] | None = None
) -> tuple[list[int], float] | None:
    """Where each stretch begins, and the cost of the most expensive one; None if there is no way. Of several as good, the cuts lie late.

    Parameters
    ----------
    costs : sequence of float
        Of every item.
    borders : sequence of float
        Of cutting before each item; it is added to the stretch that ends there and to the one that begins.
    parts : int
        Number of stretches; each has an item at least.
    pinned : sequence, optional
        Of every item the stretch that it must be in, or None.
    """
    n = len(costs)
    if parts > n:
        return None
    total = np.concatenate([[0.0], np.cumsum(costs)])
    edge = np.array([0.0, *borders[1:], 0.0])  # nothing crosses the ends
    stretch = total[None, :] - total[:, None] + edge[:, None] + edge[None, :]  # from an item up to another
    stretch[np.tril_indices(n + 1)] = np.inf  # an empty one
    best, choice = np.full(n + 1, np.inf), list[np.ndarray]()
    best[0] = 0.0
    for part in range(parts):
        here = stretch
        if pinned is not None:
            other = np.array([p is not None and p != part for p in pinned])
            count = np.concatenate([[0], np.cumsum(other)])
            here = np.where(count[None, :] == count[:, None], stretch, np.inf)
        worst = np.maximum(best[:, None], here)  # the last stretch begins at the row's item
        begin = n - np.argmin(worst[::-1], axis=0)
        best, choice = worst[begin, np.arange(n + 1)], [*choice, begin]
    if not np.isfinite(best[n]):
        return None
    starts, end = [], n
    for begin in reversed(choice):
        end = int(begin[end])
        starts.append(end)
    return starts[::-1], float(best[n])
