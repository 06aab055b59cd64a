"""Update rules against PyTorch in float64, and LARS and LAMB against the papers' formulas written out plainly."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine import updates
from lbpar.runtime.optim.rules import LAMB, LARS, SGD, Adam, AdamW
from tests.util.optimizers import KINDS, assert_same, problem, rates, run, run_torch


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Pieces shorter than the largest parameter, so that every rule is walked in several."""
    monkeypatch.setattr(updates, "CHUNK", 13)


CASES = [
    (SGD(0.1), lambda t, ps: t.optim.SGD(ps, 0.1)),
    (SGD(0.1, weight_decay=0.02), lambda t, ps: t.optim.SGD(ps, 0.1, weight_decay=0.02)),
    (SGD(0.1, momentum=0.9), lambda t, ps: t.optim.SGD(ps, 0.1, 0.9)),
    (
        SGD(0.1, momentum=0.9, nesterov=False, weight_decay=0.02),
        lambda t, ps: t.optim.SGD(ps, 0.1, 0.9, weight_decay=0.02),
    ),
    (SGD(0.1, momentum=0.9, nesterov=True), lambda t, ps: t.optim.SGD(ps, 0.1, 0.9, nesterov=True)),
    (
        SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.02),
        lambda t, ps: t.optim.SGD(ps, 0.1, 0.9, weight_decay=0.02, nesterov=True),
    ),
    (Adam(0.01), lambda t, ps: t.optim.Adam(ps, 0.01)),
    (
        Adam(0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.02),
        lambda t, ps: t.optim.Adam(ps, 0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.02),
    ),
    (AdamW(0.01), lambda t, ps: t.optim.AdamW(ps, 0.01)),
    (AdamW(0.01, weight_decay=0.3), lambda t, ps: t.optim.AdamW(ps, 0.01, weight_decay=0.3)),
]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_equals_pytorch(case, scheduled):
    ours, theirs = CASES[case]
    ours.state, ours.steps = {}, 0
    params, grads = problem()
    lrs = rates() if scheduled else None
    assert_same(run(ours, params, grads, lrs), run_torch(theirs, params, grads, lrs))


def test_kinds_without_decay_equal_pytorchs_parameter_groups():
    params, grads = problem()
    ours = SGD(0.1, momentum=0.9, weight_decay=0.02, kinds=KINDS, no_decay=["norm"])
    theirs = {"norm.weight": {"weight_decay": 0.0}}
    expected = run_torch(lambda t, ps: t.optim.SGD(ps, 0.1, 0.9, weight_decay=0.02), params, grads, groups=theirs)
    assert_same(run(ours, params, grads), expected)


def plain_lars(params, grads, lrs, momentum, decay, trust, unscaled=()):
    """Algorithm 1 of You, Gitman and Ginsburg (2017)."""
    weights = {n: p.copy() for n, p in params.items()}
    velocity = {n: np.zeros_like(p) for n, p in params.items()}
    for lr, step in zip(lrs, grads, strict=True):
        for n, w in weights.items():
            beta = 0.0 if n in unscaled else decay
            local = trust * np.linalg.norm(w) / (np.linalg.norm(step[n]) + beta * np.linalg.norm(w))
            local = 1.0 if n in unscaled else local
            velocity[n] = momentum * velocity[n] + lr * local * (step[n] + beta * w)
            weights[n] = w - velocity[n]
    return weights


def plain_lamb(params, grads, lrs, b1, b2, eps, decay, unscaled=()):
    """Algorithm 2 of You et al. (2020)."""
    weights = {n: p.copy() for n, p in params.items()}
    m = {n: np.zeros_like(p) for n, p in params.items()}
    v = {n: np.zeros_like(p) for n, p in params.items()}
    for t, (lr, step) in enumerate(zip(lrs, grads, strict=True), start=1):
        for n, w in weights.items():
            m[n] = b1 * m[n] + (1 - b1) * step[n]
            v[n] = b2 * v[n] + (1 - b2) * step[n] ** 2
            ratio = (m[n] / (1 - b1**t)) / (np.sqrt(v[n] / (1 - b2**t)) + eps)
            update = ratio + (0.0 if n in unscaled else decay) * w
            scale = 1.0 if n in unscaled else np.linalg.norm(w) / np.linalg.norm(update)
            weights[n] = w - lr * scale * update
    return weights


def test_lars_follows_the_paper():
    params, grads = problem()
    ours = LARS(1.0, momentum=0.9, weight_decay=0.02, trust=0.1, eps=0.0)
    assert_same(run(ours, params, grads, rates()), plain_lars(params, grads, rates(), 0.9, 0.02, 0.1))


def test_lars_leaves_norm_and_bias_unscaled():
    params, grads = problem()
    ours = LARS(1.0, momentum=0.9, weight_decay=0.02, trust=0.1, eps=0.0, kinds=KINDS, no_decay=["norm", "bias"])
    assert_same(run(ours, params, grads, rates()), plain_lars(params, grads, rates(), 0.9, 0.02, 0.1, set(KINDS)))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_follows_the_paper(decay):
    params, grads = problem()
    ours = LAMB(1.0, betas=(0.9, 0.99), eps=1e-6, weight_decay=decay, kinds=KINDS, no_decay=["norm", "bias"])
    expected = plain_lamb(params, grads, rates(), 0.9, 0.99, 1e-6, decay, set(KINDS))
    assert_same(run(ours, params, grads, rates()), expected)


@pytest.mark.parametrize("make", [lambda: LARS(1.0, weight_decay=0.1), lambda: LAMB(1.0, weight_decay=0.1)])
def test_zero_weights_and_gradients_stay_finite(make):
    params = {"a": np.zeros(3), "b": np.ones(3), "empty": np.zeros((0, 4))}
    grads = {"a": np.ones(3), "b": np.zeros(3), "empty": np.zeros((0, 4))}
    optimizer = make()
    for _ in range(3):
        optimizer.step(params, grads)
    assert all(np.isfinite(p).all() for p in params.values())
    assert (params["a"] != 0).all()


def test_float32_stays_float32_and_near_float64():
    params, grads = problem()
    exact = run(Adam(0.01, weight_decay=0.1), params, grads)
    optimizer = Adam(0.01, weight_decay=0.1)
    single = run(
        optimizer,
        {n: p.astype(np.float32) for n, p in params.items()},
        [{n: g.astype(np.float32) for n, g in step.items()} for step in grads],
    )
    assert all(p.dtype == np.float32 for p in single.values())
    assert all(a.dtype == np.float32 for a in optimizer.state_dict().values())
    for name in exact:
        np.testing.assert_allclose(single[name], exact[name], atol=1e-5)
