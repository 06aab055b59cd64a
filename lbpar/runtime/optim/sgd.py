"""Stochastic gradient descent with momentum, in PyTorch's form."""

from __future__ import annotations

from typing import ClassVar

from lbpar.config import optimizers
from lbpar.engine.device import Array
from lbpar.runtime.optim.base import Optimizer
from lbpar.runtime.optim.norms import Norms


class SGD(Optimizer):
    """``d = g + weight_decay * w; v = momentum * v + d; w -= lr * v`` (Nesterov: ``w -= lr * (d + momentum * v)``).

    The learning rate stays outside the velocity, as in ``torch.optim.SGD``.
    """

    options: ClassVar[type[optimizers.Optimizer]] = optimizers.Sgd
    config: optimizers.Sgd

    def _update(
        self, names: list[str], blocks: list[tuple[Array, ...]], decays: list[float], rates: list[float], norms: Norms
    ) -> None:
        self.engine.sgd(blocks, self.config.momentum, self.config.nesterov, decays, rates)
