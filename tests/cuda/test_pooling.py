"""kernels/pooling.cu against the NumPy engine in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lbpar.engine.base import LocalWindow, Window
from lbpar.engine.numpy_engine import NumpyEngine
from tests.cuda.emulator import EmulationError, Emulator, compiler_found
from tests.cuda.kinds import KINDS, assert_close, normal, wide

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
ENGINE = NumpyEngine(np.float64)
POOL = np.dtype(
    [("batch", "i8"), ("channels", "i8"), *((name, "i8", 3) for name in ("in", "out", "pad"))]
    + [(name, "i4", 3) for name in ("kernel", "stride", "dilation")],
    align=True,
)
UPSAMPLE = np.dtype(
    [("batch", "i8"), ("channels", "i8"), *((name, "i8", 3) for name in ("in", "out", "offset")), ("factor", "i4", 3)],
    align=True,
)
GRID, BLOCK = (3,), (64,)


def names(kind: str, index: str = "i32") -> list[str]:
    pools = [
        f"max_pool_{way}<{kind}, {arg}, {index}>" for way in ("forward", "backward") for arg in ("signed char", "int")
    ]
    simple = ("avg_pool_forward", "avg_pool_backward", "spatial_broadcast", "upsample_forward", "upsample_backward")
    return pools + [f"{name}<{kind}, {index}>" for name in simple]


@pytest.fixture(
    scope="module",
    params=["float", "__nv_bfloat16", *(pytest.param(k, marks=pytest.mark.slow) for k in ("double", "__half"))],
)
def kernels(request: pytest.FixtureRequest) -> tuple[str, Emulator]:
    return request.param, Emulator("pooling.cu", names(request.param))


def three(values: Sequence[int], missing: int) -> list[int]:
    return [missing] * (3 - len(values)) + list(values)


def sizes(x_shape: Sequence[int], win: Window, out: Sequence[int]) -> np.ndarray:
    struct = np.zeros((), POOL)
    struct["batch"], struct["channels"] = x_shape[0], x_shape[-1]
    struct["in"], struct["out"] = three(x_shape[1:-1], 1), three(out, 1)
    for name, missing in (("pad", 0), ("kernel", 1), ("stride", 1), ("dilation", 1)):
        struct[name] = three([getattr(w, name) for w in win], missing)
    return struct


W = LocalWindow
CASES: list[tuple[tuple[int, ...], Window, tuple[int, ...]]] = [
    ((2, 9, 8, 3), (W(3, 2, 1, 1), W(2, 2)), (5, 4)),
    ((1, 7, 6, 5, 8), (W(3, 1, 2, 2), W(2, 2, 1, -1), W(3, 3, 1, 0)), (7, 3, 2)),
    ((3, 11, 4), (W(4, 3, 2, 5),), (9,)),  # windows that hold nothing at both ends
    ((2, 5, 5, 16), (W(3, 1, 1, 1), W(3, 1, 1, 0)), (5, 3)),
    ((2, 0, 5, 4), (W(2, 1, 1, 1), W(2)), (1, 4)),
    ((2, 4, 4, 0), (W(2), W(2)), (3, 3)),
    ((0, 4, 4, 2), (W(2), W(2)), (3, 3)),
    ((2, 4, 4, 2), (W(2), W(2)), (0, 3)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("arg", ["signed char", "int"])
@pytest.mark.parametrize("bad", [False, True])
def test_max(kernels: tuple[str, Emulator], case: Any, arg: str, bad: bool) -> None:
    """Few different values, so that the first of equal ones counts; NaN and -inf among them."""
    (kind, module), (shape, win, out) = kernels, case
    x = np.random.default_rng(0).integers(-3, 3, shape).astype(KINDS[kind])
    if bad and x.size:
        x.reshape(-1)[::7], x.reshape(-1)[1::5] = np.nan, -np.inf
    y = np.zeros((shape[0], *out, shape[-1]), x.dtype)
    which = np.full(y.shape, 99, np.int8 if arg == "signed char" else np.int32)
    s = sizes(shape, win, out)
    module.launch(f"max_pool_forward<{kind}, {arg}, i32>", GRID, BLOCK, [y, which, x, s])
    expected, number = ENGINE.max_pool_forward(wide(x), win, out)
    np.testing.assert_array_equal(wide(y), expected)
    np.testing.assert_array_equal(which, number)
    dy, dx = normal(1, y.shape, kind), np.full_like(x, 99)
    module.launch(f"max_pool_backward<{kind}, {arg}, i32>", GRID, BLOCK, [dx, dy, which, s])
    assert_close(dx, ENGINE.max_pool_backward(wide(dy), number, win, shape[1:-1]), kind)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_avg(kernels: tuple[str, Emulator], case: Any) -> None:
    (kind, module), (shape, win, out) = kernels, case
    x, s = normal(0, shape, kind), sizes(shape, win, out)
    divisors = [np.random.default_rng(i).integers(0, 4, n).astype(np.float64) for i, n in enumerate(out)]
    factors = np.concatenate([np.ones(3 - len(out)), *(np.where(d > 0, 1 / np.maximum(d, 1), 0) for d in divisors)])
    factors = factors.astype(np.float64 if kind == "double" else np.float32)
    y = np.full((shape[0], *out, shape[-1]), 99, x.dtype)
    module.launch(f"avg_pool_forward<{kind}, i32>", GRID, BLOCK, [y, x, factors, s])
    assert_close(y, ENGINE.avg_pool_forward(wide(x), win, out, divisors), kind)
    dy, dx = normal(1, y.shape, kind), np.full_like(x, 99)
    module.launch(f"avg_pool_backward<{kind}, i32>", GRID, BLOCK, [dx, dy, factors, s])
    assert_close(dx, ENGINE.avg_pool_backward(wide(dy), win, shape[1:-1], divisors), kind)


@pytest.mark.parametrize("shape", [(2, 5, 3), (3, 4, 5, 8), (2, 0, 3), (1, 2, 2, 2, 5)])
def test_broadcast(kernels: tuple[str, Emulator], shape: tuple[int, ...]) -> None:
    kind, module = kernels
    dy, dx = normal(0, (shape[0], shape[-1]), kind), np.full(shape, 99, KINDS[kind])
    positions = np.int64(np.prod(shape[1:-1]))
    args = [dx, dy, np.float64(0.3), np.int64(shape[0]), positions, np.int64(shape[-1])]
    module.launch(f"spatial_broadcast<{kind}, i32>", GRID, BLOCK, args)
    assert_close(dx, ENGINE.spatial_broadcast(wide(dy), shape[1:-1], 0.3), kind)


def upsample_sizes(
    shape: Sequence[int], out: Sequence[int], factors: Sequence[int], offsets: Sequence[int]
) -> np.ndarray:
    struct = np.zeros((), UPSAMPLE)
    struct["batch"], struct["channels"] = shape[0], shape[-1]
    struct["in"], struct["out"], struct["offset"] = three(shape[1:-1], 1), three(out, 1), three(offsets, 0)
    struct["factor"] = three(factors, 1)
    return struct


@pytest.mark.parametrize(
    "shape,factors,out,offsets",
    [
        ((2, 3, 4, 5), (2, 3), (5, 9), (1, 2)),
        ((1, 3, 2, 2, 8), (2, 1, 3), (6, 2, 6), (0, 0, 0)),
        ((2, 4, 3), (3,), (0,), (1,)),
    ],
)
def test_upsample(kernels: tuple[str, Emulator], shape: Any, factors: Any, out: Any, offsets: Any) -> None:
    kind, module = kernels
    x, y = normal(0, shape, kind), np.full((shape[0], *out, shape[-1]), 99, KINDS[kind])
    module.launch(f"upsample_forward<{kind}, i32>", GRID, BLOCK, [y, x, upsample_sizes(shape, out, factors, offsets)])
    np.testing.assert_array_equal(y, ENGINE.upsample_forward(x, factors, out, offsets))
    whole = [n * f for n, f in zip(shape[1:-1], factors, strict=True)]
    dy, dx = normal(1, (shape[0], *whole, shape[-1]), kind), np.full_like(x, 99)
    args = [dx, dy, upsample_sizes(shape, whole, factors, [0] * len(whole))]
    module.launch(f"upsample_backward<{kind}, i32>", GRID, BLOCK, args)
    assert_close(dx, ENGINE.upsample_backward(wide(dy), factors), kind)


def test_beyond_the_limit_of_32_bits() -> None:
    backward = [f"max_pool_backward<float, signed char, {index}>" for index in ("i32", "i64")]
    chosen = ["max_pool_forward<float, signed char, i64>", *backward, "spatial_broadcast<float, i64>"]
    module = Emulator("pooling.cu", chosen, defines={"EMULATED_INT_LIMIT": 2000})
    shape, win, out = (2, 30, 20, 3), (W(3, 2, 1, 1), W(2, 1)), (15, 19)
    x, s = normal(0, shape), sizes(shape, win, out)
    y, which = np.zeros((2, 15, 19, 3), np.float32), np.zeros((2, 15, 19, 3), np.int8)
    module.launch("max_pool_forward<float, signed char, i64>", GRID, BLOCK, [y, which, x, s])
    np.testing.assert_array_equal(y, ENGINE.max_pool_forward(x, win, out)[0])
    dx = np.zeros_like(x)
    module.launch("max_pool_backward<float, signed char, i64>", GRID, BLOCK, [dx, y, which, s])
    assert_close(dx, ENGINE.max_pool_backward(wide(y), which, win, shape[1:-1]), "float")
    with pytest.raises(EmulationError, match="32-bit arithmetic"):
        module.launch("max_pool_backward<float, signed char, i32>", GRID, BLOCK, [dx, y, which, s])
    args = [dx, x[:, 0, 0].copy(), np.float64(1), *(np.int64(n) for n in (2, 600, 3))]
    module.launch("spatial_broadcast<float, i64>", GRID, BLOCK, args)
    np.testing.assert_array_equal(dx[1, -1, -1], x[1, 0, 0])
