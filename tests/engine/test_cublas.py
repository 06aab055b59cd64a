"""Linear layers by cuBLAS, on the stand-in for CuPy's binding: equal to NumPy's, in every type, and ours where it has nothing to do."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from lbpar.engine.cupy import blas
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.registry import get_engine
from lbpar.errors import EngineError
from tests.cuda.emulator import compiler_found
from tests.engine import test_convolution
from tests.util import fake_cublas, fake_cudnn, fake_cupy
from tests.util.fake_cupy.machine import Machine
from tests.util.on_host import OnHost

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    fake_cupy.few_kernels(monkeypatch, 4)
    fake_cublas.executed.clear()
    return fake_cupy.install(monkeypatch, cublas=fake_cublas)


def values(n: int, c: int, f: int, dtype: Any, seed: int = 0) -> tuple[np.ndarray, ...]:
    """x, w, b and dy."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(s).astype(dtype) for s in ((n, c), (f, c), (f,), (n, f)))


def passes(engine: Any, x: Any, w: Any, b: Any, dy: Any) -> list[Any]:
    return [
        engine.linear_forward(x, w, b),
        engine.linear_forward(x, w, None),
        engine.linear_backward_data(dy, w),
        engine.linear_backward_weights(x, dy),
    ]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("n", "c", "f"), [(3, 5, 2), (1, 8, 16), (7, 1, 3), (2, 3, 1), (1, 1, 1)])
def test_matches_pytorch(machine: Machine, rng: np.random.Generator, dtype: str, n: int, c: int, f: int) -> None:
    test_convolution.test_linear(OnHost(get_engine("cupy", dtype)), np.dtype(dtype), rng, n, c, f)
    assert set(fake_cublas.executed) == {dtype} and not any("gemm" in name for name in machine.launches)


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 22), ("float16", 9), ("bfloat16", 6)])
def test_sums_are_of_float32_and_rounded_once(machine: Machine, dtype: str, bits: int) -> None:
    kind = np.dtype(dtype) if dtype != "bfloat16" else np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    device: Any = get_engine("cupy", "float32")
    given = values(9, 301, 17, kind)
    want = passes(NumpyEngine("float64"), *(a.astype("float64") for a in given))
    for got, exact in zip(passes(device, *map(device.from_host, given)), want, strict=True):
        got = device.to_host(got)
        np.testing.assert_allclose(got, exact, rtol=2.0**-bits, atol=2e-5 if dtype == "float32" else 1e-6)
        if dtype != "float32":  # each is the nearest number of its type
            nearest = exact.astype(kind).astype("float64")
            assert np.mean(got == nearest) > 0.98
    assert set(fake_cublas.executed) == {dtype}


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_only_where_it_is_chosen(machine: Machine, tf32: bool) -> None:
    given = values(4, 64, 8, "float32")
    got = passes(OnHost(get_engine("cupy", "float32", tf32=tf32)), *given)
    want = passes(NumpyEngine("float64"), *(a.astype("float64") for a in given))
    worst = max(np.abs(g - w).max() for g, w in zip(got, want, strict=True))
    assert (1e-4 < worst < 1e-1) if tf32 else worst < 1e-5


def test_a_gradient_of_weights_is_written_where_it_is_wanted(machine: Machine) -> None:
    device: Any = get_engine("cupy", "float32")
    x, _, _, dy = values(4, 6, 5, "float32")
    out = device.empty((5, 6))
    found = device.linear_backward_weights(device.from_host(x), device.from_host(dy), out)
    assert found is out
    np.testing.assert_allclose(device.to_host(out), dy.T @ x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("n", "c", "f"), [(0, 3, 2), (3, 0, 2)])
def test_nothing_to_multiply_is_left_to_our_kernels(machine: Machine, n: int, c: int, f: int) -> None:
    given = values(n, c, f, "float32")
    for got, want in zip(passes(OnHost(get_engine("cupy", "float32")), *given), passes(NumpyEngine("float32"), *given), strict=True):  # fmt: skip
        np.testing.assert_array_equal(got, want)
    assert not fake_cublas.executed


@pytest.mark.parametrize("of_engine", [{"cudnn": False}, {"graphs": True}])
def test_our_kernels_multiply_where_they_are_asked_for(machine: Machine, of_engine: dict[str, Any]) -> None:
    given = values(3, 8, 4, "float32")
    for got, want in zip(passes(OnHost(get_engine("cupy", "float32", **of_engine)), *given), passes(NumpyEngine("float32"), *given), strict=True):  # fmt: skip
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert not fake_cublas.executed and any("gemm" in name for name in machine.launches)


def test_convolutions_stay_with_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.few_kernels(monkeypatch, 4)
    fake_cupy.install(monkeypatch, cudnn=fake_cudnn, cublas=fake_cublas)
    fake_cudnn.executed.clear()
    fake_cublas.executed.clear()
    passes(OnHost(get_engine("cupy", "float32", cudnn=True)), *values(8, 8, 8, "float32"))
    assert not fake_cudnn.executed and len(fake_cublas.executed) == 4


@pytest.mark.parametrize("missing", [True, False])
def test_where_it_cannot_be_used_it_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: bool
) -> None:
    def create() -> int:
        raise fake_cublas.CUBLASError("CUBLAS_STATUS_ALLOC_FAILED")

    fake_cupy.few_kernels(monkeypatch, 4)
    fake_cupy.install(monkeypatch, cublas=None if missing else fake_cublas)
    monkeypatch.setattr(fake_cublas, "create", create)
    with caplog.at_level(logging.INFO, logger="lbpar"):
        engine: Any = get_engine("cupy", "float32")
    assert engine.blas is None and "cuBLAS cannot be used" in caplog.text


def test_sizes_that_it_cannot_count_are_ours() -> None:
    class Shaped:
        def __init__(self, *shape: int) -> None:
            self.shape, self.dtype = shape, np.dtype("float32")

    mine: Any = blas.Blas.__new__(blas.Blas)
    mine._modern = True
    assert mine.takes(Shaped(4, 2**31 - 1))
    assert not mine.takes(Shaped(4, 5), Shaped(2**31, 1))


def test_bfloat16_of_old_cards_is_ours(machine: Machine) -> None:
    kind = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    machine.capability = (7, 5)
    device: Any = get_engine("cupy", "float32")
    for dtype in (kind, "float16"):
        assert not fake_cublas.executed
        passes(device, *map(device.from_host, values(3, 8, 4, dtype)))
        device.synchronize()
    assert set(fake_cublas.executed) == {"float16"}


def test_a_refusal_is_an_error_of_ours(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise fake_cublas.CUBLASError("CUBLAS_STATUS_ALLOC_FAILED")

    monkeypatch.setattr(fake_cublas, "gemmEx", refused)
    with pytest.raises(
        EngineError, match=r"cuBLAS cannot multiply 3 x 8 and 8 x 4 matrices of float32 .*ALLOC_FAILED.*cudnn: false"
    ):
        OnHost(get_engine("cupy", "float32")).linear_forward(*values(3, 8, 4, "float32")[:2], None)
