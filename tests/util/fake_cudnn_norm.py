"""Norms in training, as the stand-in for cuDNN checks and computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

KINDS = {"batchnorm": (0, 2, 3, 4), "instancenorm": (2, 3, 4), "layernorm": (1, 2, 3, 4)}
"""Dimensions of (N, C, *S) that statistics are taken over."""


def check(name: str, operands: Sequence[Any], results: Sequence[Any]) -> None:
    """Refuse extents and types as cuDNN does."""
    x, *vectors = operands
    single = [vectors.pop() for _ in range(2 if name == "batchnorm" else 1)]
    y, *statistics = results
    vector = [1, x.dim[1], *(1 for _ in x.dim[2:])]
    wanted = [1 if d in KINDS[name] else n for d, n in enumerate(x.dim)]
    wrong = [t.dim for t in vectors if t.dim != vector] + [t.dim for t in statistics if t.dim != wanted]
    alone = all(t.by_value and set(t.dim) == {1} and len(t.dim) == len(x.dim) for t in single)
    if len(x.dim) not in (4, 5) or wrong or not alone or y.dim != x.dim or y.kind is not x.kind:
        raise RuntimeError(f"CUDNN_STATUS_BAD_PARAM: {x.dim}, {y.dim} with {wrong}")
    if any(t.kind.name != "FLOAT" for t in (*vectors, *statistics, *single)):
        raise RuntimeError("CUDNN_STATUS_BAD_PARAM: statistics are FLOAT")


def compute(name: str, operands: Sequence[np.ndarray], statistics: Sequence[np.ndarray]) -> np.ndarray:
    """y, in float64; statistics are written."""
    x, scale, bias, *others = (a.astype(np.float64) for a in operands)
    axes = tuple(d for d in KINDS[name] if d < x.ndim)
    mean, invstd, *running = statistics
    eps = others[-2] if running else others[-1]
    found, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    mean[...], invstd[...] = found, 1 / np.sqrt(var + eps)
    if running:
        weight, count = float(others[-1].reshape(())), x.size // mean.size
        running[0][...] = (1 - weight) * others[0] + weight * found
        running[1][...] = (1 - weight) * others[1] + weight * var * count / (count - 1)
    y: np.ndarray = (x - mean) * invstd.astype(np.float64) * scale + bias
    return y
