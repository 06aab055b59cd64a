"""Stochastic gradient descent with momentum, in PyTorch's form."""

from __future__ import annotations

from collections.abc import Mapping

from lbpar.engine.device import Array
from lbpar.runtime.optim.base import Optimizer, require
from lbpar.runtime.optim.groups import Group
from lbpar.runtime.optim.norms import Norms


class SGD(Optimizer):
    """``d = g + weight_decay * w; v = momentum * v + d; w -= lr * v`` (Nesterov: ``w -= lr * (d + momentum * v)``).

    The learning rate stays outside the velocity, as in ``torch.optim.SGD``.

    Parameters
    ----------
    lr, weight_decay, kinds, groups
        See `Optimizer`.
    momentum : float
        0 keeps no state.
    nesterov : bool
        Look ahead; needs momentum > 0.
    """

    name = "sgd"

    def __init__(
        self,
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        *,
        kinds: Mapping[str, str] | None = None,
        groups: Mapping[str, Group] | None = None,
    ) -> None:
        super().__init__(lr, weight_decay, kinds, groups)
        require(self.name, "momentum", momentum, 0 <= momentum < 1, "a number in [0, 1)")
        require(self.name, "nesterov", nesterov, momentum > 0 or not nesterov, "false, or momentum > 0 with it")
        self.momentum = momentum
        self.nesterov = nesterov
        self.slots = ("momentum",) if momentum else ()

    def _update(
        self, names: list[str], blocks: list[tuple[Array, ...]], decays: list[float], rates: list[float], norms: Norms
    ) -> None:
        self.engine.sgd(blocks, self.momentum, self.nesterov, decays, rates)
