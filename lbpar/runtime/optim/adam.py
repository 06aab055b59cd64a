"""Adam and AdamW, in PyTorch's form."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

from lbpar.engine.device import Array
from lbpar.runtime.optim.base import Optimizer, require
from lbpar.runtime.optim.groups import Group
from lbpar.runtime.optim.norms import Norms


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015) with weight decay as an L2 term of the gradient, as ``torch.optim.Adam``.

    ``g += weight_decay * w; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2;
    w -= lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``

    Parameters
    ----------
    lr, weight_decay, kinds, groups
        See `Optimizer`.
    betas : pair of float
        Decay of the first and second moment, each in [0, 1).
    eps : float
        Added to the root of the second moment.
    """

    name = "adam"
    slots = ("exp_avg", "exp_avg_sq")
    decoupled = False  # whether weight decay acts on the weights directly instead of through the gradient

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
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
        # m/correct1 / (sqrt(v)/root + eps) with both corrections moved into scalars: two passes fewer
        correct1, correct2 = (1 - b**self.steps for b in self.betas)
        root = sqrt(correct2)
        keeps = [1 - rate * decay if self.decoupled else 1.0 for rate, decay in zip(rates, decays, strict=True)]
        pulls = [0.0] * len(decays) if self.decoupled else decays
        self.engine.adam(blocks, self.betas, self.eps * root, keeps, pulls, [rate * root / correct1 for rate in rates])


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019): ``w *= 1 - lr * weight_decay`` before the step.

    Parameters as `Adam`; the default decay is that of ``torch.optim.AdamW``.
    """

    name = "adamw"
    decoupled = True

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        kinds: Mapping[str, str] | None = None,
        groups: Mapping[str, Group] | None = None,
    ) -> None:
        super().__init__(lr, betas, eps, weight_decay, kinds=kinds, groups=groups)


def check_betas(where: str, betas: tuple[float, float]) -> tuple[float, float]:
    """The two decay rates; ConfigError unless both lie in [0, 1)."""
    require(where, "betas", betas, len(betas) == 2 and all(0 <= b < 1 for b in betas), "two numbers in [0, 1)")
    return (betas[0], betas[1])
