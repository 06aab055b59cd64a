"""kernels/lines.cu and prelu.cu, as the engine launches them, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.host import prelu
from lbpar.engine.host.lines import along_lines, taps, turned
from tests.cuda.emulator import compiler_found
from tests.cuda.engine import OnEmulation, as_launched
from tests.cuda.kinds import ALL_KINDS, KINDS, assert_close, normal, wide

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")


@pytest.fixture(scope="module", params=ALL_KINDS)
def engine(request: pytest.FixtureRequest) -> tuple[str, OnEmulation]:
    return request.param, OnEmulation(np.float64 if request.param == "double" else np.float32)


@pytest.mark.parametrize("channels", [1, 3, 16, 0])
@pytest.mark.parametrize("rule", ["linear", "corners", "reflect", "replicate"])
def test_lines(engine: tuple[str, OnEmulation], rule: str, channels: int) -> None:
    """Forward and backward, along the second and the third of three dimensions, a part of the outputs."""
    kind, ours = engine
    resize = rule in ("linear", "corners")
    found = [taps(rule, n, m, 0 if resize else 2, 2, np.arange(1, m)) for n, m in ((5, 10), (7, 14 if resize else 11))]
    x = normal(0, (2, 3, 5, 7, channels), kind)
    y = ours.along_lines(x, [None, *found])
    assert y.shape == (2, 3, 9, len(found[1][0][0]), channels)
    # each dimension is rounded
    assert_close(y, along_lines(wide(x), [None, *found]), kind, factor=8)
    back = [turned((index, weight), np.arange(n)) for (index, weight), n in zip(found, (5, 7), strict=True)]
    dy = normal(1, y.shape, kind)
    assert_close(ours.along_lines(dy, [None, *back]), along_lines(wide(dy), [None, *back]), kind, factor=16)


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3)])
def test_lines_of_nothing(engine: tuple[str, OnEmulation], shape: tuple[int, ...]) -> None:
    kind, ours = engine
    index, weight = np.zeros((2, 6), np.int64), np.zeros((2, 6))
    y = ours.along_lines(np.zeros(shape, KINDS[kind]), [(index, weight)])
    np.testing.assert_array_equal(wide(y), np.zeros((shape[0], 6, 3)))


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("shape", [(300, 3), (2, 5, 7, 16), (41, 130), (1, 1), (0, 5), (5, 0)])
def test_prelu(engine: tuple[str, OnEmulation], shape: tuple[int, ...], one: bool) -> None:
    kind, ours = engine
    x, dy = normal(0, shape, kind), normal(1, shape, kind)
    if x.size > 1:
        x.flat[1], dy.flat[0] = 0, -3  # 0 is not positive
    slope = normal(2, (1 if one else shape[-1],), "double" if kind == "double" else "float")
    assert_close(ours.prelu_forward(x, slope), prelu.prelu_forward(wide(x), wide(slope)), kind)
    want = prelu.prelu_backward_data(wide(x), wide(dy), wide(slope))
    assert_close(ours.prelu_backward_data(x, dy, slope), want, kind)
    sums = ours.prelu_slope_sums(x, dy, not one)
    assert sums.dtype == ours.dtype
    assert_close(
        sums, prelu.prelu_slope_sums(wide(x), wide(dy), not one), "double" if kind == "double" else "float", 32
    )


def test_what_is_no_number_stays_none(engine: tuple[str, OnEmulation]) -> None:
    kind, ours = engine
    x = np.array([[np.nan, 1.0, -2.0]], KINDS[kind])
    np.testing.assert_array_equal(wide(ours.prelu_forward(x, np.full(1, 0.5, ours.dtype))), [[np.nan, 1, -1]])
    assert np.isnan(wide(ours.prelu_slope_sums(x, x, False)))


def test_beyond_the_limit_of_32_bits() -> None:
    def check(engine: tuple[str, OnEmulation]) -> None:
        test_prelu(engine, (301, 130), False)
        test_lines(engine, "linear", 16)

    as_launched(check, defines={"EMULATED_INT_LIMIT": 20000})
