"""Weights, gradients and rates for tests of update rules, and the same steps by PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lbpar.runtime.optim.base import Optimizer

SHAPES = {"conv.weight": (5, 3, 3, 2), "conv.bias": (5,), "norm.weight": (5,), "fc.weight": (7, 4)}
KINDS = {"conv.bias": "bias", "norm.weight": "norm"}
STEPS = 50


def problem(seed: int = 0):
    """Start weights and STEPS gradients per parameter."""
    rng = np.random.default_rng(seed)
    params = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
    grads = [{name: rng.standard_normal(shape) for name, shape in SHAPES.items()} for _ in range(STEPS)]
    return params, grads


def rates() -> np.ndarray:
    return 0.05 * (1 + np.cos(np.arange(STEPS) / 7))


def run(optimizer: Optimizer, params, grads, lrs=None, norms=None):
    params = {name: p.copy() for name, p in params.items()}
    for i, g in enumerate(grads):
        optimizer.step(params, g, None if lrs is None else float(lrs[i]), norms)
    return params


def run_torch(make: Any, params, grads, lrs=None, groups: dict[str, dict[str, float]] | None = None):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.tensor(p, requires_grad=True) for name, p in params.items()}
    settings = groups or {}
    optimizer = make(
        torch, [{"params": [t], **{k: v for k, v in settings.get(name, {}).items()}} for name, t in tensors.items()]
    )
    for i, g in enumerate(grads):
        for name, t in tensors.items():
            t.grad = torch.tensor(g[name])
        if lrs is not None:
            for group in optimizer.param_groups:
                group["lr"] = float(lrs[i])
        optimizer.step()
    return {name: t.detach().numpy() for name, t in tensors.items()}


def assert_same(ours, theirs, rtol=1e-11):
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, rtol=rtol, atol=1e-13, err_msg=name)
