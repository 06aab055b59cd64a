"""kernels/softmax.cu and losses.cu against the NumPy engine in float64."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from tests.cuda.emulator import Emulator, as_launched, compiler_found
from tests.cuda.kinds import ALL_KINDS, KINDS, assert_close, normal, wide

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
ENGINE = NumpyEngine(np.float64)
WIDTHS = (1, 8, 32)
BLOCK = (256,)
BLOCKS = 2
SHAPES = [(300, 3), (41, 17), (7, 100), (1, 1), (0, 5), (5, 0)]


def softmax_names(kind: str) -> list[str]:
    return [f"softmax_{n}<{kind}, {w}>" for n in ("max", "denominator", "forward", "inner", "backward") for w in WIDTHS]


def losses_names(kind: str) -> list[str]:
    rows = [
        f"{n}<{kind}, i64, {w}>" for n in ("softmax_sums", "softmax_rank", "cross_entropy_backward") for w in WIDTHS
    ]
    plain = ["sum_partials", "cross_entropy_partials", "count_hits<i64>"]
    real = [
        f"{n}_{what}<{kind}, {t}>" for n in ("mse", "bce") for what in ("partials", "backward") for t in {kind, "float"}
    ]
    real += [
        f"error_{what}<{kind}, {t}, {f}>"
        for f in ("L1", "Huber")
        for what in ("partials", "backward")
        for t in {kind, "float"}
    ]
    return rows + plain + real


@pytest.fixture(scope="module", params=ALL_KINDS)
def softmax(request: pytest.FixtureRequest) -> tuple[str, Emulator]:
    return request.param, Emulator("softmax.cu", softmax_names(request.param))


@pytest.fixture(scope="module", params=ALL_KINDS)
def losses(request: pytest.FixtureRequest) -> tuple[str, Emulator]:
    return request.param, Emulator("losses.cu", losses_names(request.param))


def i64(*values: int) -> list[np.int64]:
    return [np.int64(v) for v in values]


def total(module: Emulator, partial: np.ndarray, scale: float) -> np.ndarray:
    out = np.full(partial.shape[:-1], np.nan)
    module.launch(
        "sum_partials",
        (1, partial.size // partial.shape[-1]),
        BLOCK,
        [out, partial, np.float64(scale), *i64(partial.shape[-1])],
    )
    return out


def close(actual: np.ndarray, expected: np.ndarray, kind: str, scale: float = 1.0) -> None:
    """Sums: in float at best."""
    tolerance = 1e-13 if kind == "double" else 3e-6
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax(softmax: tuple[str, Emulator], shape: tuple[int, int], width: int) -> None:
    kind, module = softmax
    (rows, c), sizes = shape, i64(*shape)
    x, dy, m = normal(0, shape, kind, 3), normal(1, shape, kind), np.zeros(shape[:1], KINDS[kind])
    module.launch(f"softmax_max<{kind}, {width}>", (BLOCKS,), BLOCK, [m, x, *sizes])
    np.testing.assert_array_equal(wide(m), ENGINE.softmax_max(wide(x)))
    if c == 0:
        m[:] = 0
    sums, y = np.full(rows, np.nan), np.zeros_like(x)
    module.launch(f"softmax_denominator<{kind}, {width}>", (BLOCKS,), BLOCK, [sums, x, m, *sizes])
    close(sums, ENGINE.softmax_denominator(wide(x), wide(m)), kind)
    sums += 0.5  # as if from other ranks
    module.launch(f"softmax_forward<{kind}, {width}>", (BLOCKS,), BLOCK, [y, x, m, sums, *sizes])
    assert_close(y, ENGINE.softmax_forward(wide(x), wide(m), sums), kind)
    inner, dx = np.full(rows, np.nan), np.zeros_like(x)
    module.launch(f"softmax_inner<{kind}, {width}>", (BLOCKS,), BLOCK, [inner, y, dy, *sizes])
    close(inner, ENGINE.softmax_inner(wide(y), wide(dy)), kind)
    module.launch(f"softmax_backward<{kind}, {width}>", (BLOCKS,), BLOCK, [dx, y, dy, inner, *sizes])
    assert_close(dx, ENGINE.softmax_backward(wide(y), wide(dy), inner), kind)


def test_softmax_of_nan(softmax: tuple[str, Emulator]) -> None:
    kind, module = softmax
    x, m = normal(0, (40, 9), kind), np.zeros(40, KINDS[kind])
    x[5, 3] = x[6, 0] = x[7, 8] = np.nan
    for width in WIDTHS:
        module.launch(f"softmax_max<{kind}, {width}>", (1,), BLOCK, [m, x, *i64(40, 9)])
        np.testing.assert_array_equal(np.flatnonzero(np.isnan(wide(m))), [5, 6, 7])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_cross_entropy_over_split_classes(
    losses: tuple[str, Emulator], shape: tuple[int, int], width: int, smoothing: float
) -> None:
    """The local classes are 4, 5, ... of 10 + C, some targets are others'."""
    (kind, module), (rows, c), start, classes = losses, shape, 4, shape[1] + 10
    x = normal(0, shape, kind, 3)
    if x.size:
        x[:, -1] = x[:, 0]  # equal logits
    m = np.maximum(x.max(axis=-1, initial=-3), 0).astype(x.dtype)
    target = np.random.default_rng(1).integers(0, classes, rows)
    sums = np.full((3, rows), np.nan)
    module.launch(f"softmax_sums<{kind}, i64, {width}>", (BLOCKS,), BLOCK, [sums, x, m, target, *i64(start, rows, c)])
    close(sums, ENGINE.softmax_sums(wide(x), wide(m), target, start), kind, 10 * (c + 1))
    sums[0] += 0.5  # as if from other ranks
    rank = np.full(rows, np.nan)
    args = [rank, x, m, sums, target, *i64(start, rows, c)]
    module.launch(f"softmax_rank<{kind}, i64, {width}>", (BLOCKS,), BLOCK, args)
    np.testing.assert_array_equal(rank, ENGINE.softmax_rank(wide(x), wide(m), sums, target, start))
    tops = np.zeros((), [("of", "f8", 8)])
    tops["of"][:2] = 1, 5
    partial = np.full((2, BLOCKS), np.nan)
    args = [partial, rank, 0, tops, *i64(-1, rows)]
    module.launch("count_hits<i64>", (BLOCKS, 2), BLOCK, args)
    np.testing.assert_array_equal(total(module, partial, 1), ENGINE.count_hits(rank, (1, 5)))
    partial = np.full(BLOCKS, np.nan)
    args = [partial, sums, np.float64(smoothing), np.float64(classes), *i64(rows)]
    module.launch("cross_entropy_partials", (BLOCKS,), BLOCK, args)
    np.testing.assert_allclose(
        total(module, partial, 0.3), ENGINE.cross_entropy_loss(sums, smoothing, classes, 0.3), rtol=1e-13
    )
    dx = np.zeros_like(x)
    args = [dx, x, m, sums, target, np.int64(start), *(np.float64(v) for v in (smoothing, classes, 0.3)), *i64(rows, c)]
    module.launch(f"cross_entropy_backward<{kind}, i64, {width}>", (BLOCKS,), BLOCK, args)
    expected = ENGINE.cross_entropy_backward(wide(x), wide(m), sums, target, start, smoothing, classes, 0.3)
    assert_close(dx, expected, kind, scale=0.3)


def test_rank_of_bad_logits_is_infinite(losses: tuple[str, Emulator]) -> None:
    kind, module = losses
    x, sums, rank = normal(0, (4, 5), kind), np.ones((3, 4)), np.zeros(4)
    sums[0, 1], sums[0, 2] = np.nan, np.inf
    args = [rank, x, x[:, 0].copy(), sums, np.zeros(4, np.int64), *i64(0, 4, 5)]
    module.launch(f"softmax_rank<{kind}, i64, 8>", (1,), BLOCK, args)
    np.testing.assert_array_equal(np.isinf(rank), [False, True, True, False])


@pytest.mark.parametrize("n", [0, 5, 1003])
def test_losses_of_real_targets(losses: tuple[str, Emulator], n: int) -> None:
    kind, module = losses
    x, bounded = normal(0, (n,), kind, 20), np.random.default_rng(1).random(n)
    for t in {kind, "float"}:
        for name, target in (("mse", normal(2, (n,), t)), ("bce", bounded.astype(KINDS[t]))):
            partial, dx = np.full(BLOCKS, np.nan), np.zeros_like(x)
            module.launch(f"{name}_partials<{kind}, {t}>", (BLOCKS,), BLOCK, [partial, x, target, *i64(n)])
            close(total(module, partial, 0.3), getattr(ENGINE, f"{name}_loss")(wide(x), wide(target), 0.3), kind)
            module.launch(f"{name}_backward<{kind}, {t}>", (BLOCKS,), BLOCK, [dx, x, target, np.float64(0.3), *i64(n)])
            assert_close(dx, getattr(ENGINE, f"{name}_backward")(wide(x), wide(target), 0.3), kind, scale=0.3)


@pytest.mark.parametrize("n", [0, 5, 1003])
def test_losses_of_errors(losses: tuple[str, Emulator], n: int) -> None:
    kind, module = losses
    x = normal(0, (n,), kind, 2)
    for t in {kind, "float"}:
        target = normal(2, (n,), t)
        if n:
            target[0] = x[0]  # no error has no slope
        for name, function in (("l1", "L1"), ("huber", "Huber")):
            partial, dx, kinds = np.full(BLOCKS, np.nan), np.zeros_like(x), f"{kind}, {t}, {function}"
            module.launch(f"error_partials<{kinds}>", (BLOCKS,), BLOCK, [partial, x, target, *i64(n)])
            close(total(module, partial, 0.3), ENGINE.error_loss(wide(x), wide(target), name, 0.3), kind)
            module.launch(f"error_backward<{kinds}>", (BLOCKS,), BLOCK, [dx, x, target, np.float64(0.3), *i64(n)])
            assert_close(dx, ENGINE.error_backward(wide(x), wide(target), name, 0.3), kind, scale=0.3)


def test_beyond_the_limit_of_32_bits() -> None:
    limit, shape = {"EMULATED_INT_LIMIT": 2000}, (500, 6)

    def softmax(module: Emulator) -> None:
        for width in WIDTHS:
            test_softmax(("float", module), shape, width)

    def losses(module: Emulator) -> None:
        for width in WIDTHS:
            test_cross_entropy_over_split_classes(("float", module), shape, width, 0.1)
        test_losses_of_real_targets(("float", module), 3001)

    as_launched("softmax.cu", softmax_names("float"), softmax, defines=limit)
    as_launched("losses.cu", losses_names("float"), losses, defines=limit)
