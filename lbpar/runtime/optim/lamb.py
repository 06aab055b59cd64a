"""Layer-wise adaptive moments for large mini-batches."""

from __future__ import annotations

from math import sqrt
from typing import ClassVar

from lbpar.config import optimizers
from lbpar.engine.device import Array
from lbpar.runtime.optim.base import Optimizer
from lbpar.runtime.optim.norms import Norms


class LAMB(Optimizer):
    """LAMB (You et al., 2020, algorithm 2, with the identity as scaling function).

    ``m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps);
    u = r + weight_decay * w; w -= lr * |w| / |u| * u``

    Norms are over whole parameters. The ratio is 1 where a norm is 0, and for groups with ``adapt=False``. The
    direction u is computed twice, once for its norm and once to apply it: no array of the parameters' size is kept.
    """

    options: ClassVar[type[optimizers.Optimizer]] = optimizers.Lamb
    config: optimizers.Lamb

    def _update(
        self, names: list[str], blocks: list[tuple[Array, ...]], decays: list[float], rates: list[float], norms: Norms
    ) -> None:
        correct1, correct2 = (1 - b**self.steps for b in self.config.betas)
        root = sqrt(correct2)
        eps, scale = self.config.eps * root, root / correct1
        total = norms.squared(names, self.engine.lamb_moments(blocks, self.config.betas, eps, scale, decays))
        adapted = [self.group(name).adapt for name in names]
        self.engine.lamb([(p, m, v) for p, _, m, v in blocks], total, adapted, eps, scale, decays, rates)
