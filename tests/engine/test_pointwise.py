from __future__ import annotations

import math

import numpy as np
import pytest

from lbpar import random as counter_random
from lbpar.engine.activations import ACTIVATIONS, erf
from tests.engine.oracles import close

SHAPES = [(3, 4, 5, 2), (7, 3), (2, 0, 3), (0, 4)]


def spread(rng, shape, dtype):
    return (4 * rng.standard_normal(shape)).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["relu", "leaky_relu", "sigmoid", "tanh"])
def test_activations_match_pytorch(engine, dtype, rng, shape, name):
    torch = pytest.importorskip("torch")
    x, dy = spread(rng, shape, dtype), spread(rng, shape, dtype)
    x.reshape(-1)[:1] = 0
    extra, function = (), getattr(torch, name, None)
    if name == "leaky_relu":
        extra, function = (0.1,), lambda x: torch.nn.functional.leaky_relu(x, 0.1)
    elif name == "tanh":
        extra, function = (1.2,), lambda x: 1.2 * torch.tanh(x)
    tx = torch.tensor(x).double().requires_grad_()
    ty = function(tx)
    ty.backward(torch.tensor(dy).double())
    y = getattr(engine, f"{name}_forward")(x, *extra)
    close(y, ty.detach().numpy(), dtype)
    close(getattr(engine, f"{name}_backward")(y, dy, *extra), tx.grad.numpy(), dtype, 2)


def test_activations_keep_nan_and_bear_infinity(engine, dtype):
    x = np.array([[np.nan, np.inf, -np.inf, -1000, 1000, -20]], dtype=dtype)
    np.testing.assert_array_equal(engine.relu_forward(x), [[np.nan, np.inf, 0, 0, 1000, 0]])
    np.testing.assert_array_equal(engine.leaky_relu_forward(x, 0.5), [[np.nan, np.inf, -np.inf, -500, 1000, -10]])
    np.testing.assert_allclose(engine.sigmoid_forward(x), [[np.nan, 1, 0, 0, 1, np.exp(-20) / (1 + np.exp(-20))]], 1e-6)
    np.testing.assert_allclose(engine.tanh_forward(x, 1.5), [[np.nan, 1.5, -1.5, -1.5, 1.5, -1.5]], 1e-6)


def test_relu_gradient_is_zero_where_shut_off_even_if_infinite(engine, dtype):
    y, dy = np.array([[0, 0, 1, 2]], dtype=dtype), np.array([[np.inf, np.nan, -3, np.inf]], dtype=dtype)
    np.testing.assert_array_equal(engine.relu_backward(y, dy), [[0, 0, -3, np.inf]])


def test_leaky_relu_with_a_slope_above_one(engine, dtype):
    x = np.array([[-2, 3]], dtype=dtype)
    np.testing.assert_array_equal(engine.leaky_relu_forward(x, 1.5), [[-3, 3]])
    np.testing.assert_array_equal(engine.leaky_relu_backward(x, x, 1.5), [[-3, 3]])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_sums_and_products_of_several(engine, dtype, rng, shape, count):
    xs = [spread(rng, shape, dtype) for _ in range(count)]
    before = [x.copy() for x in xs]
    dy = spread(rng, shape, dtype)
    close(engine.add(xs), np.sum(xs, axis=0, dtype=np.float64), dtype)
    close(engine.multiply(xs), np.prod(xs, axis=0, dtype=np.float64), dtype)
    for i in range(count):
        others = np.prod([dy, *xs[:i], *xs[i + 1 :]], axis=0, dtype=np.float64)
        close(engine.multiply_backward(dy, xs, i), others, dtype)
    for x, was in zip(xs, before, strict=True):
        np.testing.assert_array_equal(x, was)
    assert not any(np.shares_memory(engine.add(xs), x) for x in xs)


def test_concat(engine, dtype, rng):
    xs = [spread(rng, (2, 3, 4, c), dtype) for c in (3, 0, 1, 5)]
    close(engine.concat(xs), np.concatenate(xs, -1).astype(np.float64), dtype)


def flat_parts(shape, part=()):
    """Per dimension, what each place adds to the flat index."""
    steps = [int(np.prod(shape[d + 1 :])) for d in range(len(shape))]
    return [
        np.arange(n * step, step=step)[p]
        for n, step, p in zip(shape, steps, part or (slice(None),) * len(shape), strict=True)
    ]


def test_dropout_does_not_depend_on_blocks(engine, dtype, rng):
    shape, key = (4, 6, 5, 7), counter_random.fold(3, 1, 4)
    x = spread(rng, shape, dtype)
    whole = engine.dropout(x, 0.3, key, flat_parts(shape))
    kept = whole != 0
    assert 0.62 < kept.mean() < 0.78  # 840 draws: five standard deviations
    close(whole, np.where(kept, x / 0.7, 0.0), dtype)
    for part in (np.s_[1:3, 2:5, :, 1:6], np.s_[:, :, 3:3, :], np.s_[0:4, 5:6, :, 4:]):
        block = np.ascontiguousarray(x[part])
        np.testing.assert_array_equal(engine.dropout(block, 0.3, key, flat_parts(shape, part)), whole[part])
    assert not np.array_equal(kept, engine.dropout(x, 0.3, key + 1, flat_parts(shape)) != 0)


def test_dropout_of_whole_channels(engine, dtype, rng):
    x = 1 + rng.random((3, 4, 5, 8)).astype(dtype)
    index = [np.arange(0, 24, 8), np.zeros(4, np.int64), np.zeros(5, np.int64), np.arange(8)]
    kept = engine.dropout(x, 0.5, 11, index) != 0
    np.testing.assert_array_equal(kept, np.broadcast_to(kept[:, :1, :1], kept.shape))
    assert 0 < kept.mean() < 1


def test_dropout_of_nothing_and_of_everything(engine, dtype, rng):
    x = spread(rng, (3, 4), dtype)
    close(engine.dropout(x, 0.0, 1, flat_parts(x.shape)), x.astype(np.float64), dtype)
    close(engine.dropout(x, 1.0, 1, flat_parts(x.shape)), np.zeros(x.shape), dtype)


def test_axpy(engine, dtype, rng):
    x, y = spread(rng, (3, 4), dtype), spread(rng, (3, 4), dtype)
    close(engine.axpy(0.3, x), 0.3 * x.astype(np.float64), dtype)
    close(engine.axpy(0.3, x, y), 0.3 * x.astype(np.float64) + y, dtype)
    assert engine.axpy(0.3, x).dtype == dtype


def test_erf_is_that_of_the_library():
    x = np.concatenate([np.linspace(-8, 8, 20001), [0.0, -0.0, np.inf, -np.inf, np.nan]])
    np.testing.assert_allclose(erf(x), [math.erf(v) for v in x], rtol=1e-14, atol=2e-16)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_of_a_table_bear_what_is_large(engine, dtype, kind):
    options = {"elu": (1.0,), "gelu": ("none",), "softplus": (1.0,), "hardsigmoid": (0.2,)}.get(kind, ())
    x = np.array([[-1000, 1000, np.nan]], dtype)
    with np.errstate(over="raise"):
        y = engine.activation_forward(kind, x, *options)
        slope = engine.activation_backward(kind, x if kind in ("gelu", "silu", "hardswish") else y, x / x, *options)
    assert y.dtype == slope.dtype == dtype
    high, flat = (1, 0) if kind == "hardsigmoid" else (1000, 1)
    np.testing.assert_array_equal(y, [[-1 if kind == "elu" else 0, high, np.nan]])
    np.testing.assert_array_equal(slope[0, :2], [0, flat])


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_of_a_table_of_nothing(engine, dtype, kind):
    options = {"elu": (1.0,), "gelu": ("none",), "softplus": (1.0,), "hardsigmoid": (0.2,)}.get(kind, ())
    x = np.zeros((2, 0, 3), dtype)
    assert engine.activation_forward(kind, x, *options).shape == x.shape
    assert engine.activation_backward(kind, x, x, *options).shape == x.shape
