"""Where arrays lie in one stretch of memory: the rule by which an engine's arena hands out pieces, and by which its size is foretold."""

from __future__ import annotations

from bisect import bisect_left

SMALL = 1 << 16
"""Bytes below which an array is simply allocated: the C library recycles those itself."""

PAGE = 4096

_STAGGER = 320
# Arrays that start at the same place within a page get into each other's way in caches: each is a little longer.


def piece_size(nbytes: int) -> int:
    """Bytes that an array of ``nbytes`` takes."""
    return -(-nbytes // PAGE) * PAGE + _STAGGER


class Pieces:
    """A stretch of ``size`` bytes: [0, used) is in use or free, what lies behind was never touched."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self.starts: list[int] = []  # of the free pieces, in order
        self.sizes: list[int] = []

    def take(self, size: int) -> int | None:
        """Start of a piece: from the smallest free one that is large enough, else from behind; None where all is full."""
        best, least = -1, self.size + 1
        for i, free in enumerate(self.sizes):
            if size <= free < least:
                best, least = i, free
        if best >= 0:
            start = self.starts[best]
            if least == size:
                del self.starts[best], self.sizes[best]
            else:
                self.starts[best] += size
                self.sizes[best] -= size
            return start
        start = self.used
        if self.starts and self.starts[-1] + self.sizes[-1] == self.used:
            start = self.starts[-1]
        if start + size > self.size:
            return None
        if start < self.used:
            del self.starts[-1], self.sizes[-1]
        self.used = start + size
        return start

    def give(self, start: int, size: int) -> None:
        """Take back a piece, and join it with free neighbours."""
        starts, sizes = self.starts, self.sizes
        i = bisect_left(starts, start)
        if i < len(starts) and start + size == starts[i]:
            size += sizes[i]
            del starts[i], sizes[i]
        if i > 0 and starts[i - 1] + sizes[i - 1] == start:
            sizes[i - 1] += size
        else:
            starts.insert(i, start)
            sizes.insert(i, size)
