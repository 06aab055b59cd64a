"""Parity of many ranks with one, and of one with NumPy, for the engine `cupy` on the stand-in for CuPy."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from lbpar.engine.cupy.device import CupyDevice
from lbpar.engine.cupy.kernels import TYPES
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.registry import get_engine
from lbpar.errors import ConfigError
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.random_plan import random_plan
from lbpar.runtime.binding import Bound
from lbpar.runtime.executor import SMALL, Executor
from lbpar.runtime.initial import initial_state
from lbpar.runtime.optim import loss_scale
from lbpar.runtime.optim.rules import SGD
from lbpar.selftest.networks import networks
from lbpar.transport.single import SingleTransport
from lbpar.verify.command import main
from lbpar.verify.compare import Reference, Update, measure, verify_virtual, worst_of_large
from lbpar.verify.oracle import oracle
from lbpar.verify.run import HALVES, LOSS_SCALES, TOLERANCES
from tests.cuda.emulator import compiler_found
from tests.util import fake_cublas, fake_cudnn, fake_cupy

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", networks())
def test_random_plans(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    tolerance = TOLERANCES[dtype]
    machine, graph = fake_cupy.install(monkeypatch), networks()[name]
    fake_cupy.few_kernels(monkeypatch, np.dtype(dtype).itemsize)
    update = Update(graph, 5, 1, lambda engine: SGD(0.1, momentum=0.9, weight_decay=1e-3), 0.1)
    engine = get_engine("cupy", dtype)
    ours, exact = (Reference(update, e, measure(dtype)) for e in (engine, oracle(engine, dtype)))
    assert max(exact.beside(ours).values()) <= tolerance
    random = Random(name)
    for procs in (1, 2, 3, 4, 5, 6) if dtype == "float64" else (6,):
        machine.scheduler.seed(procs)
        lean = procs % 2 == 0
        assert verify_virtual(ours, random_plan(graph, 5, procs, random, lean)).worst <= tolerance


@pytest.mark.parametrize("name", ["planes", "volumes", "small blocks", "voxels"])
def test_random_plans_with_cudnn_and_cublas(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(fake_cudnn, "executed", [])
    machine, graph = fake_cupy.install(monkeypatch, cudnn=fake_cudnn, cublas=fake_cublas), networks()[name]
    fake_cupy.few_kernels(monkeypatch, 4)
    update = Update(graph, 5, 1, lambda engine: SGD(0.1, momentum=0.9, weight_decay=1e-3), 0.1)
    engine = get_engine("cupy", "float32", cudnn=True)
    ours, exact = (Reference(update, e, measure("float32")) for e in (engine, oracle(engine, "float32")))
    assert max(exact.beside(ours).values()) <= TOLERANCES["float32"]
    machine.scheduler.seed(6)
    assert verify_virtual(ours, random_plan(graph, 5, 6, Random(name))).worst <= TOLERANCES["float32"]
    assert {ran for ran, _ in fake_cudnn.executed} >= {"fprop", "dgrad", "wgrad"}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", networks())
def test_half_types_hold_activations_and_multiply(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    """Beside float64, to a few roundings to 8 or 11 bits; weights, their gradients and statistics are float32 or float64."""
    machine, graph = fake_cupy.install(monkeypatch), networks()[name]
    fake_cupy.few_kernels(monkeypatch, 2)
    rule, scale = (lambda engine: SGD(0.1, momentum=0.9, weight_decay=1e-3)), LOSS_SCALES.get(dtype, 1.0)
    update = Update(graph, 5, 1, rule, 0.1, loss_scale=scale)
    engine = get_engine("cupy", dtype)
    assert (engine.dtype, engine.activations.name) == (np.dtype("float32"), dtype)
    ours, exact = (Reference(update, e, measure(dtype)) for e in (engine, NumpyEngine("float64")))
    assert worst_of_large(exact, exact.beside(ours)) < HALVES[dtype]
    products = [n for n in machine.launches if n.startswith(("gemm", "conv_", "grouped"))]
    assert products and all(f"<{TYPES[dtype]}" in n for n in products)
    random = Random(name)
    for procs in (3, 6):
        machine.scheduler.seed(procs)
        assert worst_of_large(exact, verify_virtual(ours, random_plan(graph, 5, procs, random)).tensors) < HALVES[dtype]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", networks())
def test_nothing_passes_through_the_host(monkeypatch: pytest.MonkeyPatch, name: str, training: bool) -> None:
    """In a step or an evaluation with all metrics the host reads what it wants to know, once, and gives samples."""
    machine, graph, dtype = fake_cupy.install(monkeypatch), networks()[name], "float32"
    fake_cupy.few_kernels(monkeypatch, 4)
    engine: Any = get_engine("cupy", dtype)
    program = lower(graph, Plan(Grid()), 5, training=training)
    state = initial_state(graph.params(), dict(program.params), 0, 1, engine.dtype)
    update = Update(graph, 5, 1, lambda engine: SGD(0.1), 0.1)
    executor = Executor(program, engine, SingleTransport(), {n: engine.from_host(a) for n, a in state.items()})
    rule = SGD(0.1)
    rule.engine = engine
    executor.on_update = lambda params, grads: rule.step(params, grads, 0.1)
    feeds = update.feeds(executor)
    read: list[Any] = []
    monkeypatch.setattr(CupyDevice, "to_host", lambda *a: pytest.fail("the host reads in the middle of a step"))
    fetch = CupyDevice.fetch
    monkeypatch.setattr(CupyDevice, "fetch", lambda self, a: (read.append(a), fetch(self, a))[1])
    monkeypatch.setattr(CupyDevice, "synchronize", lambda self: pytest.fail("the host waits in the middle of a step"))
    executor.run(feeds)
    wanted = [name for name in program.results if name.partition("/")[0] in SMALL]
    assert "loss" in wanted and len(read) == len(wanted) and machine.launches
    if not training and name != "flags":  # which has no metrics
        assert len(wanted) > 1
    assert np.isfinite(executor.value("loss"))


def run_file(tmp_path: Path, loss: str = "cross_entropy") -> str:
    layers = [
        {"op": "conv", "filters": 4, "kernel": 3, "pad": 1},
        {"op": "norm"},
        {"op": "relu"},
        {"op": "conv", "filters": 3, "kernel": 3, "pad": 1, "bias": True},
    ]
    train = {"batch": 4, "loss": loss, "optimizer": {"name": "sgd", "lr": 0.1}}
    run = {"model": {"input": [7, 6, 2], "layers": layers}, "data": {"train": "synthetic"}, "train": train}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(run))
    return str(file)


@pytest.mark.parametrize("dtype", ["float64", *HALVES])
def test_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    """It finds ranks that count otherwise, in half types, too; what rounding makes alone passes."""
    machine = fake_cupy.install(monkeypatch)
    fake_cupy.few_kernels(monkeypatch, 2 if dtype in HALVES else 8)
    options = ["--config", run_file(tmp_path), "--procs", "4", "--random-plans", "2", "--engine", "cupy"]
    assert main([*options, "--dtype", dtype]) == 0
    assert f"(cupy {dtype}) against one (numpy float64)" in capsys.readouterr().out and machine.launches
    right = Bound.count
    monkeypatch.setattr(Bound, "count", lambda b, varying: right(b, varying) * (2 if b.rank else 1))
    assert main([*options, "--dtype", dtype]) == 1


def test_losses_whose_gradients_cannot_be_scaled_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_cupy.install(monkeypatch)
    monkeypatch.setattr(loss_scale, "loss_gradient", lambda kernel: None)
    with pytest.raises(ConfigError, match="says how to scale its gradient"):
        main(["--config", run_file(tmp_path), "--procs", "2", "--engine", "cupy", "--dtype", "float16"])
