"""What an engine offers to update rules and gradient norms."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

from lbpar.engine.device import Array, Device, Float64Array

Blocks: TypeAlias = Sequence[tuple[Array, ...]]
"""Per parameter: one-dimensional contiguous arrays of equal length."""


class Rules(Device):
    """Kernels on blocks of parameters (p), gradients (g) and optimizer state.

    What a rule changes it changes in place, never g. ``decays`` and ``rates`` hold a number of the host for each block;
    ``squares`` are sums of squares over whole parameters, float64 on the device.
    """

    @abstractmethod
    def axpy(self, a: float, x: Array, y: Array | None = None) -> Array:
        """``a * x + y`` in x's type; without y, ``a * x``."""

    @abstractmethod
    def squared_norms(self, arrays: Sequence[Array]) -> Float64Array:
        """float64 (n,): sum of squares of each one-dimensional array, 0 for an empty one."""

    @abstractmethod
    def unscale(self, grads: Sequence[Array], inverse: float) -> Float64Array:
        """Multiply all by ``inverse``, in place; float64 (1,): 0, or 1 if a result is not finite."""

    @abstractmethod
    def clip(self, grads: Sequence[Array], squares: Array, max_norm: float) -> None:
        """Scale all by ``min(1, max_norm / (sqrt(sum of squares) + 1e-6))``, in place."""

    @abstractmethod
    def sgd(
        self, blocks: Blocks, momentum: float, nesterov: bool, decays: Sequence[float], rates: Sequence[float]
    ) -> None:
        """``d = g + decay * p; v = momentum * v + d; p -= rate * v``, with Nesterov ``p -= rate * (d + momentum * v)``.

        blocks: (p, g, v), or (p, g) without momentum.
        """

    @abstractmethod
    def adam(
        self,
        blocks: Blocks,
        betas: tuple[float, float],
        eps: float,
        keeps: Sequence[float],
        decays: Sequence[float],
        rates: Sequence[float],
    ) -> None:
        """``p *= keep; d = g + decay * p``; m and v move towards d and d*d; ``p -= rate * m / (sqrt(v) + eps)``.

        blocks: (p, g, m, v).
        """

    @abstractmethod
    def lars(
        self,
        blocks: Blocks,
        squares: Array,
        adapted: Sequence[bool],
        momentum: float,
        decays: Sequence[float],
        rates: Sequence[float],
        trust: float,
        eps: float,
    ) -> None:
        """``v = momentum * v + rate * t * (g + decay * p); p -= v`` with ``t = trust * |p| / (|g| + decay * |p| + eps)``.

        blocks: (p, g, v); squares: (n, 2), of p and g. t is 1 for blocks not ``adapted``, and where |p| or the divisor is 0.
        """

    @abstractmethod
    def lamb_moments(
        self, blocks: Blocks, betas: tuple[float, float], eps: float, scale: float, decays: Sequence[float]
    ) -> Float64Array:
        """m and v move towards g and g*g; returns sums of squares (n, 2) of p and of LAMB's direction.

        blocks: (p, g, m, v). The direction is ``u = scale * m / (sqrt(v) + eps) + decay * p``.
        """

    @abstractmethod
    def lamb(
        self,
        blocks: Blocks,
        squares: Array,
        adapted: Sequence[bool],
        eps: float,
        scale: float,
        decays: Sequence[float],
        rates: Sequence[float],
    ) -> None:
        """``p -= rate * t * u`` with the direction u of `lamb_moments` and ``t = |p| / |u|``.

        blocks: (p, m, v); squares: (n, 2), of p and u. t is 1 for blocks not ``adapted``, and where |p| or |u| is 0.
        """
