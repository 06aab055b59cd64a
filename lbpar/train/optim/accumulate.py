"""Gradient accumulation: several small passes, one summation over ranks, one step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lbpar.train.optim.base import require
from lbpar.train.optim.blocks import Array, Scratch, chunks, flat


class GradientAccumulator:
    """Adds up weighted gradients of micro-batches in buffers that are reused.

    Add gradients **before** they are summed over ranks: they are then communicated once per step, not per pass.

    Parameters
    ----------
    every : int
        Micro-batches per step.
    """

    def __init__(self, every: int = 1) -> None:
        require("accumulation", "every", every, every >= 1, "an integer >= 1")
        self.every = every
        self.count = 0
        self._sums: dict[str, Array] = {}
        self._live: set[str] = set()  # names that hold this step's sums; other buffers are stale
        self._scratch = Scratch()

    def add(self, grads: Mapping[str, Array], weight: float | None = None) -> bool:
        """Add ``weight * grads``; default weight 1/every, the mean over equal micro-batches.

        For micro-batches of different sizes whose losses are means, the weight is samples / samples of the step.

        Returns
        -------
        bool
            Whether the step's last micro-batch was added and `take` is due.
        """
        weight = 1.0 / self.every if weight is None else weight
        if self.count == 0:
            self._live.clear()
        for name, grad in grads.items():
            first = name not in self._live
            self._live.add(name)
            if name not in self._sums:
                self._sums[name] = np.empty(grad.shape, grad.dtype)
            for total, g in chunks(flat(name, self._sums[name]), flat(name, grad)):
                if first:
                    np.multiply(g, weight, out=total)
                else:
                    s = self._scratch.get(total.dtype, total.size)
                    np.multiply(g, weight, out=s)
                    total += s
        self.count += 1
        return self.count >= self.every

    def take(self) -> dict[str, Array]:
        """The sums; valid until the next `add`, which starts anew."""
        self.count = 0
        return {name: total for name, total in self._sums.items() if name in self._live}
