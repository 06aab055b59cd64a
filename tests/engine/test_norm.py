from __future__ import annotations

import numpy as np
import pytest

from tests.engine.oracles import close, first, last

EPS = 1e-5


@pytest.mark.parametrize("spatial", [(), (7,), (5, 6), (3, 4, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_matches_pytorch(engine, dtype, rng, spatial, affine):
    torch = pytest.importorskip("torch")
    x = (3 + 2 * rng.standard_normal((6, *spatial, 4))).astype(dtype)
    scale, bias = (rng.standard_normal(4).astype(dtype) if affine else None for _ in range(2))
    tx, ts, tb = (
        first(x),
        *(torch.tensor(np.ones(4) if p is None else p).double().requires_grad_() for p in (scale, bias)),
    )
    if not affine:
        tb = torch.zeros(4, dtype=torch.float64)
    ty = torch.nn.functional.batch_norm(tx, None, None, ts, tb, training=True, eps=EPS)
    dy = rng.standard_normal(x.shape).astype(dtype)
    ty.backward(torch.tensor(np.moveaxis(dy, -1, 1)).double())

    count = x.size // 4
    shift = rng.standard_normal(4)
    mean, invstd, var = engine.norm_moments(engine.norm_sums(x, shift), shift, count, EPS)
    flat = x.reshape(-1, 4).astype(np.float64)
    close(mean, flat.mean(0), np.float64)
    close(var, flat.var(0), np.float64, 10)
    close(invstd, 1 / np.sqrt(flat.var(0) + EPS), np.float64, 10)
    close(engine.norm_apply(x, mean, invstd, scale, bias), last(ty), dtype)
    sums = engine.norm_backward_sums(x, dy, mean, invstd)
    close(sums[0], dy.reshape(-1, 4).astype(np.float64).sum(0), np.float64)
    close(sums[1], ts.grad.numpy(), np.float64, 10)
    close(engine.norm_backward_data(x, dy, mean, invstd, scale, sums, count), last(tx.grad), dtype, 2)


def test_blocks_with_one_shift_add_up(engine, dtype, rng):
    x, shift = rng.standard_normal((4, 5, 6, 3)).astype(dtype), np.array([0.5, -1, 2])
    whole = engine.norm_sums(x, shift)
    parts = [
        engine.norm_sums(np.ascontiguousarray(x[:, part]), shift) for part in (slice(0, 2), slice(2, 5), slice(5, 5))
    ]
    close(sum(parts), whole, np.float64)


def test_shift_keeps_a_far_mean_from_cancelling(engine, dtype, rng):
    x = (1e4 + rng.standard_normal((2000, 2))).astype(dtype)
    shift = np.array([1e4, 1e4])
    _, _, var = engine.norm_moments(engine.norm_sums(x, shift), shift, 2000, 0.0)
    np.testing.assert_allclose(var, x.astype(np.float64).var(0), rtol=1e-10)


def test_more_rows_than_one_block(engine, dtype, rng):
    x, dy = (rng.standard_normal((1, 300, 301, 3)).astype(dtype) for _ in range(2))
    zero, one = np.zeros(3), np.ones(3)
    flat, flat_dy = x.reshape(-1, 3).astype(np.float64), dy.reshape(-1, 3).astype(np.float64)
    # An engine may add up tiles in its own type; what it may not do is lose more than that type's rounding over all rows.
    rounding = 1e-6 if engine.name != "numpy" and dtype == np.float32 else 1e-13
    scale = rounding * np.sqrt(flat.shape[0])
    sums = engine.norm_sums(x, zero), engine.norm_backward_sums(x, dy, zero, one)
    for got, (a, b) in zip(sums, ((flat, flat**2), (flat_dy, flat * flat_dy)), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, np.stack([a.sum(0), b.sum(0)]), rtol=rounding, atol=scale)


@pytest.mark.parametrize("shape", [(0, 3, 3, 2), (2, 0, 3, 2), (2, 3, 3, 0)])
def test_empty_blocks(engine, dtype, shape):
    x, c = np.empty(shape, dtype=dtype), shape[-1]
    zero, one = np.zeros(c), np.ones(c)
    close(engine.norm_sums(x, zero), np.zeros((2, c)), np.float64)
    close(engine.norm_backward_sums(x, x, zero, one), np.zeros((2, c)), np.float64)
    close(engine.norm_apply(x, zero, one, None, None), np.zeros(shape), dtype)
    close(engine.norm_backward_data(x, x, zero, one, None, np.zeros((2, c)), 5), np.zeros(shape), dtype)
    mean, invstd, var = engine.norm_moments(np.zeros((2, c)), zero, 0, EPS)
    assert np.isfinite(mean).all() and np.isfinite(invstd).all() and np.isfinite(var).all()


def test_constant_statistics_pass_the_gradient_through(engine, dtype, rng):
    x, dy = (rng.standard_normal((4, 3)).astype(dtype) for _ in range(2))
    mean, invstd, scale = np.array([1.0, 2, 3]), np.array([0.5, 1, 2]), np.array([1, 2, 3], dtype=dtype)
    got = engine.norm_backward_data(x, dy, mean, invstd, scale, np.zeros((2, 3)), 1)
    close(got, dy * (invstd * scale.astype(np.float64)), dtype)
