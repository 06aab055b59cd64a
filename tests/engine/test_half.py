"""Activations of bfloat16 beside parameters of float32: the engines of the host against float64, and against each other."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.base import LocalWindow
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.onednn import cdef
from lbpar.engine.onednn.engine import SLAB
from lbpar.engine.registry import get_engine
from lbpar.errors import EngineError

ml_dtypes = pytest.importorskip("ml_dtypes")
BF16 = np.dtype(ml_dtypes.bfloat16)
EPSILON = float(ml_dtypes.finfo(BF16).eps) / 2
"""What rounding once changes of a number, at most."""
REFERENCE = NumpyEngine(np.float64)
SAME, STRIDED, PATCH = ((LocalWindow(3, pad=1),), (LocalWindow(3, 2, 1, 1),), (LocalWindow(2, 2),))
"""A dimension of a window."""


@pytest.fixture(params=["numpy", "onednn", "onednn, not compiled"])
def engine(request, monkeypatch):
    name, _, plain = request.param.partition(",")
    if plain:
        monkeypatch.setenv("LBPAR_NATIVE", "0")
    try:
        return get_engine(name, "bfloat16", 1)
    except EngineError as error:
        pytest.skip(str(error))


def low(rng, *shape):
    return rng.standard_normal(shape).astype(BF16)


def rounded(w):
    return w.astype(BF16).astype(np.float64)


def wide(a):
    if isinstance(a, (list, tuple)):
        return [wide(b) for b in a]
    return a.astype(np.float64) if isinstance(a, np.ndarray) and a.dtype in (BF16, np.float32) else a


def check(engine, name, *args, like=BF16, terms=1, weights=False):
    """A method's first result, in its type, as close to float64 as one rounding of the result and float32 sums of so many terms are."""
    kept = list(map(wide, args))
    if weights:
        kept[1] = rounded(args[1])
    got, want = getattr(engine, name)(*args), getattr(REFERENCE, name)(*kept)
    got, want = (a[0] if isinstance(a, tuple) else a for a in (got, want))
    assert got.dtype == like and got.shape == want.shape and got.flags.c_contiguous
    found, scale = got.astype(np.float64), np.abs(want).max(initial=0)
    rounding = EPSILON * np.abs(want) * 1.01 if like == BF16 else 0
    assert (np.abs(found - want) <= rounding + 1e-6 * (1 + terms**0.5) * scale).all(), name
    return got


CONVS = [
    ((9, 8), SAME * 2, (9, 8), 32, 16, 1),
    ((9, 7), STRIDED * 2, (5, 4), 3, 8, 1),
    ((5, 6), SAME * 2, (5, 6), 8, 8, 8),
    ((5, 4, 7), SAME * 3, (5, 4, 7), 16, 24, 1),
    ((6, 4, 8), PATCH * 3, (3, 2, 4), 5, 16, 1),
    ((5, 4, 3), (LocalWindow(1),) * 3, (5, 4, 3), 17, 3, 1),
    ((1, 2, 3), SAME * 3, (1, 2, 3), 16, 16, 1),
    ((7,), (LocalWindow(3, 1, 2, -1),), (2,), 4, 6, 2),
]


@pytest.mark.parametrize("case", CONVS, ids=lambda c: "x".join(map(str, c[0])) + f" {c[3]} to {c[4]}")
@pytest.mark.parametrize("slab", [None, 64])
def test_convolutions(engine, monkeypatch, case, slab):
    inner, win, outer, c, f, groups = case
    if slab is not None:
        if engine.name == "numpy":
            pytest.skip("has no slabs")
        monkeypatch.setitem(SLAB, cdef.BF16, slab)
    rng = np.random.default_rng(1)
    x, dy = low(rng, 2, *inner, c), low(rng, 2, *outer, f)
    w, b = (rng.standard_normal(s).astype(np.float32) for s in ((f, *(d.kernel for d in win), c // groups), (f,)))
    taps = w[0].size
    check(engine, "conv_forward", x, w, b, win, groups, outer, terms=taps, weights=True)
    check(engine, "conv_relu_forward", x, w, None, win, groups, outer, terms=taps, weights=True)
    check(engine, "conv_backward_data", dy, w, win, groups, inner, terms=taps, weights=True)
    check(engine, "conv_backward_weights", x, dy, win, groups, like=np.float32, terms=dy.size)
    db = engine.conv_backward_weights_bias(x, dy, win, groups)[1]
    assert db.dtype == np.float32
    np.testing.assert_allclose(db, wide(dy).sum(axis=tuple(range(dy.ndim - 1))), rtol=1e-6, atol=1e-6)


def test_linear_layers(engine):
    rng = np.random.default_rng(2)
    x, dy = low(rng, 5, 33), low(rng, 5, 7)
    w, b = (rng.standard_normal(s).astype(np.float32) for s in ((7, 33), (7,)))
    check(engine, "linear_forward", x, w, b, terms=33, weights=True)
    check(engine, "linear_backward_data", dy, w, terms=7, weights=True)
    check(engine, "linear_backward_weights", x, dy, like=np.float32, terms=5)


@pytest.mark.parametrize("shape", [(5, 3), (2, 7, 5, 4), (3, 40, 50, 32)])
def test_rows(engine, shape):
    """Normalisation, activations and sums; the third shape is shared out in pieces."""
    rng = np.random.default_rng(3)
    c = shape[-1]
    x, dy, y, z = (low(rng, *shape) for _ in range(4))
    mean, invstd, sums = rng.standard_normal(c), 0.5 + rng.random(c), rng.standard_normal((2, c))
    scale, bias = (rng.standard_normal(c).astype(np.float32) for _ in range(2))
    got, want = engine.norm_sums(x, mean), REFERENCE.norm_sums(wide(x), mean)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-4)
    check(engine, "norm_apply", x, mean, invstd, scale, bias, terms=9)
    check(engine, "norm_relu_forward", x, mean, invstd, scale, None, z, terms=9)
    check(engine, "norm_backward_data", x, dy, mean, invstd, scale, sums, 7.0, terms=9)
    check(engine, "norm_backward_data_add", x, dy, mean, invstd, scale, sums, 7.0, z, terms=9)
    check(engine, "norm_backward_sums", x, dy, mean, invstd, like=np.float64, terms=9)
    found, masked = engine.norm_relu_backward_sums(x, y, dy, mean, invstd)
    assert masked.dtype == BF16
    np.testing.assert_array_equal(wide(masked), np.where(wide(y) > 0, wide(dy), 0))
    np.testing.assert_allclose(
        found, REFERENCE.norm_backward_sums(wide(x), wide(masked), mean, invstd), rtol=1e-5, atol=1e-3
    )
    for name, *args in (
        ("relu_forward", x),
        ("relu_backward", y, dy),
        ("leaky_relu_forward", x, 0.1),
        ("sigmoid_forward", x),
        ("tanh_backward", y, dy, 1.0),
        ("add", [x, y]),
        ("add", [x, y, z]),
        ("multiply", [x, y]),
        ("multiply_backward", dy, [x, y], 1),
        ("concat", [x, y]),
        ("softmax_max", x),
        ("bias_add", x.copy(), bias),
    ):
        check(engine, name, *args, terms=9)
    check(engine, "bias_backward", dy, like=np.float32, terms=9)


@pytest.mark.parametrize("case", [((4, 6), 2, 2), ((9, 8), 3, 2), ((4, 6, 8), 2, 2), ((3, 2, 14), 7, 7)], ids=str)
def test_pooling(engine, case):
    """Also where windows overlap, and where one is larger than its input, whose gradients oneDNN loses in volumes."""
    inner, kernel, stride = case
    rng = np.random.default_rng(4)
    win, outer = (LocalWindow(kernel, stride),) * len(inner), tuple(-(-n // stride) for n in inner)
    x, dy = low(rng, 2, *inner, 8), low(rng, 2, *outer, 8)
    check(engine, "max_pool_forward", x, win, outer)
    arg, wanted = engine.max_pool_forward(x, win, outer)[1], REFERENCE.max_pool_forward(wide(x), win, outer)[1]
    dx = engine.max_pool_backward(dy, arg, win, inner)
    want = REFERENCE.max_pool_backward(wide(dy), wanted, win, inner)
    np.testing.assert_allclose(wide(dx), want, rtol=1.01 * EPSILON, atol=1e-6)
    divisors = [np.full(n, float(kernel)) for n in outer]
    check(engine, "avg_pool_forward", x, win, outer, divisors, terms=kernel)
    check(engine, "avg_pool_backward", dy, win, inner, divisors, terms=kernel)
    bad = x.copy()
    bad[0, 0, 0] = np.nan
    assert np.isnan(wide(engine.max_pool_forward(bad, win, outer)[0])).any()
    bad[:] = -np.inf
    assert (wide(engine.max_pool_forward(bad, win, outer)[0]) == -np.inf).all()


def test_infinite_and_tiny_values_are_rounded_as_they_should(engine):
    """To the nearest, and of two the even one; what is too large for bfloat16 becomes infinite, NaN stays."""
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-16, 3.4e38, np.inf, -np.inf, np.nan, -0.0], np.float32)
    a, b = np.zeros((1, 8), BF16), np.ones((1, 8), BF16)
    got = engine.norm_apply(a, np.zeros(8), np.ones(8), None, values)
    np.testing.assert_array_equal(wide(got)[0], [1, 1 + 2**-6, 1 + 2**-7, np.inf, np.inf, -np.inf, np.nan, 0])
    assert wide(engine.add([b, (b / 256).astype(BF16)]))[0, 0] == 1


def test_results_arrive_as_float32(engine):
    got = engine.to_host(np.ones((2, 3), BF16))
    assert got.dtype == np.float32 and (got == 1).all()
