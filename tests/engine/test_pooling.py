from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.base import LocalWindow
from tests.engine import oracles
from tests.engine.oracles import close, first, last

# spatial, kernel, stride, dilation, pad, ceil_mode
CASES = {
    "2x2": ((8, 6), 2, 2, 1, 0, False),
    "3x3 stride 2": ((9, 12), 3, 2, 1, 1, False),
    "overlapping": ((6, 7), 3, 1, 1, 1, False),
    "ceil": ((8, 9), 3, 2, 1, 0, True),
    "gaps": ((11, 9), 2, 3, 1, 0, False),
    "3-D": ((6, 5, 7), 3, 2, 1, 1, False),
    "1-D": ((13,), 3, 2, 1, 1, False),
}
DILATED = {**CASES, "dilated": ((11, 9), 3, 2, 2, 1, False)}


def windows(dims, kernel, stride, dilation, pad):
    return (LocalWindow(kernel, stride, dilation, pad),) * dims


def random_window(rng):
    return LocalWindow(*(int(rng.integers(lo, hi)) for lo, hi in ((1, 4), (1, 5), (1, 3), (-3, 4))))


@pytest.mark.parametrize("case", DILATED.values(), ids=DILATED.keys())
@pytest.mark.parametrize("values", ["normal", "ties", "some NaN"])
def test_max_pool_matches_pytorch(engine, dtype, rng, case, values):
    torch = pytest.importorskip("torch")
    spatial, kernel, stride, dilation, pad, ceil = case
    x = rng.standard_normal((2, *spatial, 3))
    if values == "ties":
        x = np.round(x)
    if values == "some NaN":
        x[rng.random(x.shape) < 0.1] = np.nan
    x = x.astype(dtype)
    tx = first(x)
    pool = getattr(torch.nn.functional, f"max_pool{len(spatial)}d")
    ty = pool(tx, kernel, stride, pad, dilation, ceil)
    dy = rng.standard_normal(last(ty).shape).astype(dtype)
    ty.backward(torch.tensor(np.moveaxis(dy, -1, 1)).double())

    win = windows(len(spatial), kernel, stride, dilation, pad)
    y, arg = engine.max_pool_forward(x, win, ty.shape[2:])
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, last(ty).astype(dtype))
    close(engine.max_pool_backward(dy, arg, win, spatial), last(tx.grad), dtype)


@pytest.mark.parametrize("seed", range(12))
def test_local_max_pool_matches_plain_loops(engine, dtype, seed):
    rng = np.random.default_rng(seed)
    dims = int(rng.integers(1, 4))
    spatial, out = (tuple(map(int, rng.integers(1, 6, dims))) for _ in range(2))
    win = tuple(random_window(rng) for _ in range(dims))
    x = np.round(rng.standard_normal((2, *spatial, 2)), 1).astype(dtype)
    y, arg = engine.max_pool_forward(x, win, out)
    want, where = oracles.max_pool(x, win, out)
    np.testing.assert_array_equal(y, want.astype(dtype))
    dy = rng.standard_normal(y.shape).astype(dtype)
    dx = np.zeros(x.shape)
    for at in np.ndindex(*y.shape):
        if where[at] is not None:
            dx[(at[0], *where[at], at[-1])] += dy[at]
    close(engine.max_pool_backward(dy, arg, win, spatial), dx, dtype)


def test_max_pool_of_minus_infinity_takes_the_first_tap_inside(engine, dtype):
    x = np.full((1, 3, 3, 1), -np.inf, dtype=dtype)
    win = windows(2, 3, 2, 1, 1)
    y, arg = engine.max_pool_forward(x, win, (2, 2))
    assert (y == -np.inf).all()
    dx = engine.max_pool_backward(np.arange(1, 5, dtype=dtype).reshape(y.shape), arg, win, (3, 3))
    np.testing.assert_array_equal(dx[0, :, :, 0], [[1, 2, 0], [3, 4, 0], [0, 0, 0]])


def test_max_pool_gradient_stays_with_the_maximum(engine, dtype):
    x = np.array([1, 3, 2, 0], dtype=dtype).reshape(1, 2, 2, 1)
    y, arg = engine.max_pool_forward(x, windows(2, 2, 2, 1, 0), (1, 1))
    dx = engine.max_pool_backward(np.full_like(y, np.inf), arg, windows(2, 2, 2, 1, 0), (2, 2))
    np.testing.assert_array_equal(dx.ravel(), [0, np.inf, 0, 0])


def test_max_pool_with_more_taps_than_a_byte_counts(engine, dtype, rng):
    x = rng.standard_normal((1, 20, 20, 2)).astype(dtype)
    win = windows(2, 18, 2, 1, 0)
    y, arg = engine.max_pool_forward(x, win, (2, 2))
    want, where = oracles.max_pool(x, win, (2, 2))
    np.testing.assert_array_equal(y, want)
    dx = engine.max_pool_backward(np.ones_like(y), arg, win, (20, 20))
    hit = {(0, *where[at], at[-1]) for at in np.ndindex(*y.shape)}
    assert set(zip(*np.nonzero(dx), strict=True)) == hit


@pytest.mark.parametrize("count_include_pad", [True, False])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_avg_pool_matches_pytorch(engine, dtype, rng, case, count_include_pad):
    torch = pytest.importorskip("torch")
    spatial, kernel, stride, dilation, pad, ceil = case
    x = rng.standard_normal((2, *spatial, 3)).astype(dtype)
    tx = first(x)
    pool = getattr(torch.nn.functional, f"avg_pool{len(spatial)}d")
    ty = pool(tx, kernel, stride, pad, ceil, count_include_pad)
    dy = rng.standard_normal(last(ty).shape).astype(dtype)
    ty.backward(torch.tensor(np.moveaxis(dy, -1, 1)).double())

    divisors = []
    for n, n_out in zip(spatial, ty.shape[2:], strict=True):
        start = np.arange(n_out) * stride - pad
        stop = np.minimum(start + kernel, n + pad)
        divisors.append((stop - start if count_include_pad else np.minimum(stop, n) - np.maximum(start, 0)) * 1.0)
    win = windows(len(spatial), kernel, stride, dilation, pad)
    close(engine.avg_pool_forward(x, win, ty.shape[2:], divisors), last(ty), dtype)
    close(engine.avg_pool_backward(dy, win, spatial, divisors), last(tx.grad), dtype)


@pytest.mark.parametrize("seed", range(12))
def test_local_avg_pool_matches_plain_loops(engine, dtype, seed):
    rng = np.random.default_rng(seed)
    dims = int(rng.integers(1, 4))
    spatial, out = (tuple(map(int, rng.integers(1, 6, dims))) for _ in range(2))
    win = tuple(random_window(rng) for _ in range(dims))
    x = rng.standard_normal((2, *spatial, 3)).astype(dtype)
    dy = rng.standard_normal((2, *out, 3)).astype(dtype)
    divisors = tuple(rng.integers(1, 5, n).astype(np.float64) for n in out)
    share = 1.0
    for i, d in enumerate(divisors):
        share = share / d.reshape(-1, *(1,) * (dims - i))
    close(engine.avg_pool_forward(x, win, out, divisors), oracles.window_sum(x, win, out) * share, dtype)
    dx = np.zeros(x.shape)
    for o, _, i in oracles.taps(win, spatial, out):
        dx[(slice(None), *i)] += (dy * share)[(slice(None), *o)]
    close(engine.avg_pool_backward(dy, win, spatial, divisors), dx, dtype)


@pytest.mark.parametrize(
    ("shape", "out"), [((0, 4, 4, 2), (2, 2)), ((2, 0, 4, 2), (2, 2)), ((2, 4, 4, 0), (2, 2)), ((2, 4, 4, 2), (0, 2))]
)
def test_empty_blocks(engine, dtype, shape, out):
    x = np.ones(shape, dtype=dtype)
    win = windows(2, 2, 2, 1, 0)
    divisors = tuple(np.full(n, 2.0) for n in out)
    y, arg = engine.max_pool_forward(x, win, out)
    assert y.shape == (shape[0], *out, shape[-1])
    assert (y == (-np.inf if 0 in shape else 1)).all()
    dx = np.zeros(shape)
    close(engine.max_pool_backward(np.ones_like(y), arg, win, shape[1:-1]), dx, dtype)
    close(engine.avg_pool_forward(x, win, out, divisors), np.zeros(y.shape), dtype)
    close(engine.avg_pool_backward(np.ones_like(y), win, shape[1:-1], divisors), dx, dtype)
    close(engine.spatial_sum(x, 0.5), 0.5 * x.sum((1, 2)), dtype)


@pytest.mark.parametrize("spatial", [(5, 4), (3, 2, 4), (6,)])
def test_spatial_sum_and_its_gradient(engine, dtype, rng, spatial):
    x = rng.standard_normal((2, *spatial, 3)).astype(dtype)
    axes = tuple(range(1, len(spatial) + 1))
    close(engine.spatial_sum(x, 0.1), 0.1 * x.astype(np.float64).sum(axes), dtype)
    dy = rng.standard_normal((2, 3)).astype(dtype)
    want = np.broadcast_to(0.1 * dy.astype(np.float64).reshape(2, *(1,) * len(spatial), 3), x.shape)
    close(engine.spatial_broadcast(dy, spatial, np.float64(0.1)), want, dtype)


@pytest.mark.parametrize(
    ("spatial", "factors"), [((3, 4), (2, 3)), ((2, 3, 2), (2, 1, 3)), ((5,), (4,)), ((3, 2), (1, 1))]
)
def test_upsample_matches_repeat(engine, dtype, rng, spatial, factors):
    x = rng.standard_normal((2, *spatial, 3)).astype(dtype)
    whole = x
    for axis, factor in enumerate(factors, start=1):
        whole = np.repeat(whole, factor, axis)
    zero = (0,) * len(spatial)
    y = engine.upsample_forward(x, factors, whole.shape[1:-1], zero)
    close(y, whole.astype(np.float64), dtype)
    assert not np.shares_memory(x, y)
    # a block that starts and ends inside repeated elements
    offsets = tuple(f - 1 for f in factors)
    part = whole[(slice(None), *(slice(o, n - 1) for o, n in zip(offsets, whole.shape[1:-1], strict=True)))]
    close(engine.upsample_forward(x, factors, part.shape[1:-1], offsets), part.astype(np.float64), dtype)

    dy = rng.standard_normal(whole.shape).astype(dtype)
    dx = np.zeros(x.shape)
    for at in np.ndindex(*whole.shape[1:-1]):
        dx[(slice(None), *(a // f for a, f in zip(at, factors, strict=True)))] += dy[(slice(None), *at)]
    close(engine.upsample_backward(dy, factors), dx, dtype)
