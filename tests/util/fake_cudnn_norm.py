"""Batch norm in training, as the stand-in for cuDNN checks and computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def check(operands: Sequence[Any], results: Sequence[Any]) -> None:
    """Refuse extents and types as cuDNN does."""
    x, *vectors = operands
    *vectors, eps, momentum = vectors
    y, *statistics = results
    wanted = [1, x.dim[1], *(1 for _ in x.dim[2:])]
    wrong = [t.dim for t in (*vectors, *statistics) if t.dim != wanted]
    single = all(t.by_value and set(t.dim) == {1} and len(t.dim) == len(x.dim) for t in (eps, momentum))
    if len(x.dim) not in (4, 5) or wrong or not single or y.dim != x.dim or y.kind is not x.kind:
        raise RuntimeError(f"CUDNN_STATUS_BAD_PARAM: {x.dim}, {y.dim} with {wrong}")
    if any(t.kind.name != "FLOAT" for t in (*vectors, *statistics, eps, momentum)):
        raise RuntimeError("CUDNN_STATUS_BAD_PARAM: statistics are FLOAT")


def compute(operands: Sequence[np.ndarray], statistics: Sequence[np.ndarray]) -> np.ndarray:
    """y, in float64; statistics are written. Arrays are (N, C, *S) and (1, C, ...)."""
    x, scale, bias, old_mean, old_var, eps, momentum = (a.astype(np.float64) for a in operands)
    mean, invstd, new_mean, new_var = statistics
    axes, count = (0, *range(2, x.ndim)), x.size // x.shape[1]
    found, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    mean[...], invstd[...] = found, 1 / np.sqrt(var + eps)
    weight = float(momentum.reshape(()))
    new_mean[...] = (1 - weight) * old_mean + weight * found
    new_var[...] = (1 - weight) * old_var + weight * var * count / (count - 1)
    y: np.ndarray = (x - mean) * invstd.astype(np.float64) * scale + bias
    return y
