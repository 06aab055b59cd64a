"""Compiled softmax and losses against the NumPy reference in float64: class counts, tiles, threads, special numbers."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.native import passes as native
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.registry import get_engine
from lbpar.errors import EngineError

REFERENCE = NumpyEngine(np.float64)
SHAPES = [(1,), (7,), (3, 5, 41)]
CLASSES = [1, 2, 3, 4, 5, 10, 31, 33, 300, 600, 1000]


def make(threads: int):
    try:
        engine = get_engine("onednn", "float32", threads)
    except EngineError as error:
        pytest.skip(str(error))
    if engine.native is None:
        pytest.skip("no C compiler")
    return engine


@pytest.fixture(params=[1, 3])
def engine(request, monkeypatch):
    """However small the arrays, all threads work on them."""
    monkeypatch.setattr(native, "SMALL", 0)
    return make(request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def same(got, want, tolerance=1e-12):
    """Equal up to rounding, NaN and infinities included; float32 results have float32's."""
    tolerance = tolerance if got.dtype == np.float64 else 2e-7
    assert got.shape == want.shape
    assert got.flags.c_contiguous
    finite = want[np.isfinite(want)]
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(finite).max(initial=0))


def every_step(engine, x, target, start, smoothing, total):
    """All passes on one block of classes [start, start + C) of C + 5; m, sums and so on as other blocks would leave them."""
    classes = x.shape[-1] + 5
    m = engine.softmax_max(x)
    out = {"m": m}
    m = (m.astype(np.float32) + np.float32(0.25)).astype(x.dtype)  # a block elsewhere has a larger one
    out["sums"] = engine.softmax_sums(x, m, target, start)
    sums = out["sums"] + 0.5
    out["rank"] = engine.softmax_rank(x, m, sums, target, start)
    out["dx"] = engine.cross_entropy_backward(x, m, sums, target, start, smoothing, classes, 0.3)
    out["dice_sums"] = engine.dice_sums(x, m, sums, target, start)
    out["g"], out["inner"] = engine.dice_backward(x, m, sums, target, start, total, 0.7, classes)
    g = out["g"].astype(np.float32).astype(x.dtype)
    out["dice_dx"] = engine.dice_backward_data(x, m, sums, g, out["inner"])
    return out


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(engine, rng, shape, classes):
    x = (4 * rng.standard_normal((*shape, classes))).astype(np.float32)
    total = 1 + rng.random((3, classes))
    for start, smoothing in ((0, 0.1), (3, 0.0)):
        target = rng.integers(0, classes + 5, shape)  # some are in other blocks, on either side
        got = every_step(engine, x, target, start, smoothing, total)
        want = every_step(REFERENCE, x.astype(np.float64), target, start, smoothing, total)
        for name, value in want.items():
            same(got[name], value)


@pytest.mark.parametrize("classes", [2, 3, 10, 40])
def test_special_logits_behave_as_in_the_reference(engine, rng, classes):
    x = rng.standard_normal((60, classes)).astype(np.float32)
    x[3, 1] = -np.inf
    x[5] = -np.inf
    x[7, 0] = np.inf
    x[11, 0] = np.nan
    x[13, -1] = np.nan
    x[17, 0], x[17, 1] = np.nan, np.inf
    x[19, 0], x[19, 1] = 3e38, -3e38
    x[23, 0] = 2000
    target = rng.integers(0, classes, 60)
    total = 1 + rng.random((3, classes))
    with np.errstate(all="ignore"):
        got = every_step(engine, x, target, 0, 0.0, total)
        want = every_step(REFERENCE, x.astype(np.float64), target, 0, 0.0, total)
    for name, value in want.items():
        same(got[name], value)


def test_exponentials_over_their_whole_range(engine):
    x = np.linspace(-745, 709, 20011, dtype=np.float32)[:, None]
    got = engine.softmax_sums(x, np.zeros(20011, np.float32), np.zeros(20011, int), 0)[0]
    want = np.exp(x[:, 0].astype(np.float64))
    normal = x[:, 0] >= -708
    np.testing.assert_allclose(got[normal], want[normal], rtol=3e-14)
    assert (got[~normal] == 0).all()  # what is there instead is below 1e-307


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_targets_of_any_integer_type(engine, rng, dtype):
    x = rng.standard_normal((50, 6)).astype(np.float32)
    target = rng.integers(0, 9, (50, 2)).astype(dtype)[:, 0]  # not contiguous either
    total = np.ones((3, 6))
    got = every_step(engine, x, target, 2, 0.1, total)
    want = every_step(REFERENCE, x.astype(np.float64), target, 2, 0.1, total)
    for name, value in want.items():
        same(got[name], value)


def test_arrays_that_the_passes_do_not_take(engine, rng):
    wide = rng.standard_normal((50, 12)).astype(np.float32)
    target, total = rng.integers(0, 6, 50), np.ones((3, 6))
    got = every_step(engine, wide[:, ::2], target, 0, 0.1, total)
    want = every_step(REFERENCE, wide[:, ::2].astype(np.float64), target, 0, 0.1, total)
    for name, value in want.items():
        same(np.ascontiguousarray(got[name]), value, 1e-6)


@pytest.mark.parametrize("shape", [(1,), (13, 1), (3, 5, 41, 7)])
def test_element_losses(engine, rng, shape):
    x, t = (30 * rng.standard_normal(shape)).astype(np.float32), rng.random(shape).astype(np.float32)
    if x.size > 20:
        x.flat[:9] = 0, -0.0, 2000, -2000, 1e-30, 700, -700, 90, -90
    compare_element_losses(engine, x, t)


def test_element_losses_of_special_numbers(engine):
    for value in (np.nan, np.inf, -np.inf):
        x = np.array([0.5, value, -1], np.float32)
        for t in (0, 1, 0.5):
            with np.errstate(all="ignore"):
                compare_element_losses(engine, x, np.full(3, t, np.float32))


def compare_element_losses(engine, x, t):
    for loss in ("mse", "bce"):
        got = getattr(engine, f"{loss}_loss")(x, t, 0.3)
        want = getattr(REFERENCE, f"{loss}_loss")(x.astype(np.float64), t.astype(np.float64), 0.3)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=1e-12)
        dx = getattr(engine, f"{loss}_backward")(x, t, 0.3)
        want = getattr(REFERENCE, f"{loss}_backward")(x.astype(np.float64), t.astype(np.float64), 0.3)
        assert dx.dtype == np.float32
        np.testing.assert_allclose(dx, want, rtol=2e-7, atol=1e-38)


def test_small_losses_keep_their_digits(engine):
    """log(1 + exp(-z)) of a confident, right answer, summed in double."""
    x = np.full(5, 40, np.float32)
    np.testing.assert_allclose(engine.bce_loss(x, np.ones(5, np.float32), 1.0), 5 * np.log1p(np.exp(-40.0)), rtol=1e-12)
