"""Norms by cuDNN, on the stand-in for its frontend: where it is taken, with what statistics, and that training is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.registry import get_engine
from tests.cuda.emulator import compiler_found
from tests.util import fake_cudnn, fake_cupy
from tests.util.fake_cupy.machine import Machine
from tests.util.on_host import OnHost

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
TOLERANCE = {"float32": 2e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    fake_cupy.few_kernels(monkeypatch, 4)
    monkeypatch.setattr(fake_cudnn, "executed", [])
    return fake_cupy.install(monkeypatch, cudnn=fake_cudnn)


def ran(*names: str) -> int:
    return sum(name in (names or ("batchnorm",)) for name, _ in fake_cudnn.executed)


def norm(engine: Any, x: np.ndarray, how: str = "", affine: bool = True, count: int | None = None) -> list[np.ndarray]:
    """Moments, y, and the running statistics that follow."""
    c = x.shape[-1]
    shift, scale, bias = np.linspace(-2, 3, c), np.linspace(0.5, 2, c), np.linspace(-1, 1, c)
    residual = x[::-1].copy() if "add" in how else None
    affine_ = (scale.astype(engine.dtype), bias.astype(engine.dtype)) if affine else (None, None)
    count = x.size // max(c, 1) if count is None else count
    sums, moments, y = engine.norm_forward(x, shift, *affine_, residual, "relu" in how, count, 1e-3)
    running = [shift.copy(), np.ones(c)]
    engine.norm_running(sums, *running, 0.1, max(count, 1))
    return [moments, y, *running]


def drawn(shape: tuple[int, ...], dtype: str = "float32", far: float = 1.0) -> np.ndarray:
    kind = np.dtype(dtype) if dtype != "bfloat16" else np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return (np.random.default_rng(len(shape)).normal(far, 1, shape)).astype(kind)


@pytest.mark.parametrize("how", ["", "relu", "add relu"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(9, 16), (3, 7, 8), (2, 5, 4, 8), (1, 5, 7, 24), (2, 3, 5, 4, 8)])
def test_equals_numpy(machine: Machine, shape: tuple[int, ...], dtype: str, how: str) -> None:
    device = OnHost(get_engine("cupy", "float32", cudnn=True, compute=None if dtype == "float32" else dtype))
    x = drawn(shape, dtype)
    got, want = norm(device, x, how), norm(NumpyEngine("float64"), x.astype(np.float64), how)
    assert ran() == 1
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=4 * TOLERANCE[dtype] * np.abs(b).max())


def test_the_running_mean_is_a_shift_that_may_be_far_away(machine: Machine) -> None:
    x = drawn((64, 8), far=1000.0)
    got, want = (
        norm(OnHost(get_engine("cupy", "float32", cudnn=True)), x),
        norm(NumpyEngine("float64"), x.astype(float)),
    )
    np.testing.assert_allclose(got[3], want[3], rtol=1e-4)
    np.testing.assert_allclose(got[2], want[2], rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "others"),
    [
        ((6, 5), {}),
        ((6, 0), {}),
        ((0, 8), {}),
        ((1, 8), {}),
        ((6, 8), {"affine": False}),
        ((6, 8), {"count": 12}),
    ],
    ids=["odd channels", "no channels", "no rows", "one row", "no scale", "statistics of others too"],
)
def test_our_kernels_take_what_cudnn_does_not(machine: Machine, shape: tuple[int, ...], others: Any) -> None:
    x, device = drawn(shape), OnHost(get_engine("cupy", "float32", cudnn=True))
    got, want = norm(device, x, "relu", **others), norm(NumpyEngine("float64"), x.astype(float), "relu", **others)
    assert not ran()
    for a, b in zip(got[:2], want[:2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_what_is_not_aligned_is_left_to_our_kernels(machine: Machine) -> None:
    device: Any = get_engine("cupy", "float32", cudnn=True)
    x = device.from_host(drawn((129,)))[1:].reshape(16, 8)
    vectors = [device.from_host(np.ones(8, np.float32)) for _ in range(2)]
    _, _, y = device.norm_forward(x, device.zeros((8,), np.float64), *vectors, None, False, 16, 1e-3)
    want = norm(NumpyEngine("float64"), device.to_host(x).astype(float), affine=False)[1] + 1
    np.testing.assert_allclose(device.to_host(y), want, rtol=1e-5, atol=1e-5)
    assert not ran()


def test_timing_may_take_our_kernels(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = get_engine("cupy", "float32", cudnn=True, autotune=True)
    x = drawn((6, 8))
    first = norm(OnHost(device), x)
    tried, timed = ran(), device.graphs.times
    assert tried > 4 and any(key[0] == "norm" for key in timed)
    slow = {key: {choice: float(choice[0] >= 0) for choice in times} for key, times in timed.items()}
    device.graphs.choose([slow])
    second = norm(OnHost(device), x)
    assert ran() == tried
    for a, b in zip(first, second, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_is_not_finite_stays_so(machine: Machine) -> None:
    x = drawn((6, 8))
    x[2, 3] = np.nan
    moments, y, mean, var = norm(OnHost(get_engine("cupy", "float32", cudnn=True)), x)
    assert ran() == 1
    for a in (moments[0], moments[1], y[0], mean, var):
        assert np.isnan(a[3]) and np.isfinite(np.delete(a, 3)).all()


def sample_norm(engine: Any, x: np.ndarray, affine: bool = True, count: int | None = None) -> list[np.ndarray]:
    positions, groups, width = x.shape[1:]
    vectors = [np.linspace(*ends, groups * width).reshape(groups, width) for ends in ((0.5, 2), (-1, 1))]
    scale, bias = (v.astype(engine.dtype) for v in vectors) if affine else (None, None)
    return list(engine.sample_norm_forward(x, scale, bias, positions * width if count is None else count, 1e-3))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((3, 35, 5, 1), "instancenorm"),
        ((1, 7, 8, 1), "instancenorm"),
        ((2, 1, 3, 1), "instancenorm"),
        ((9, 1, 1, 30), "layernorm"),
        ((1, 1, 1, 8), "layernorm"),
    ],
)
def test_norms_within_samples_equal_numpys(machine: Machine, shape: tuple[int, ...], kind: str, dtype: str) -> None:
    device = OnHost(get_engine("cupy", "float32", cudnn=True, compute=None if dtype == "float32" else dtype))
    x = drawn(shape, dtype)
    got, want = sample_norm(device, x), sample_norm(NumpyEngine("float64"), x.astype(np.float64))
    assert ran(kind) == len(fake_cudnn.executed) == 1
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=4 * TOLERANCE[dtype] * np.abs(b).max())


@pytest.mark.parametrize(
    ("shape", "others"),
    [
        ((3, 35, 2, 4), {}),
        ((3, 35, 1, 4), {}),
        ((0, 35, 4, 1), {}),
        ((3, 0, 4, 1), {}),
        ((3, 35, 4, 1), {"affine": False}),
        ((3, 35, 4, 1), {"count": 70}),
    ],
    ids=["group norm", "one group", "no samples", "no positions", "no scale", "statistics of others too"],
)
def test_our_kernels_take_other_norms_within_samples(machine: Machine, shape: tuple[int, ...], others: Any) -> None:
    x = drawn(shape)
    got = sample_norm(OnHost(get_engine("cupy", "float32", cudnn=True)), x, **others)
    want = sample_norm(NumpyEngine("float64"), x.astype(float), **others)
    assert not fake_cudnn.executed
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
