"""PReLU with a slope per channel, or one for all."""

from __future__ import annotations

import numpy as np

from lbpar.engine.device import Array


def prelu_forward(x: Array, slope: Array) -> Array:
    """x where positive, else slope · x."""
    return np.where(x > 0, x, slope.astype(x.dtype, copy=False) * x)


def prelu_backward_data(x: Array, dy: Array, slope: Array) -> Array:
    """dy where x is positive, else slope · dy."""
    return np.where(x > 0, dy, slope.astype(x.dtype, copy=False) * dy)


def prelu_slope_sums(x: Array, dy: Array, per_channel: bool) -> Array:
    """Sums over positions of ``dy · min(x, 0)``, of the type of parameters."""
    sums = (dy.astype(np.float64) * np.minimum(x, 0)).sum(axis=tuple(range(x.ndim - 1)))
    return (sums if per_channel else sums.sum(keepdims=True)).astype(x.dtype)
