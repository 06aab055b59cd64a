"""Layer-wise adaptive moments for large mini-batches."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

from lbpar.engine.device import Array
from lbpar.runtime.optim.adam import check_betas
from lbpar.runtime.optim.base import Optimizer, require
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

    def _update(
        self, names: list[str], blocks: list[tuple[Array, ...]], decays: list[float], rates: list[float], norms: Norms
    ) -> None:
        correct1, correct2 = (1 - b**self.steps for b in self.betas)
        root = sqrt(correct2)
        eps, scale = self.eps * root, root / correct1
        total = norms.squared(names, self.engine.lamb_moments(blocks, self.betas, eps, scale, decays))
        adapted = [self.group(name).adapt for name in names]
        self.engine.lamb([(p, m, v) for p, _, m, v in blocks], total, adapted, eps, scale, decays, rates)
