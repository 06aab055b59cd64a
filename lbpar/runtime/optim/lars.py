"""Layer-wise adaptive rate scaling for large mini-batches."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import numpy as np

from lbpar.runtime.optim.base import Optimizer, require
from lbpar.runtime.optim.blocks import Array, chunks, sum_of_squares
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

    def _update(self, params: dict[str, Array], grads: dict[str, Array], lr: float, norms: Norms) -> None:
        squares = norms.squared(
            {
                param: np.array([sum_of_squares(w), sum_of_squares(grads[param])])
                for param, w in params.items()
                if self.group(param).adapt
            }
        )
        for param, weights in params.items():
            decay = self.decay(param)
            rate = lr * self.group(param).lr_scale
            if param in squares:
                weight, grad = map(sqrt, squares[param])
                rate *= self._ratio(weight, grad, decay)
            for p, g, v in chunks(weights, grads[param], *self._slots(param)):
                s = self._scratch.get(p.dtype, p.size)
                if decay:
                    np.multiply(p, decay, out=s)
                    s += g
                    s *= rate
                else:
                    np.multiply(g, rate, out=s)
                v *= self.momentum
                v += s
                p -= v

    def _ratio(self, weight: float, grad: float, decay: float) -> float:
        below = grad + decay * weight + self.eps
        return self.trust * weight / below if weight > 0 and below > 0 else 1.0
