"""Layer-wise adaptive rate scaling for large mini-batches."""

from __future__ import annotations

from collections.abc import Mapping

from lbpar.engine.device import Array
from lbpar.runtime.optim.base import Optimizer, require
from lbpar.runtime.optim.groups import Group
from lbpar.runtime.optim.norms import Norms


class LARS(Optimizer):
    """LARS (You, Gitman and Ginsburg, 2017, algorithm 1).

    ``t = trust * |w| / (|g| + weight_decay * |w| + eps); v = momentum * v + lr * t * (g + weight_decay * w); w -= v``

    Norms are over whole parameters. The learning rate enters the velocity, as in the paper. The ratio t is 1 where
    |w| or the denominator is 0, and for groups with ``adapt=False``.

    Parameters
    ----------
    lr, weight_decay, kinds, groups
        See `Optimizer`.
    momentum : float
        In [0, 1).
    trust : float
        The paper's coefficient (eta).
    eps : float
        Added to the denominator of the ratio; the paper has none (0).
    """

    name = "lars"
    slots = ("momentum",)

    def __init__(
        self,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
        eps: float = 0.0,
        *,
        kinds: Mapping[str, str] | None = None,
        groups: Mapping[str, Group] | None = None,
    ) -> None:
        super().__init__(lr, weight_decay, kinds, groups)
        require(self.name, "momentum", momentum, 0 <= momentum < 1, "a number in [0, 1)")
        require(self.name, "trust", trust, trust > 0, "a number > 0")
        require(self.name, "eps", eps, eps >= 0, "a number >= 0")
        self.momentum = momentum
        self.trust = trust
        self.eps = eps

    def _update(
        self, names: list[str], blocks: list[tuple[Array, ...]], decays: list[float], rates: list[float], norms: Norms
    ) -> None:
        squares = self.engine.squared_norms([a for block in blocks for a in block[:2]]).reshape(-1, 2)
        adapted = [self.group(name).adapt for name in names]
        total = norms.squared(names, squares)
        self.engine.lars(blocks, total, adapted, self.momentum, decays, rates, self.trust, self.eps)
