"""kernels/sample_norm.cu against the NumPy engine in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lbpar.engine.cupy.sample_norms import _groups
from lbpar.engine.numpy_engine import NumpyEngine
from tests.cuda.emulator import EmulationError, Emulator, compiler_found
from tests.cuda.kinds import KINDS, assert_close, normal, wide

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
ENGINE = NumpyEngine(np.float64)
BLOCK = (256,)
# rows, positions, groups, channels of a group
SHAPES = [(3, 50, 4, 1), (2, 7, 3, 5), (5, 1, 1, 33), (1, 600, 2, 2), (2, 4, 0, 1), (0, 3, 2, 2), (2, 0, 2, 2)]


def names(kind: str) -> list[str]:
    p = "double" if kind == "double" else "float"
    sums = [f"sample_norm_sums<{kind}, {w}>" for w in (32, 256)]
    sums += [f"sample_norm_backward_sums<{kind}, {p}, {w}>" for w in (32, 256)]
    each = [f"sample_norm_{n}<{kind}, {p}, {i}>" for n in ("apply", "backward_data") for i in ("i32", "i64")]
    return [*sums, f"sample_norm_scale_partials<{kind}>", *each]


@pytest.fixture(
    scope="module",
    params=["float", "__nv_bfloat16", *(pytest.param(k, marks=pytest.mark.slow) for k in ("double", "__half"))],
)
def kernels(request: pytest.FixtureRequest) -> tuple[str, Emulator]:
    return request.param, Emulator("sample_norm.cu", names(request.param))


def given(shape: tuple[int, ...], kind: str) -> tuple[Any, ...]:
    rows, _, groups, width = shape
    p = "double" if kind == "double" else "float"
    x, dy = normal(0, shape, kind, 2), normal(1, shape, kind)
    mean, invstd = normal(2, (rows, groups), "double"), 1 + np.abs(normal(3, (rows, groups), "double"))
    return x, dy, mean, invstd, normal(4, (groups, width), p), normal(5, (groups, width), p)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [32, 256])
def test_sums(kernels: tuple[str, Emulator], shape: tuple[int, ...], width: int) -> None:
    (kind, module), (rows, _, groups, _) = kernels, shape
    x, dy, mean, invstd, scale, _ = given(shape, kind)
    x = (x + 100).astype(x.dtype)
    p = "double" if kind == "double" else "float"
    sums, back = np.full((4, rows, groups), np.nan), np.full((2, rows, groups), np.nan)
    module.launch(f"sample_norm_sums<{kind}, {width}>", (2,), BLOCK, [sums, x, _groups(x)])
    np.testing.assert_allclose(sums[::2] + sums[1::2], _whole(ENGINE.sample_norm_sums(wide(x))), rtol=1e-13)
    for weight in (scale, None):
        args = [back, x, dy, mean, invstd, 0 if weight is None else weight, _groups(x)]
        module.launch(f"sample_norm_backward_sums<{kind}, {p}, {width}>", (3,), BLOCK, args)
        expected = ENGINE.sample_norm_backward_sums(wide(x), wide(dy), mean, invstd, weight)[0]
        np.testing.assert_allclose(back, expected, rtol=1e-12, atol=1e-10)


def _whole(sums: np.ndarray) -> np.ndarray:
    return sums[::2] + sums[1::2]


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_scale_and_bias(kernels: tuple[str, Emulator], shape: tuple[int, ...]) -> None:
    (kind, module), (rows, positions, groups, width), chunks = kernels, shape, 3
    x, dy, mean, invstd, scale, _ = given(shape, kind)
    partial = np.full((2, chunks, groups * width), np.nan)
    args = [partial, x, dy, mean, invstd, _groups(x), np.int64(max(1, -(-rows * positions // chunks)))]
    module.launch(f"sample_norm_scale_partials<{kind}>", (2, chunks), BLOCK, args)
    exact = scale.astype(np.float64)
    _, dscale, dbias = ENGINE.sample_norm_backward_sums(wide(x), wide(dy), mean, invstd, exact)
    for got, want in zip(partial.sum(axis=1), (dbias, dscale), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_each_element(kernels: tuple[str, Emulator], shape: tuple[int, ...], affine: bool) -> None:
    kind, module = kernels
    x, dy, mean, invstd, scale, bias = given(shape, kind)
    p, units = "double" if kind == "double" else "float", mean.shape
    sums, sizes = normal(6, (2, *units), "double"), _groups(x, 12.0)
    some, more = ((scale, bias), [scale, bias]) if affine else ((None, None), [0, 0])
    for index in ("i32", "i64"):
        y, dx = np.zeros_like(x), np.zeros_like(x)
        args = [y, x, mean, invstd, *more, sizes]
        module.launch(f"sample_norm_apply<{kind}, {p}, {index}>", (2,), BLOCK, args)
        assert_close(y, ENGINE.sample_norm_apply(wide(x), mean, invstd, *some), kind, 8)
        args = [dx, x, dy, mean, invstd, sums, more[0], sizes]
        module.launch(f"sample_norm_backward_data<{kind}, {p}, {index}>", (2,), BLOCK, args)
        want = ENGINE.sample_norm_backward_data(12.0, wide(x), wide(dy), mean, invstd, sums, some[0])
        assert_close(dx, want, kind, 8)


def test_beyond_the_limit_of_32_bits() -> None:
    chosen = [f"sample_norm_apply<float, float, {index}>" for index in ("i32", "i64")] + ["sample_norm_sums<float, 32>"]
    module = Emulator("sample_norm.cu", chosen, defines={"EMULATED_INT_LIMIT": 1000})
    x, _, mean, invstd, scale, bias = given((4, 60, 2, 5), "float")
    y, sums = np.zeros_like(x), np.full((4, 4, 2), np.nan)
    args = [y, x, mean, invstd, scale, bias, _groups(x)]
    module.launch("sample_norm_apply<float, float, i64>", (2,), BLOCK, args)
    assert_close(y, ENGINE.sample_norm_apply(wide(x), mean, invstd, scale, bias), "float", 8)
    with pytest.raises(EmulationError, match="32-bit arithmetic"):
        module.launch("sample_norm_apply<float, float, i32>", (2,), BLOCK, args)
    module.launch("sample_norm_sums<float, 32>", (2,), BLOCK, [sums, x, _groups(x)])
    np.testing.assert_allclose(_whole(sums), _whole(ENGINE.sample_norm_sums(wide(x))), rtol=1e-13)
    assert KINDS["float"] is x.dtype.type
