"""The update rules: SGD and Adam in PyTorch's form, and layer-wise adaptive rates for large mini-batches."""

from __future__ import annotations

from math import sqrt
from typing import ClassVar

from lbpar.config import optimizers
from lbpar.engine.rules import Blocks
from lbpar.runtime.optim.base import Optimizer
from lbpar.runtime.optim.norms import Norms


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, in PyTorch's form.

    ``d = g + weight_decay * w; v = momentum * v + d; w -= lr * v`` (Nesterov: ``w -= lr * (d + momentum * v)``).

    The learning rate stays outside the velocity, as in ``torch.optim.SGD``.
    """

    options: ClassVar[type[optimizers.Optimizer]] = optimizers.Sgd
    config: optimizers.Sgd

    def _update(self, names: list[str], blocks: Blocks, decays: list[float], rates: list[float], norms: Norms) -> None:
        self.engine.sgd(blocks, self.config.momentum, self.config.nesterov, decays, rates)


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015) with weight decay as an L2 term of the gradient, as ``torch.optim.Adam``.

    ``g += weight_decay * w; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2;
    w -= lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``
    """

    options: ClassVar[type[optimizers.Optimizer]] = optimizers.Adam
    config: optimizers.Adam | optimizers.AdamW
    decoupled = False  # whether weight decay acts on the weights directly instead of through the gradient

    def _update(self, names: list[str], blocks: Blocks, decays: list[float], rates: list[float], norms: Norms) -> None:
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


class LARS(Optimizer):
    """LARS (You, Gitman and Ginsburg, 2017, algorithm 1).

    ``t = trust * |w| / (|g| + weight_decay * |w| + eps); v = momentum * v + lr * t * (g + weight_decay * w); w -= v``

    Norms are over whole parameters. The learning rate enters the velocity, as in the paper. The ratio t is 1 where
    |w| or the denominator is 0, and for kinds without weight decay.
    """

    options: ClassVar[type[optimizers.Optimizer]] = optimizers.Lars
    config: optimizers.Lars

    def _update(self, names: list[str], blocks: Blocks, decays: list[float], rates: list[float], norms: Norms) -> None:
        squares = self.engine.squared_norms([a for block in blocks for a in block[:2]]).reshape(-1, 2)
        adapted = [self.decays(name) for name in names]
        total = norms.squared(names, squares)
        self.engine.lars(
            blocks, total, adapted, self.config.momentum, decays, rates, self.config.trust, self.config.eps
        )


class LAMB(Optimizer):
    """LAMB (You et al., 2020, algorithm 2, with the identity as scaling function).

    ``m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps);
    u = r + weight_decay * w; w -= lr * |w| / |u| * u``

    Norms are over whole parameters. The ratio is 1 where a norm is 0, and for kinds without weight decay. The
    direction u is computed twice, once for its norm and once to apply it: no array of the parameters' size is kept.
    """

    options: ClassVar[type[optimizers.Optimizer]] = optimizers.Lamb
    config: optimizers.Lamb

    def _update(self, names: list[str], blocks: Blocks, decays: list[float], rates: list[float], norms: Norms) -> None:
        correct1, correct2 = (1 - b**self.steps for b in self.config.betas)
        root = sqrt(correct2)
        eps, scale = self.config.eps * root, root / correct1
        total = norms.squared(names, self.engine.lamb_moments(blocks, self.config.betas, eps, scale, decays))
        adapted = [self.decays(name) for name in names]
        self.engine.lamb([(p, m, v) for p, _, m, v in blocks], total, adapted, eps, scale, decays, rates)
