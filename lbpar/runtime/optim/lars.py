"""Layer-wise adaptive rate scaling for large mini-batches."""

from __future__ import annotations

from typing import ClassVar

from lbpar.config import optimizers
from lbpar.engine.device import Array
from lbpar.runtime.optim.base import Optimizer
from lbpar.runtime.optim.norms import Norms


class LARS(Optimizer):
    """LARS (You, Gitman and Ginsburg, 2017, algorithm 1).

    ``t = trust * |w| / (|g| + weight_decay * |w| + eps); v = momentum * v + lr * t * (g + weight_decay * w); w -= v``

    Norms are over whole parameters. The learning rate enters the velocity, as in the paper. The ratio t is 1 where
    |w| or the denominator is 0, and for groups with ``adapt=False``.
    """

    options: ClassVar[type[optimizers.Optimizer]] = optimizers.Lars
    config: optimizers.Lars

    def _update(
        self, names: list[str], blocks: list[tuple[Array, ...]], decays: list[float], rates: list[float], norms: Norms
    ) -> None:
        squares = self.engine.squared_norms([a for block in blocks for a in block[:2]]).reshape(-1, 2)
        adapted = [self.group(name).adapt for name in names]
        total = norms.squared(names, squares)
        self.engine.lars(
            blocks, total, adapted, self.config.momentum, decays, rates, self.config.trust, self.config.eps
        )
