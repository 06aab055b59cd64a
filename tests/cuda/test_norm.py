"""kernels/norm.cu against the NumPy engine in float64."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from tests.cuda.emulator import Emulator, as_launched, compiler_found
from tests.cuda.kinds import KINDS, assert_close, normal, wide

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
ENGINE = NumpyEngine(np.float64)
BLOCK = (256,)
SHAPES = [(700, 3), (301, 16), (97, 72), (1, 5), (5, 1), (600, 1), (0, 4), (40, 530)]


def names(kind: str) -> list[str]:
    other = "double" if kind == "double" else "float"
    return [
        *(f"{name}<{kind}>" for name in ("norm_partials", "column_partials", "column_sums")),
        *("norm_sums", "norm_found", "norm_moments", "norm_running", "norm_invstd", f"norm_backward_sums<{other}>"),
        *(f"norm_apply<{kind}, {other}, {relu}>" for relu in ("true", "false")),
        *(f"norm_backward_partials<{kind}, {relu}>" for relu in ("true", "false")),
        *(f"{name}<{kind}, {other}>" for name in ("norm_backward_data", "bias_add")),
    ]


@pytest.fixture(
    scope="module",
    params=["float", "__nv_bfloat16", *(pytest.param(k, marks=pytest.mark.slow) for k in ("double", "__half"))],
)
def kernels(request: pytest.FixtureRequest) -> tuple[str, Emulator]:
    return request.param, Emulator("norm.cu", names(request.param))


def parameters(kind: str) -> str:
    return "double" if kind == "double" else "float"


def tolerance(kind: str) -> float:
    """Of sums: those of half types are added in float."""
    return 1e-13 if kind == "double" else 4e-6


def i64(*values: int) -> list[np.int64]:
    return [np.int64(v) for v in values]


def sums_of(module: Emulator, kind: str, x: np.ndarray, shift: np.ndarray, chunks: int = 3) -> np.ndarray:
    rows, c = x.shape
    each = -(-rows // chunks)
    partial, sums = np.full((chunks, 2, c), np.nan), np.full((4, c), np.nan)
    module.launch(f"norm_partials<{kind}>", (2, chunks), BLOCK, [partial, x, *i64(rows, c, each)])
    module.launch("norm_sums", (-(-c // 32),), BLOCK, [sums, partial, shift, *i64(rows, c, chunks, each)])
    return sums


@pytest.mark.parametrize(("count", "far"), [(1000, 0.0), (7, 1e4), (1000, 1e4)])
def test_statistics_that_were_found_elsewhere(kernels: tuple[str, Emulator], count: int, far: float) -> None:
    """A float32 mean and 1/sqrt(var + eps), of channels of which the last are constant, not finite and unknown."""
    _, module = kernels
    x, shift = np.random.default_rng(4).normal(far, 2, (count, 40)), np.linspace(-1, 1, 40) + far
    x[:, -3:] = 3, np.inf, np.nan
    with np.errstate(invalid="ignore"):
        mean, var = x.mean(0), x.var(0)
    found = np.stack([mean, 1 / np.sqrt(var + 1e-5)]).astype(np.float32)
    sums, moments = np.full((4, 40), np.nan), np.full((3, 40), np.nan)
    args = np.float64(count), np.float64(1e-5), np.int64(40)
    module.launch("norm_found", (1,), (64,), [sums, moments, *found, shift, *args])
    np.testing.assert_array_equal(moments[:2], found)
    alone = np.full((3, 40), np.nan)
    module.launch("norm_found", (1,), (64,), [0, alone, *found, 0, *args])
    np.testing.assert_array_equal(alone, moments)
    np.testing.assert_allclose(moments[2], var, rtol=1e-6, atol=1e-11)
    again = ENGINE.norm_moments(sums, shift, count, 1e-5)
    np.testing.assert_allclose(again[:, :-2], moments[:, :-2], rtol=1e-12, atol=1e-12)
    assert not np.isfinite(again[0, -2:]).any()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("far", [0.0, 1e3])
def test_statistics(kernels: tuple[str, Emulator], shape: tuple[int, int], far: float) -> None:
    """Moments, also where the mean is far from 0 and from the shift."""
    kind, module = kernels
    far = min(
        far, 100 if "half" in kind else 8 if "bf" in kind else far
    )  # or half types cannot tell the values from each other
    rows, c = shape
    x, shift = normal(0, shape, kind) + KINDS[kind](far), normal(1, (c,), "double")
    sums = sums_of(module, kind, x, shift)
    moments = np.full((3, c), np.nan)
    args = [moments, sums, shift, np.float64(rows), np.float64(1e-5), np.int64(c)]
    module.launch("norm_moments", (1,), (64,), args)
    expected = ENGINE.norm_moments(ENGINE.norm_sums(wide(x), shift), shift, rows, 1e-5)
    np.testing.assert_allclose(moments[0], expected[0], rtol=tolerance(kind), atol=tolerance(kind))
    np.testing.assert_allclose(moments[2], expected[2], rtol=20 * tolerance(kind), atol=tolerance(kind) ** 2)
    if rows > 1:
        np.testing.assert_allclose(moments[1], expected[1], rtol=20 * tolerance(kind))
    mean, var = normal(2, (c,), "double"), normal(3, (c,), "double") ** 2
    sums, running = sums_of(module, kind, x, mean), (mean.copy(), var.copy())
    if rows:
        ENGINE.norm_running(ENGINE.norm_sums(wide(x), mean), *running, 0.3, rows)
        module.launch("norm_running", (1,), (64,), [mean, var, sums, np.float64(0.3), np.float64(rows), np.int64(c)])
        np.testing.assert_allclose(mean, running[0], rtol=tolerance(kind), atol=tolerance(kind))
        np.testing.assert_allclose(var, running[1], rtol=20 * tolerance(kind), atol=tolerance(kind))


def test_sums_of_ranks_are_added(kernels: tuple[str, Emulator]) -> None:
    """Blocks of different sizes about one shift, merged by adding, give the variance of the whole, far from the shift as well."""
    kind, module = kernels
    x = (normal(0, (300, 8), kind) + KINDS[kind](4)).astype(KINDS[kind])
    shift = np.full(8, -1e8)
    sums = sum(sums_of(module, kind, np.ascontiguousarray(part), shift) for part in np.split(x, [10, 150, 280]))
    _, _, var = ENGINE.norm_moments(sums, shift, 300, 1e-9)
    np.testing.assert_allclose(var, wide(x).var(axis=0), rtol=max(1e-9, 20 * tolerance(kind)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plain", [False, True])
def test_apply(kernels: tuple[str, Emulator], shape: tuple[int, int], plain: bool) -> None:
    kind, module = kernels
    (rows, c), p = shape, parameters(kind)
    x, residual = normal(0, shape, kind), normal(1, shape, kind)
    mean, invstd = normal(2, (c,), "double"), 1 + normal(3, (c,), "double") ** 2
    scale, bias = normal(4, (c,), p), normal(5, (c,), p)
    y = np.zeros_like(x)
    if plain:
        args = [y, x, 0, mean, invstd, 0, 0, *i64(rows, c)]
        module.launch(f"norm_apply<{kind}, {p}, false>", (2, 3), BLOCK, args)
        expected = ENGINE.norm_apply(wide(x), mean, invstd, None, None)
    else:
        args = [y, x, residual, mean, invstd, scale, bias, *i64(rows, c)]
        module.launch(f"norm_apply<{kind}, {p}, true>", (2, 3), BLOCK, args)
        expected = ENGINE.norm_relu_forward(wide(x), mean, invstd, scale, bias, wide(residual))
    assert_close(y, expected, kind)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plain", [False, True])
def test_backward(kernels: tuple[str, Emulator], shape: tuple[int, int], plain: bool) -> None:
    kind, module = kernels
    (rows, c), p, chunks = shape, parameters(kind), 2
    x, y, dy, more = (normal(i, shape, kind) for i in range(4))
    mean, invstd, scale = normal(5, (c,), "double"), 1 + normal(6, (c,), "double") ** 2, normal(7, (c,), p)
    partial, sums, g = np.full((chunks, 2, c), np.nan), np.full((2, c), np.nan), np.zeros_like(x)
    each = -(-rows // chunks)
    if plain:
        args = [partial, 0, x, 0, dy, 0, mean, *i64(rows, c, each)]
        module.launch(f"norm_backward_partials<{kind}, false>", (1, chunks), BLOCK, args)
        expected, g = ENGINE.norm_backward_sums(wide(x), wide(dy), mean, invstd), dy
    else:
        args = [partial, g, x, y, dy, more, mean, *i64(rows, c, each)]
        module.launch(f"norm_backward_partials<{kind}, true>", (1, chunks), BLOCK, args)
        assert_close(g, np.where(y > 0, wide(dy) + wide(more), 0), kind)
        expected = ENGINE.norm_backward_sums(wide(x), wide(g), mean, invstd)
    args = [sums, partial, mean, invstd, *i64(c, chunks)]
    module.launch(f"norm_backward_sums<{parameters(kind)}>", (-(-c // 32),), BLOCK, args)
    size = tolerance(kind) * (rows + 1) * invstd.max(initial=0)
    np.testing.assert_allclose(sums, expected, rtol=tolerance(kind), atol=size)

    wider = normal(8, (rows, c + (8 if c % 8 == 0 else 3)), kind)
    for extra, by in ((None, 0), (wider, scale)):
        dx = np.zeros_like(x)
        width = 0 if extra is None else extra.shape[1]
        args = [
            dx,
            x,
            g,
            0 if extra is None else extra,
            mean,
            invstd,
            by,
            expected,
            np.float64(rows + 1),
            *i64(rows, c, width),
        ]
        module.launch(f"norm_backward_data<{kind}, {p}>", (2, 3), BLOCK, args)
        wanted = ENGINE.norm_backward_data(
            wide(x), wide(g), mean, invstd, None if extra is None else scale, expected, rows + 1
        )
        assert_close(dx, wanted + (0 if extra is None else wide(extra)[:, :c]), kind, 8)


def test_gradient_sums_where_the_mean_is_large(kernels: tuple[str, Emulator]) -> None:
    """Deviations are taken from the mean as it is, not from the mean in the type of x."""
    kind, module = kernels
    mean = np.full(8, 1000 + 1 / 3)
    x = (mean + normal(0, (300, 8), "double") * 16).astype(KINDS[kind])
    dy, partial, sums = np.ones((300, 8), x.dtype), np.full((1, 2, 8), np.nan), np.full((2, 8), np.nan)
    args = [partial, 0, x, 0, dy, 0, mean, *i64(300, 8, 300)]
    module.launch(f"norm_backward_partials<{kind}, false>", (1, 1), BLOCK, args)
    module.launch(f"norm_backward_sums<{parameters(kind)}>", (1,), BLOCK, [sums, partial, mean, np.ones(8), *i64(8, 1)])
    np.testing.assert_allclose(sums[1], (wide(x) - mean).sum(axis=0), atol=5e-4)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_per_channel(kernels: tuple[str, Emulator], groups: int, shape: tuple[int, int]) -> None:
    """The gradient of a bias (one group), and sums over space (a group per sample)."""
    kind, module = kernels
    (rows, c), chunks = shape, 2
    x = normal(0, (groups, rows, c), kind)
    partial, out = np.full((groups, chunks, c), np.nan), np.zeros((groups, c), x.dtype)
    args = [partial, x, *i64(groups, rows, c, -(-rows // chunks))]
    module.launch(f"column_partials<{kind}>", (1, chunks, min(groups, 2)), BLOCK, args)
    args = [out, partial, np.float64(0.5), *i64(groups, c, chunks)]
    module.launch(f"column_sums<{kind}>", (-(-c // 32), 1, min(groups, 2)), BLOCK, args)
    assert_close(out, ENGINE.spatial_sum(wide(x), 0.5), kind, scale=rows)


@pytest.mark.parametrize("shape", SHAPES)
def test_bias(kernels: tuple[str, Emulator], shape: tuple[int, int]) -> None:
    kind, module = kernels
    x, b = normal(0, shape, kind), normal(1, shape[1:], parameters(kind))
    expected = wide(x) + b
    module.launch(f"bias_add<{kind}, {parameters(kind)}>", (1, 2), BLOCK, [x, x, b, *i64(*shape)])
    assert_close(x, expected, kind)


def test_invstd(kernels: tuple[str, Emulator]) -> None:
    var, out = normal(0, (37,), "double") ** 2, np.zeros(37)
    kernels[1].launch("norm_invstd", (1,), (32,), [out, var, np.float64(1e-3), np.int64(37)])
    np.testing.assert_allclose(out, 1 / np.sqrt(var + 1e-3), rtol=1e-15)


def test_nan_and_infinity_reach_the_statistics(kernels: tuple[str, Emulator]) -> None:
    kind, module = kernels
    x = normal(0, (300, 8), kind)
    x[7, 2], x[250, 5] = np.nan, np.inf
    sums = sums_of(module, kind, x, np.zeros(8))
    bad = ~np.isfinite(sums).all(axis=0)
    np.testing.assert_array_equal(np.flatnonzero(bad), [2, 5])


def test_beyond_the_limit_of_32_bits() -> None:
    x, shift = normal(0, (1000, 8)), np.zeros(8)

    def check(module: Emulator) -> None:
        sums = sums_of(module, "float", x, shift)
        np.testing.assert_allclose(sums[0] + sums[1], wide(x).sum(axis=0), atol=1e-2)
        for test, shape in ((test_apply, (1000, 8)), (test_backward, (1000, 3))):
            test(("float", module), shape, False)
        test_sums_per_channel(("float", module), 3, (1000, 8))
        test_bias(("float", module), (1000, 3))

    as_launched("norm.cu", names("float"), check, defines={"EMULATED_INT_LIMIT": 2000})
