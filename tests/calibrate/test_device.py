"""Kernels of an engine whose work is queued on a device (a stand-in)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lbpar.calibrate import command, kernel_speeds, machine
from lbpar.calibrate.machine import measure_machine
from lbpar.config.engine import EngineConfig
from lbpar.engine import registry
from lbpar.errors import EngineError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.ops.losses import CrossEntropy
from tests.util import fake_cudnn, fake_cupy


@pytest.mark.parametrize(("arithmetic", "cudnn"), [("float32", None), ("tf32", None), ("float32", fake_cudnn)])
def test_a_device_is_measured_by_its_own_clock_and_its_host_may_wait(
    monkeypatch: pytest.MonkeyPatch, arithmetic: str, cudnn: Any
) -> None:
    fake_cupy.install(monkeypatch, cudnn=cudnn)
    monkeypatch.setattr(kernel_speeds, "STREAM", 1 << 10)
    monkeypatch.setattr(kernel_speeds, "ON_DEVICE", 1)
    g = GraphBuilder((8, 8, 4))
    x = g.relu(g.norm(g.conv(g.input, 8, 3, pad=1, bias=False)))
    graph = g.build(g.linear(g.flatten(x), 4)).with_loss(CrossEntropy())
    found = measure_machine(EngineConfig(name="cupy", threads=1, tf32=arithmetic == "tf32"), (), 1, network=(graph, 4))
    rates = {r.kernel: r.rate for r in found.file.compute.table}
    assert {"conv_forward", "linear_backward_data", "norm_relu_forward", "norm_statistics"} <= set(rates)
    assert all(0 < rate < 1e21 for rate in rates.values())
    assert [load.taken for load in found.trust.loads] == [0.0]
    assert {r.dtype for r in found.file.compute.table} == set(found.file.compute.peak) == {arithmetic}


def test_the_run_files_options_of_gpus_are_those_that_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_cupy.install(monkeypatch)
    asked = EngineConfig(name="cupy", threads=1, tf32=True, cudnn=False, workspace=4096)
    made: Any = machine._alike(asked)
    assert made.tf32 and made.graphs is None and made._card.workspace == 4096
    seen = list[EngineConfig]()

    def build(config: EngineConfig) -> Any:
        seen.append(config)
        raise EngineError("enough")

    monkeypatch.setattr(registry, "build_engine", build)
    model = {"input": [4], "layers": [{"op": "linear", "features": 2}]}
    options = {"tf32": True, "cudnn": False, "workspace": 4096}
    run = {"model": model, "data": {"train": "synthetic"}, "train": {"batch": 4}, "engine": {"name": "cupy", **options}}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(run))
    with pytest.raises(EngineError, match="enough"):
        command.main(["--out", str(tmp_path / "m.yaml"), "--engine", "cupy", "--threads", "1", "--config", str(file)])
    assert seen == [asked]


def test_no_cache_of_a_device_holds_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second-level cache of a B200 has 126 MB, of an H100 50: a copy between arrays that it holds says nothing of memory."""
    made = list[int]()

    def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
        made.append(math.prod(shape) * dtype().itemsize)
        return SimpleNamespace(nbytes=made[-1])

    device: Any = SimpleNamespace(host=False, zeros=zeros, capacity=80e9)
    monkeypatch.setattr(kernel_speeds, "_median", lambda *_: 1.0)
    for measure in (kernel_speeds.copy_speed, kernel_speeds.part_speeds):
        made.clear()
        measure(device, 1)
        assert sum(made) > 8 * 126e6
