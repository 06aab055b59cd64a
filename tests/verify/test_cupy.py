"""Parity of many ranks with one, and of one with NumPy, for the engine `cupy` on the stand-in for CuPy."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.registry import get_engine
from lbpar.runtime.optim.rules import SGD
from lbpar.selftest.networks import networks
from lbpar.verify.compare import Reference, Update, measure, verify_virtual, worst_of_large
from lbpar.verify.oracle import oracle
from lbpar.verify.plans import random_plan
from lbpar.verify.run import TOLERANCES
from tests.cuda.emulator import compiler_found
from tests.util import fake_cudnn, fake_cupy

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


@pytest.mark.parametrize("name", ["planes", "volumes", "small blocks", "voxels"])
def test_random_plans_with_cudnn(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(fake_cudnn, "executed", [])
    machine, graph = fake_cupy.install(monkeypatch, cudnn=fake_cudnn), networks()[name]
    fake_cupy.few_kernels(monkeypatch, 4)
    update = Update(graph, 5, 1, lambda engine: SGD(0.1, momentum=0.9, weight_decay=1e-3), 0.1)
    engine = get_engine("cupy", "float32", cudnn=True)
    ours, exact = (Reference(update, e, measure("float32")) for e in (engine, oracle("float32")))
    assert max(exact.beside(ours).values()) <= TOLERANCES["float32"]
    machine.scheduler.seed(6)
    assert verify_virtual(ours, random_plan(graph, 5, 6, Random(name))).worst <= TOLERANCES["float32"]
    assert {ran for ran, _ in fake_cudnn.executed} == {"fprop", "dgrad", "wgrad"}


@pytest.mark.parametrize("name", networks())
def test_half_types_hold_activations_and_multiply(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Beside float64, to a few roundings to 8 bits; weights, their gradients and statistics are float32 or float64."""
    machine, graph = fake_cupy.install(monkeypatch), networks()[name]
    fake_cupy.few_kernels(monkeypatch, 2)
    update = Update(graph, 5, 1, lambda engine: SGD(0.1, momentum=0.9, weight_decay=1e-3), 0.1)
    engine = get_engine("cupy", "bfloat16")
    assert (engine.dtype, engine.activations.name) == (np.dtype("float32"), "bfloat16")
    ours, exact = (Reference(update, e, measure("bfloat16")) for e in (engine, NumpyEngine("float64")))
    assert worst_of_large(exact, exact.beside(ours)) < 0.2
    products = [n for n in machine.launches if n.startswith(("gemm", "conv_", "grouped"))]
    assert products and all("<__nv_bfloat16" in n for n in products)
    random = Random(name)
    for procs in (3, 6):
        machine.scheduler.seed(procs)
        assert worst_of_large(exact, verify_virtual(ours, random_plan(graph, 5, procs, random)).tensors) < 0.2
