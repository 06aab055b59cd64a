"""Layer-wise adaptive moments for large mini-batches."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import numpy as np

from lbpar.runtime.optim.adam import check_betas, update_moments
from lbpar.runtime.optim.base import Optimizer, require
from lbpar.runtime.optim.blocks import Array, chunks, sum_of_squares
from lbpar.runtime.optim.groups import Group
from lbpar.runtime.optim.norms import Norms


class LAMB(Optimizer):
    """LAMB (You et al., 2020, algorithm 2, with the identity as scaling function).

    ``m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps);
    u = r + weight_decay * w; w -= lr * |w| / |u| * u``

    Norms are over whole parameters. The ratio is 1 where a norm is 0, and for groups with ``adapt=False``. The
    direction u is computed twice, once for its norm and once to apply it: no array of the parameters' size is kept.

    Parameters
    ----------
    lr, weight_decay, kinds, groups
        See `Optimizer`.
    betas : pair of float
        Decay of the first and second moment, each in [0, 1).
    eps : float
        Added to the root of the second moment.
    """

    name = "lamb"
    slots = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        kinds: Mapping[str, str] | None = None,
        groups: Mapping[str, Group] | None = None,
    ) -> None:
        super().__init__(lr, weight_decay, kinds, groups)
        self.betas = check_betas(self.name, betas)
        require(self.name, "eps", eps, eps >= 0, "a number >= 0")
        self.eps = eps

    def _update(self, params: dict[str, Array], grads: dict[str, Array], lr: float, norms: Norms) -> None:
        local: dict[str, Array] = {}
        for param, weights in params.items():
            direction = 0.0
            adapt, decay = self.group(param).adapt, self.decay(param)
            for p, g, m, v in chunks(weights, grads[param], *self._slots(param)):
                update_moments(m, v, g, self.betas, self._scratch.get(p.dtype, p.size))
                if adapt:
                    direction += sum_of_squares(self._direction(p, m, v, decay))
            if adapt:
                local[param] = np.array([sum_of_squares(weights), direction])
        squares = norms.squared(local)
        for param, weights in params.items():
            rate, decay = lr * self.group(param).lr_scale, self.decay(param)
            if param in squares:
                weight, update = map(sqrt, squares[param])
                rate *= weight / update if weight > 0 and update > 0 else 1.0
            for p, m, v in chunks(weights, *self._slots(param)):
                u = self._direction(p, m, v, decay)
                u *= rate
                p -= u

    def _direction(self, p: Array, m: Array, v: Array, decay: float) -> Array:
        """The unscaled step u of one piece, in scratch memory."""
        correct1, correct2 = (1 - b**self.steps for b in self.betas)
        root = sqrt(correct2)
        u = self._scratch.get(p.dtype, p.size)
        np.sqrt(v, out=u)
        u += self.eps * root
        np.divide(m, u, out=u)
        u *= root / correct1
        if decay:
            s = self._scratch.get(p.dtype, p.size, 1)
            np.multiply(p, decay, out=s)
            u += s
        return u
