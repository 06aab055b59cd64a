"""Stochastic gradient descent with momentum, in PyTorch's form."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lbpar.runtime.optim.base import Optimizer, require
from lbpar.runtime.optim.blocks import Array, chunks
from lbpar.runtime.optim.compiled import passes
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

    def _update(self, params: dict[str, Array], grads: dict[str, Array], lr: float, norms: Norms) -> None:
        for param, weights in params.items():
            decay, rate = self.decay(param), float(lr * self.group(param).lr_scale)
            blocks = weights, grads[param], *self._slots(param)
            native = passes(*blocks)
            if native is not None:  # the same arithmetic as below in one pass
                native.sgd(blocks[0], blocks[1], blocks[2:], self.momentum, self.nesterov, decay, rate)
                continue
            for p, g, *velocity in chunks(*blocks):
                s = self._scratch.get(p.dtype, p.size)
                d = g
                if decay:
                    d = self._scratch.get(p.dtype, p.size, 1)
                    np.multiply(p, decay, out=d)
                    d += g
                if velocity:
                    (v,) = velocity
                    v *= self.momentum
                    v += d
                    if self.nesterov:
                        np.multiply(v, self.momentum, out=s)
                        s += d
                        d = s
                    else:
                        d = v
                np.multiply(d, rate, out=s)
                p -= s
