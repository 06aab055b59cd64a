"""kernels/pointwise.cu against the NumPy engine in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from tests.cuda.emulator import EmulationError, Emulator, compiler_found
from tests.cuda.kinds import KINDS, assert_close, normal, wide

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
ENGINE = NumpyEngine(np.float64)
FORWARD = {"relu": (), "leaky_relu": (0.1,), "sigmoid": (), "tanh": (1.7,)}
INPUTS = np.dtype([("of", "u8", 8), ("count", "i8")])
RESPONSE = np.dtype(
    [("rows", "i8"), ("held", "i8"), ("channels", "i8"), ("size", "i4"), ("own", "i4"), ("first", "i4")]
    + [(name, "f8") for name in ("alpha", "beta", "k")],
    align=True,
)


def names(kind: str) -> list[str]:
    simple = [f"{op}_{way}" for op in FORWARD for way in ("forward", "backward")]
    simple += ["add_all", "multiply_all", "axpy", "local_response_norm_ratio"]
    unit = {2: "u16", 4: "u32", 8: "uint2"}[np.dtype(KINDS[kind]).itemsize]
    return (
        [f"{name}<{kind}>" for name in simple]
        + [f"local_response_norm_{way}<{kind}, {index}>" for way in ("forward", "backward") for index in ("i32", "i64")]
        + [f"channel_shuffle<{unit}, {index}>" for index in ("i32", "i64")]
        + [f"convert<{kind}, {other}>" for other in KINDS]
    )


@pytest.fixture(
    scope="module",
    params=["float", "__nv_bfloat16", *(pytest.param(k, marks=pytest.mark.slow) for k in ("double", "__half"))],
)
def kernels(request: pytest.FixtureRequest) -> tuple[str, Emulator]:
    return request.param, Emulator("pointwise.cu", names(request.param))


SHAPES = [((1,), (32,)), ((3,), (64,)), ((2,), (256,))]


@pytest.mark.parametrize("op", FORWARD)
@pytest.mark.parametrize("n,at", [(1003, 0), (1000, 3), (5, 0), (0, 0)])
def test_activations(kernels: tuple[str, Emulator], op: str, n: int, at: int) -> None:
    """Also from addresses that allow no 16-byte steps; infinities and NaN included."""
    kind, module = kernels
    memory = normal(0, (n + at,), kind, 3)
    x, dy = memory[at:], normal(1, (n,), kind)
    x[1:4] = [np.nan, np.inf, -np.inf][: max(0, min(3, n - 1))]
    more = [np.float64(v) for v in FORWARD[op]]
    for grid, block in SHAPES:
        y = np.zeros_like(x)
        module.launch(f"{op}_forward<{kind}>", grid, block, [y, x, *more, np.int64(n)])
        assert_close(y, getattr(ENGINE, f"{op}_forward")(wide(x), *FORWARD[op]), kind)
        dx = np.zeros_like(x)
        module.launch(f"{op}_backward<{kind}>", grid, block, [dx, y, dy, *more, np.int64(n)])
        with np.errstate(invalid="ignore"):
            assert_close(dx, getattr(ENGINE, f"{op}_backward")(wide(y), wide(dy), *FORWARD[op]), kind, scale=4)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_sums_and_products(kernels: tuple[str, Emulator], count: int) -> None:
    kind, module = kernels
    xs = [normal(i, (777,), kind) for i in range(count)]
    struct = np.zeros((), INPUTS)
    struct["of"][:count], struct["count"] = [x.ctypes.data for x in xs], count
    for name in ("add", "multiply"):
        y = np.zeros_like(xs[0])
        module.launch(f"{name}_all<{kind}>", (2,), (64,), [y, struct, np.int64(777)])
        assert_close(y, getattr(ENGINE, name)([wide(x) for x in xs]), kind, count)


def test_axpy_has_the_bits_of_numpy(kernels: tuple[str, Emulator]) -> None:
    kind, module = kernels
    x, more, y = normal(0, (501,), kind), normal(1, (501,), kind), np.zeros(501, KINDS[kind])
    module.launch(f"axpy<{kind}>", (2,), (64,), [y, x, more, np.float64(0.3), np.int64(501)])
    if kind in ("float", "double"):
        np.testing.assert_array_equal(y, ENGINE.axpy(0.3, x, more))
    else:
        assert_close(y, 0.3 * wide(x) + wide(more), kind)
    module.launch(f"axpy<{kind}>", (2,), (64,), [y, x, 0, np.float64(0.3), np.int64(501)])
    assert_close(y, 0.3 * wide(x), kind)


@pytest.mark.parametrize("other", KINDS)
def test_conversion_rounds_to_the_nearest(kernels: tuple[str, Emulator], other: str) -> None:
    kind, module = kernels
    x, y = normal(0, (301,), other), np.zeros(301, KINDS[kind])
    module.launch(f"convert<{kind}, {other}>", (1,), (64,), [y, x, np.int64(301)])
    half = kind in ("__half", "__nv_bfloat16")
    np.testing.assert_array_equal(wide(y), wide((x.astype(np.float32) if half else x).astype(KINDS[kind])))


def response(**values: Any) -> np.ndarray:
    struct = np.zeros((), RESPONSE)
    for name, value in values.items():
        struct[name] = value
    return struct


@pytest.mark.parametrize("beta", [0.75, 0.6])
@pytest.mark.parametrize("held,own,first,channels", [(9, 0, -2, 9), (7, 2, 0, 4), (6, 2, 0, 3), (5, 0, -2, 0)])
def test_local_response_norm(
    kernels: tuple[str, Emulator], held: int, own: int, first: int, channels: int, beta: float
) -> None:
    """Whole rows of channels, blocks with ghosts on one or both sides, and an empty block."""
    kind, module = kernels
    x, size = normal(0, (6, held), kind), 5
    y, scale = np.zeros((6, channels), x.dtype), np.zeros((6, channels), x.dtype)
    sizes = response(rows=6, held=held, channels=channels, size=size, own=own, first=first, alpha=0.3, beta=beta, k=2)
    expected = ENGINE.local_response_norm_forward(wide(x), size, own, first, channels, 0.3, beta, 2.0)
    for index in ("i32", "i64"):
        module.launch(f"local_response_norm_forward<{kind}, {index}>", (1,), (64,), [y, scale, x, sizes])
        assert_close(y, expected[0], kind, 8)
        assert_close(scale, expected[1], kind, 8)
    dy, ratio, wider = normal(1, y.shape, kind), np.zeros_like(y), normal(2, (6, held), kind)
    module.launch(f"local_response_norm_ratio<{kind}>", (1,), (64,), [ratio, y, dy, scale, np.int64(y.size)])
    assert_close(ratio, wide(dy) * wide(y) / wide(scale), kind)
    mine, dx = np.ascontiguousarray(x[:, own : own + channels]), np.zeros_like(y)
    module.launch(f"local_response_norm_backward<{kind}, i32>", (1,), (64,), [dx, mine, dy, scale, wider, sizes])
    expected_dx = ENGINE.local_response_norm_backward(
        wide(mine), wide(dy), wide(scale), wide(wider), size, first, 0.3, beta
    )
    assert_close(dx, expected_dx, kind, 8)


@pytest.mark.parametrize("rows,columns", [(3, 5), (4, 4), (1, 7)])
def test_channel_shuffle(kernels: tuple[str, Emulator], rows: int, columns: int) -> None:
    kind, module = kernels
    x = normal(0, (13, rows * columns), kind)
    unit = {2: "u16", 4: "u32", 8: "uint2"}[x.itemsize]
    for index in ("i32", "i64"):
        y = np.zeros_like(x)
        args = [y, x, np.int64(x.size), np.int64(rows), np.int64(columns)]
        module.launch(f"channel_shuffle<{unit}, {index}>", (1,), (64,), args)
        np.testing.assert_array_equal(y, ENGINE.channel_shuffle(x, rows, columns))


def test_beyond_the_limit_of_32_bits() -> None:
    wanted = ["relu_forward<float>", *(f"channel_shuffle<u32, {i}>" for i in ("i32", "i64"))]
    wanted.append("local_response_norm_forward<float, i64>")
    module = Emulator("pointwise.cu", wanted, defines={"EMULATED_INT_LIMIT": 1000})
    x = normal(0, (200, 10))
    y, scale = np.zeros_like(x), np.zeros_like(x)
    module.launch("relu_forward<float>", (5,), (64,), [y, x, np.int64(x.size)])
    np.testing.assert_array_equal(y, ENGINE.relu_forward(x))
    args = [y, x, np.int64(x.size), np.int64(2), np.int64(5)]
    module.launch("channel_shuffle<u32, i64>", (5,), (64,), args)
    np.testing.assert_array_equal(y, ENGINE.channel_shuffle(x, 2, 5))
    with pytest.raises(EmulationError, match="32-bit arithmetic"):
        module.launch("channel_shuffle<u32, i32>", (5,), (64,), args)
    sizes = response(rows=200, held=10, channels=10, size=5, first=-2, alpha=0.3, beta=0.75, k=2)
    module.launch("local_response_norm_forward<float, i64>", (5,), (64,), [y, scale, x, sizes])
    assert_close(y, ENGINE.local_response_norm_forward(x, 5, 0, -2, 10, 0.3, 0.75, 2.0)[0], "float", 8)
