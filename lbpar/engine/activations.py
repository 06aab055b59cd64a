"""Activations that have no kernels of their own, in NumPy: a function and its gradient each, in one table."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from lbpar.engine.device import Array
from lbpar.engine.losses import sigmoid

STEP, MOST, TERMS = 1 / 16, 6.0, 10
"""Distance of the points about which erf is a Taylor series, the last one (beyond it erf is 1 in float64), and its terms."""


@cache
def _series() -> Array:
    """Coefficients of erf's Taylor series (TERMS, points); its derivatives are Hermite polynomials times exp(-x²)."""
    x = np.arange(0, MOST + STEP / 2, STEP)
    rows = [np.array([math.erf(v) for v in x])]
    for k in range(1, TERMS):
        hermite = np.polynomial.hermite.hermval(x, np.eye(TERMS)[k - 1])
        rows.append(2 / math.sqrt(math.pi) * (-1) ** (k - 1) * hermite * np.exp(-x * x) / math.factorial(k))
    return np.array(rows)


def erf(x: Array) -> Array:
    """The error function, to 1e-15; float64."""
    a = np.minimum(np.abs(x.astype(np.float64)), MOST)
    point = np.rint(np.nan_to_num(a) / STEP).astype(np.int64)
    distance = a - point * STEP
    total = np.zeros_like(a)
    for row in _series()[::-1]:
        total *= distance
        total += row[point]
    return np.copysign(total, x)


_ROOT, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def _gelu(x: Array, approximate: str) -> Array:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(_ROOT * (x + _CUBIC * x * x * x)))
    return x * (0.5 * (1 + erf(x * math.sqrt(0.5)))).astype(x.dtype)


def _gelu_slope(x: Array, approximate: str) -> Array:
    if approximate == "tanh":
        t = np.tanh(_ROOT * (x + _CUBIC * x * x * x))
        return 0.5 * (1 + t) + 0.5 * _ROOT * x * (1 - t * t) * (1 + 3 * _CUBIC * x * x)
    return 0.5 * (1 + erf(x * math.sqrt(0.5))) + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _silu_slope(x: Array) -> Array:
    s = sigmoid(x)
    return s * (1 + x * (1 - s))


def _softplus(x: Array, beta: float) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-beta * np.abs(x))) / beta


def _elu(x: Array, alpha: float) -> Array:
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


#: Function of x and its slope, which is one of x or of y as the op declares (`Activation.kept`); options come last.
ACTIVATIONS: dict[str, tuple[Callable[..., Array], Callable[..., Array]]] = {
    "elu": (_elu, lambda y, alpha: np.where(y > 0, 1, y + alpha)),
    "gelu": (_gelu, _gelu_slope),
    "silu": (lambda x: x * sigmoid(x), _silu_slope),
    "softplus": (_softplus, lambda y, beta: -np.expm1(-beta * y)),
    "hardsigmoid": (
        lambda x, slope: np.clip(slope * x + 0.5, 0, 1),
        lambda y, slope: np.where((y > 0) & (y < 1), slope, 0),
    ),
    "hardswish": (
        lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
        lambda x: np.where(x > 3, 1, np.where(x < -3, 0, x / 3 + 0.5)),
    ),
}
