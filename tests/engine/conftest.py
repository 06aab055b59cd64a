"""Every engine runs the same tests; one whose library is missing is skipped by name."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.registry import get_engine
from lbpar.errors import EngineError


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return np.dtype(request.param)


@pytest.fixture(params=["numpy", "onednn"])
def engine(request, dtype):
    """An engine for dtype. Types outside ``engine.accelerated`` run through its fallback, with the same results."""
    try:
        return get_engine(request.param, dtype, 1)
    except EngineError as error:
        pytest.skip(str(error))


@pytest.fixture
def rng():
    return np.random.default_rng(20240607)
