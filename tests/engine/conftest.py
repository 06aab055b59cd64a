"""Every engine runs the same tests; one whose library is missing is skipped by name."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.registry import get_engine
from lbpar.errors import EngineError
from tests.cuda.emulator import compiler_found
from tests.util import fake_cupy
from tests.util.on_host import OnHost


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return np.dtype(request.param)


@pytest.fixture(params=["numpy", "onednn", "cupy"])
def engine(request, dtype, monkeypatch):
    """An engine for dtype. Types outside ``engine.accelerated`` run through its fallback, with the same results."""
    if request.param == "cupy":
        return on_stand_in(monkeypatch, dtype)
    try:
        return get_engine(request.param, dtype, 1)
    except EngineError as error:
        pytest.skip(str(error))


def on_stand_in(monkeypatch, dtype):
    """The engine of CUDA devices on the stand-in for CuPy, with one shape of tiles, so that few kernels are compiled."""
    if not compiler_found():
        pytest.skip("needs a C++ compiler")
    fake_cupy.install(monkeypatch)
    fake_cupy.few_kernels(monkeypatch, dtype.itemsize)
    return OnHost(get_engine("cupy", dtype))


@pytest.fixture
def rng():
    return np.random.default_rng(20240607)
