"""Page-locked memory of the host, which copies to and from a device need to run beside everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

SMALLEST = 4096
"""Bytes of the smallest piece."""


class Pinned:
    """Pieces of page-locked memory that are used again once the copies that need them have ended.

    Allocating such memory takes as long as copying some megabytes, and waits for the device.
    """

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        self._allocate = allocate
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}
        self._busy: list[tuple[Any, npt.NDArray[np.uint8]]] = []
        self.nbytes = 0

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """A piece of so many bytes or more: a power of two."""
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length())
        if not self._free.get(size):
            self._sweep()
        pieces = self._free.setdefault(size, [])
        if pieces:
            return pieces.pop()
        self.nbytes += size
        return np.frombuffer(self._allocate(size), np.uint8, size)

    def give(self, piece: npt.NDArray[np.uint8], event: Any = None) -> None:
        """Take back a piece, which is free once ``event`` has happened."""
        if event is None:
            self._free[piece.size].append(piece)
        else:
            self._busy.append((event, piece))

    def _sweep(self) -> None:
        busy, self._busy = self._busy, []
        for event, piece in busy:
            if event.done:
                self._free[piece.size].append(piece)
            else:
                self._busy.append((event, piece))
