"""Gradient clipping against PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.errors import TrainingError
from lbpar.runtime.optim.clip import clip_by_global_norm
from tests.util.optimizers import problem


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_equals_pytorch(max_norm):
    torch = pytest.importorskip("torch")
    _, (grads, *_) = problem()
    tensors = [torch.zeros(g.shape, dtype=torch.float64) for g in grads.values()]
    for t, g in zip(tensors, grads.values(), strict=True):
        t.grad = torch.tensor(g)
    expected = float(torch.nn.utils.clip_grad_norm_(tensors, max_norm))
    assert clip_by_global_norm(grads, max_norm)() == pytest.approx(expected, rel=1e-13)
    for t, g in zip(tensors, grads.values(), strict=True):
        np.testing.assert_allclose(g, t.grad.numpy(), rtol=1e-13)


def test_clipping_accumulates_in_float64_and_names_the_broken_parameter():
    grads = {"a": np.full(100_000, 1e-3, np.float32), "b": np.ones(2, np.float32)}
    expected = np.sqrt(np.sum(grads["a"].astype(np.float64) ** 2) + 2)
    assert clip_by_global_norm(grads, 1e9)() == pytest.approx(expected, rel=1e-13)
    grads["b"][1] = np.nan
    with pytest.raises(TrainingError, match="gradient of b has norm nan"):
        clip_by_global_norm(grads, 1.0)()
