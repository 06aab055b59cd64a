from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from tests.engine.oracles import close, first, joined, last, sums_of

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
    more = sums_of(engine, dtype)
    close(mean, flat.mean(0), np.float64, more)
    close(var, flat.var(0), np.float64, 10 * more)
    close(invstd, 1 / np.sqrt(flat.var(0) + EPS), np.float64, 10 * more)
    close(engine.norm_apply(x, mean, invstd, scale, bias), last(ty), dtype)
    sums = engine.norm_backward_sums(x, dy, mean, invstd)
    close(sums[0], dy.reshape(-1, 4).astype(np.float64).sum(0), np.float64, more)
    close(sums[1], ts.grad.numpy(), np.float64, 10 * more)
    close(engine.norm_backward_data(x, dy, mean, invstd, scale, sums, count), last(tx.grad), dtype, 2)


def test_blocks_with_one_shift_add_up(engine, dtype, rng):
    x, shift = rng.standard_normal((4, 5, 6, 3)).astype(dtype), np.array([0.5, -1, 2])
    whole = engine.norm_sums(x, shift)
    parts = [
        engine.norm_sums(np.ascontiguousarray(x[:, part]), shift) for part in (slice(0, 2), slice(2, 5), slice(5, 5))
    ]
    close(joined(sum(parts)), joined(whole), np.float64, sums_of(engine, dtype))


@pytest.mark.parametrize("cuts", [(0, 2000), (0, 667, 1334, 2000), (0, 1, 1, 1200, 2000)], ids=str)
@pytest.mark.parametrize("shift", ["mean", "zero"])
@pytest.mark.parametrize("far", [1e4, -1e5, 1e7])
def test_a_mean_far_from_the_shift_does_not_cancel(engine, dtype, rng, far, shift, cuts):
    """However the rows are cut; the oracle is exact, for x - far is."""
    x = (far + rng.standard_normal((2000, 3))).astype(dtype)
    x[0] = far  # the first row, about which sums are taken, tells nothing of the mean
    near = x.astype(np.float64) - far
    centre = np.full(3, far if shift == "mean" else 0.0)
    sums = sum(engine.norm_sums(x[a:b], centre) for a, b in itertools.pairwise(cuts))
    mean, invstd, var = engine.norm_moments(sums, centre, 2000, 0.0)
    more = sums_of(engine, dtype)
    np.testing.assert_allclose(mean, far + near.mean(0), rtol=4e-16 * more)
    np.testing.assert_allclose(var, near.var(0), rtol=1e-11 * more)
    np.testing.assert_allclose(invstd, near.var(0) ** -0.5, rtol=1e-11 * more)
    running, variance = np.zeros(3), np.ones(3)
    sums = engine.norm_sums(x, running)
    engine.norm_running(sums, running, variance, 0.25, 2000)
    np.testing.assert_allclose(running, far / 4 + near.mean(0) / 4, rtol=4e-16 * more)
    np.testing.assert_allclose(variance, 0.75 + 0.25 * near.var(0, ddof=1), rtol=1e-11 * more)


@pytest.mark.parametrize("far", [1e5, 1e7])
def test_normalised_values_and_gradients_of_a_far_mean(engine, dtype, rng, far):
    """As those of the same numbers moved to zero, to within the resolution of x itself."""
    x = (far + 3 * rng.standard_normal((50, 40, 3))).astype(dtype)
    near = x.astype(np.float64) - far
    near -= near.mean((0, 1))
    dy, scale, bias = (rng.standard_normal(s).astype(dtype) for s in (x.shape, 3, 3))
    zero = np.zeros(3)
    mean, invstd, _ = engine.norm_moments(engine.norm_sums(x, zero), zero, 2000, EPS)
    sums = engine.norm_backward_sums(x, dy, mean, invstd)
    reference = NumpyEngine(np.float64)
    variance = 1 / np.sqrt(near.var((0, 1)) + EPS)
    want = reference.norm_backward_sums(near, dy.astype(np.float64), zero, variance)
    tolerance = 20 * max(np.finfo(dtype).eps, np.spacing(far))
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    close(engine.norm_apply(x, mean, invstd, scale, bias), near * variance * scale + bias)
    np.testing.assert_allclose(sums, want, rtol=tolerance, atol=tolerance * 100)
    close(
        engine.norm_backward_data(x, dy, mean, invstd, scale, sums, 2000),
        reference.norm_backward_data(near, dy.astype(np.float64), zero, variance, scale, want, 2000),
    )


def test_more_rows_than_one_block(engine, dtype, rng):
    x, dy = (rng.standard_normal((1, 300, 301, 3)).astype(dtype) for _ in range(2))
    zero, one = np.zeros(3), np.ones(3)
    flat, flat_dy = x.reshape(-1, 3).astype(np.float64), dy.reshape(-1, 3).astype(np.float64)
    # An engine may add up tiles in its own type; what it may not do is lose more than that type's rounding over all rows.
    rounding = 1e-6 if engine.name != "numpy" and dtype == np.float32 else 1e-13
    scale = rounding * np.sqrt(flat.shape[0]) + 1e-14 * flat.shape[0]  # sums about the first row are of one sign
    sums = engine.norm_sums(x, zero), engine.norm_backward_sums(x, dy, zero, one)
    for got, (a, b) in zip((joined(sums[0]), sums[1]), ((flat, flat**2), (flat_dy, flat * flat_dy)), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, np.stack([a.sum(0), b.sum(0)]), rtol=rounding, atol=scale)


@pytest.mark.parametrize("shape", [(0, 3, 3, 2), (2, 0, 3, 2), (2, 3, 3, 0)])
def test_empty_blocks(engine, dtype, shape):
    x, c = np.empty(shape, dtype=dtype), shape[-1]
    zero, one = np.zeros(c), np.ones(c)
    close(engine.norm_sums(x, zero), np.zeros((4, c)), np.float64)
    close(engine.norm_backward_sums(x, x, zero, one), np.zeros((2, c)), np.float64)
    close(engine.norm_apply(x, zero, one, None, None), np.zeros(shape), dtype)
    close(engine.norm_backward_data(x, x, zero, one, None, np.zeros((2, c)), 5), np.zeros(shape), dtype)
    mean, invstd, var = engine.norm_moments(np.zeros((4, c)), zero, 0, EPS)
    assert np.isfinite(mean).all() and np.isfinite(invstd).all() and np.isfinite(var).all()


def test_constant_statistics_pass_the_gradient_through(engine, dtype, rng):
    x, dy = (rng.standard_normal((4, 3)).astype(dtype) for _ in range(2))
    mean, invstd, scale = np.array([1.0, 2, 3]), np.array([0.5, 1, 2]), np.array([1, 2, 3], dtype=dtype)
    got = engine.norm_backward_data(x, dy, mean, invstd, scale, np.zeros((2, 3)), 1)
    close(got, dy * (invstd * scale.astype(np.float64)), dtype)


@pytest.mark.parametrize("far", [0, 1e5])
@pytest.mark.parametrize("shape", [(3, 20, 2, 3), (2, 40000, 3, 1), (500, 1, 1, 7)], ids=str)
def test_sums_within_samples_add_up_over_positions(engine, dtype, rng, shape, far):
    """Cut into parts of which one is empty; the oracle is exact, for x - far is."""
    x = (far + rng.standard_normal(shape)).astype(dtype)
    half = max(1, shape[1] // 3)
    parts = [np.ascontiguousarray(x[:, p]) for p in (slice(0, half), slice(half, None), slice(0, 0))]
    sums = sum(engine.sample_norm_sums(p) for p in parts)
    count, flat = shape[1] * shape[3], sums.reshape(4, -1)
    mean, _, var = engine.norm_moments(flat, np.zeros(flat.shape[1]), count, EPS)
    near = (x.astype(np.float64) - far).swapaxes(1, 2).reshape(-1, count)
    close(mean, far + near.mean(1), np.float64)
    np.testing.assert_allclose(var, near.var(1), rtol=1e-10)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(3, 20, 2, 3), (2, 700, 5, 1), (50, 1, 1, 7), (2, 0, 3, 2), (0, 4, 2, 2)], ids=str)
def test_norms_within_samples_and_their_gradients(engine, dtype, rng, shape, affine):
    """Every engine beside NumPy in float64."""
    exact, (rows, _, groups, width) = NumpyEngine("float64"), shape
    x, dy = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    mean, invstd = rng.standard_normal((rows, groups)), 1 + rng.random((rows, groups))
    scale, bias = (rng.standard_normal((groups, width)).astype(dtype) if affine else None for _ in range(2))
    plain = [a.astype(np.float64) if a is not None else None for a in (x, dy, scale, bias)]
    close(
        engine.sample_norm_apply(x, mean, invstd, scale, bias),
        exact.sample_norm_apply(plain[0], mean, invstd, *plain[2:]),
        dtype,
    )
    sums, *gradients = engine.sample_norm_backward_sums(x, dy, mean, invstd, scale)
    want, *wanted = exact.sample_norm_backward_sums(plain[0], plain[1], mean, invstd, plain[2])
    np.testing.assert_allclose(sums, want, rtol=1e-6 if dtype == np.float32 else 1e-10, atol=1e-5)
    for got, gradient in zip(gradients, wanted, strict=True) if affine else ():
        np.testing.assert_allclose(got.ravel(), gradient, rtol=1e-4, atol=1e-3 if dtype == np.float32 else 1e-9)
    dx = engine.sample_norm_backward_data(9.0, x, dy, mean, invstd, want, scale)
    close(dx, exact.sample_norm_backward_data(9.0, plain[0], plain[1], mean, invstd, want, plain[2]), dtype)
