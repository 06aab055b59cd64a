"""Kernels of an engine whose work is queued on a device (a stand-in)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from lbpar.calibrate import kernel_speeds
from lbpar.calibrate.machine import measure_machine
from lbpar.config.engine import EngineConfig
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.ops.losses import CrossEntropy
from tests.util import fake_cupy


def test_a_device_is_measured_by_its_own_clock_and_its_host_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch)
    monkeypatch.setattr(kernel_speeds, "STREAM", 1 << 10)
    monkeypatch.setattr(kernel_speeds, "ON_DEVICE", 1)
    g = GraphBuilder((8, 8, 4))
    x = g.relu(g.norm(g.conv(g.input, 8, 3, pad=1, bias=False)))
    graph = g.build(g.linear(g.flatten(x), 4)).with_loss(CrossEntropy())
    found = measure_machine(EngineConfig(name="cupy", threads=1), (), 1, network=(graph, 4))
    rates = {r.kernel: r.rate for r in found.file.compute.table}
    assert {"conv_forward", "linear_backward_data", "norm_relu_forward"} <= set(rates)
    assert all(0 < rate < 1e21 for rate in rates.values())
    assert [load.taken for load in found.trust.loads] == [0.0]


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
