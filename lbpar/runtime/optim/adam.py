"""Adam and AdamW, in PyTorch's form."""

from __future__ import annotations

from math import sqrt
from typing import ClassVar

from lbpar.config import optimizers
from lbpar.engine.device import Array
from lbpar.runtime.optim.base import Optimizer
from lbpar.runtime.optim.norms import Norms


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015) with weight decay as an L2 term of the gradient, as ``torch.optim.Adam``.

    ``g += weight_decay * w; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2;
    w -= lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``
    """

    options: ClassVar[type[optimizers.Optimizer]] = optimizers.Adam
    config: optimizers.Adam | optimizers.AdamW
    decoupled = False  # whether weight decay acts on the weights directly instead of through the gradient

    def _update(
        self, names: list[str], blocks: list[tuple[Array, ...]], decays: list[float], rates: list[float], norms: Norms
    ) -> None:
        # m/correct1 / (sqrt(v)/root + eps) with both corrections moved into scalars: two passes fewer
        betas, eps = self.config.betas, self.config.eps
        correct1, correct2 = (1 - b**self.steps for b in betas)
        root = sqrt(correct2)
        keeps = [1 - rate * decay if self.decoupled else 1.0 for rate, decay in zip(rates, decays, strict=True)]
        pulls = [0.0] * len(decays) if self.decoupled else decays
        self.engine.adam(blocks, betas, eps * root, keeps, pulls, [rate * root / correct1 for rate in rates])


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019): ``w *= 1 - lr * weight_decay`` before the step."""

    options: ClassVar[type[optimizers.Optimizer]] = optimizers.AdamW
    decoupled = True
