"""kernels/label_losses.cu, as the engine launches it, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lbpar.engine.host import label_losses as expected
from lbpar.engine.numpy_engine import NumpyEngine
from tests.cuda.emulator import compiler_found
from tests.cuda.engine import OnEmulation, as_launched
from tests.cuda.kinds import ALL_KINDS, assert_close, normal, wide

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
NUMPY = NumpyEngine(np.float64)
SHAPES = [(3, 70, 3), (2, 5, 4, 17), (3, 7, 100), (1, 1, 1), (0, 5, 3), (3, 0, 4)]
"""Of logits; 1, 8 and 32 lanes share a row."""

START, OTHERS = 2, 5
"""The local classes are 2, 3, ... of 5 more."""


@pytest.fixture(scope="module", params=ALL_KINDS)
def engine(request: pytest.FixtureRequest) -> tuple[str, OnEmulation]:
    return request.param, OnEmulation(np.float64 if request.param == "double" else np.float32)


class Case:
    """Logits of a block of classes, labels of which every fifth is ignored, and what the losses' first kernels make of them."""

    def __init__(self, kind: str, shape: tuple[int, ...], ignore: int | None = 1) -> None:
        self.kind, self.classes, self.ignore = kind, shape[-1] + OTHERS, ignore
        rng = np.random.default_rng(1)
        self.x = normal(0, shape, kind, 3)
        self.m = np.maximum(self.x.max(axis=-1, initial=-3), 0).astype(self.x.dtype)
        self.target = rng.integers(0, self.classes, shape[:-1])
        self.target[rng.random(shape[:-1]) < 0.2] = ignore or 0
        self.weights = tuple(float(w) for w in rng.random(self.classes) + 0.5)
        self.local = self.weights[START : START + shape[-1]]
        wider = wide(self.x), wide(self.m)
        self.sums = NUMPY.softmax_sums(*wider, self.target, START) + np.array([0.5, 0, 0]).reshape(
            3, *(1,) * self.m.ndim
        )
        self.wide = (*wider, self.sums, self.target)
        self.given = (self.x, self.m, self.sums, self.target)
        self.factors, self.total = expected.label_factors(self.target, self.weights, ignore)

    def close(self, actual: np.ndarray, want: np.ndarray, scale: float = 1.0) -> None:
        """Sums, in float at best."""
        tolerance = 1e-12 if self.kind == "double" else 3e-6
        np.testing.assert_allclose(actual, want, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("ignore", [None, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_factors_of_labels(engine: tuple[str, OnEmulation], shape: tuple[int, ...], ignore: int | None) -> None:
    case = Case(engine[0], shape, ignore)
    factors, total = engine[1].label_factors(case.target, case.weights, ignore)
    np.testing.assert_array_equal(factors, case.factors)
    np.testing.assert_allclose(total, case.total, rtol=1e-14)


def test_a_label_of_no_class_is_not_a_number(engine: tuple[str, OnEmulation]) -> None:
    factors, total = engine[1].label_factors(np.array([0, 3, -2, 1]), (1.0, 2.0, 3.0), 1)
    np.testing.assert_array_equal(factors, [1, np.nan, np.nan, -1])
    assert np.isnan(total)


@pytest.mark.parametrize("gamma,smoothing", [(0.0, 0.0), (2.0, 0.0), (1.5, 0.1), (0.0, 0.2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_weighed_entropy(
    engine: tuple[str, OnEmulation], shape: tuple[int, ...], gamma: float, smoothing: float
) -> None:
    """The class that a position has may be another rank's; a position may be predicted with certainty."""
    (kind, ours), case = engine, Case(engine[0], shape)
    if case.m.size:
        case.sums[0].flat[0], case.sums[1].flat[0] = 1, 0  # q = 1
    total = np.asarray(case.total + 3)  # as if from other ranks
    spread = ours.class_spread(case.x, case.m, case.local)
    case.close(spread, expected.class_spread(*case.wide[:2], case.local), 30)
    if smoothing:
        args: tuple[Any, ...] = (case.sums, case.factors, total, spread, gamma, 0.3, smoothing, case.weights)
        loss, want = ours.smoothed_entropy_loss(*args), expected.smoothed_entropy_loss(*args)
    else:
        args = (case.sums, case.factors, total, gamma, 0.3)
        loss, want = ours.weighed_entropy_loss(*args), expected.weighed_entropy_loss(*args)
    np.testing.assert_allclose(loss, want, rtol=1e-12)
    more: tuple[Any, ...] = (case.factors, total, START, gamma, 0.3, smoothing, case.weights)
    dx, slope = ours.weighed_entropy_backward(*case.given, *more), expected.weighed_entropy_backward(*case.wide, *more)
    assert_close(dx, slope, kind, scale=float(np.abs(slope).max(initial=0)) * 4)


def test_nothing_but_ignored_positions(engine: tuple[str, OnEmulation]) -> None:
    (_, ours), case, none = engine, Case(engine[0], (2, 9, 5)), np.zeros(())
    case.target[...], case.factors = 1, np.full((2, 9), -1.0)
    assert ours.label_factors(case.target, case.weights, 1)[1] == 0
    assert ours.weighed_entropy_loss(case.sums, case.factors, none, 2.0, 1.0) == 0
    more: tuple[Any, ...] = (case.factors, none, START, 2.0, 1.0, 0.1, case.weights)
    np.testing.assert_array_equal(wide(ours.weighed_entropy_backward(*case.given, *more)), np.zeros((2, 9, 5)))


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("ignore", [None, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_regions(engine: tuple[str, OnEmulation], shape: tuple[int, ...], ignore: int | None, per_sample: bool) -> None:
    (kind, ours), case, eps = engine, Case(engine[0], shape, ignore), 1e-2
    dsums = ours.region_sums(*case.given, START, ignore, per_sample)
    want = expected.region_sums(*case.wide, START, ignore, per_sample)
    case.close(dsums, want, max(1, case.m.size))
    np.testing.assert_allclose(
        ours.region_loss(want, case.local, eps), expected.region_loss(want, case.local, eps), rtol=1e-12
    )
    more: tuple[Any, ...] = (want, START, case.local, eps, ignore)
    g, inner = ours.region_backward(*case.given, *more)
    slope, sums = expected.region_backward(*case.wide, *more)
    assert_close(g, slope, kind)
    case.close(inner, sums, float(np.abs(sums).max(initial=0)))
    dx = ours.dice_backward_data(*case.given[:3], g, inner)
    assert_close(dx, NUMPY.dice_backward_data(*case.wide[:3], wide(g), inner), kind)


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_dice(engine: tuple[str, OnEmulation], shape: tuple[int, ...]) -> None:
    (kind, ours), case = engine, Case(engine[0], shape)
    dsums = NUMPY.dice_sums(*case.wide, START)
    case.close(ours.dice_sums(*case.given, START), dsums, max(1, case.m.size))
    np.testing.assert_allclose(ours.dice_loss(dsums, 1.0, 7), NUMPY.dice_loss(dsums, 1.0, 7), rtol=1e-13)
    g, inner = ours.dice_backward(*case.given, START, dsums, 1.0, 7)
    want = NUMPY.dice_backward(*case.wide, START, dsums, 1.0, 7)
    assert_close(g, want[0], kind)
    case.close(inner, want[1], float(np.abs(want[1]).max(initial=0)))


@pytest.mark.parametrize("shape", SHAPES)
def test_what_metrics_follow_from(engine: tuple[str, OnEmulation], shape: tuple[int, ...]) -> None:
    (_, ours), case = engine, Case(engine[0], shape)
    if shape[-1] > 1 and case.m.size:
        case.x[0, 0, ..., -1] = case.x[0, 0, ..., 0] = case.m[0, 0] = 30  # equal logits: the first of them
    first, want = ours.softmax_first(case.x, case.m, START), expected.softmax_first(wide(case.x), wide(case.m), START)
    np.testing.assert_array_equal(first, want)
    for classes in (case.classes, 120):  # counted in shared memory, and not
        for ignore in (None, 1):
            args: tuple[Any, ...] = (first, case.target, classes, ignore)
            np.testing.assert_array_equal(ours.class_confusion(*args), expected.class_confusion(*args))
            np.testing.assert_array_equal(ours.class_counts(*args), expected.class_counts(*args))
            of_samples = ours.sample_counts(*args)
            np.testing.assert_array_equal(of_samples, expected.sample_counts(*args))
            np.testing.assert_array_equal(ours.dice_of_samples(of_samples), expected.dice_of_samples(of_samples))
    rank = np.where(first < -4, np.inf, np.random.default_rng(2).integers(0, 9, first.shape))
    np.testing.assert_array_equal(
        ours.count_known_hits(rank, case.target, (1, 5), 1), expected.count_known_hits(rank, case.target, (1, 5), 1)
    )
    np.testing.assert_array_equal(ours.count_hits(rank, (1, 5)), NUMPY.count_hits(rank, (1, 5)))


@pytest.mark.parametrize("n", [0, 5, 1003])
def test_sums_of_errors(engine: tuple[str, OnEmulation], n: int) -> None:
    kind, ours = engine
    x, t = normal(0, (n,), kind, 20), normal(1, (n,), "double" if kind == "double" else "float")
    np.testing.assert_allclose(ours.error_sums(x, t), expected.error_sums(wide(x), t), rtol=1e-12)


def test_beyond_the_limit_of_32_bits() -> None:
    def check(engine: tuple[str, OnEmulation]) -> None:
        test_weighed_entropy(engine, (5, 100, 6), 2.0, 0.1)
        test_regions(engine, (5, 100, 6), 1, True)
        test_what_metrics_follow_from(engine, (5, 100, 6))
        test_sums_of_errors(engine, 3001)

    as_launched(check, defines={"EMULATED_INT_LIMIT": 2000})
