"""Parity of many ranks with one, and of one with NumPy, for the engine `cupy` on the stand-in for CuPy."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from lbpar.engine.registry import get_engine
from lbpar.runtime.optim.rules import SGD
from lbpar.selftest.networks import networks
from lbpar.verify.compare import Reference, Update, measure, verify_virtual
from lbpar.verify.oracle import oracle
from lbpar.verify.plans import random_plan
from lbpar.verify.run import TOLERANCES
from tests.cuda.emulator import compiler_found
from tests.util import fake_cupy

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", networks())
def test_random_plans(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    tolerance = TOLERANCES[dtype]
    machine, graph = fake_cupy.install(monkeypatch), networks()[name]
    fake_cupy.few_kernels(monkeypatch, np.dtype(dtype).itemsize)
    update = Update(graph, 5, 1, lambda engine: SGD(0.1, momentum=0.9, weight_decay=1e-3), 0.1)
    ours, exact = (Reference(update, e, measure(dtype)) for e in (get_engine("cupy", dtype), oracle(dtype)))
    assert max(exact.beside(ours).values()) <= tolerance
    random = Random(name)
    for procs in (1, 2, 3, 4, 5, 6) if dtype == "float64" else (6,):
        machine.scheduler.seed(procs)
        assert verify_virtual(ours, random_plan(graph, 5, procs, random)).worst <= tolerance
