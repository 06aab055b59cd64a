from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from lbpar.calibrate import kernel_speeds
from lbpar.calibrate.kernel_speeds import Sample, measure_compute, run_samples
from lbpar.calibrate.links import Timed, fit, node_size
from lbpar.calibrate.machine import machine_of
from lbpar.calibrate.nobody import Nobody
from lbpar.calibrate.samples import networks, own_programs, samples
from lbpar.calibrate.spread import spread
from lbpar.config.engine import EngineConfig
from lbpar.cost.kernel_time import kernel_seconds, touched
from lbpar.cost.machine import Machine, find_machine
from lbpar.engine.registry import get_engine
from lbpar.errors import ConfigError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.runtime.binding import BINDERS


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_was_measured_is_what_is_priced(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of a measured shape is priced at the time that it took."""
    engine = get_engine("numpy", dtype, 1)
    g = GraphBuilder((16, 16, 8))
    graph = g.build(g.global_avg_pool(g.conv(g.input, 16, 3, pad=1, bias=False))).with_loss(CrossEntropy())
    program = lower(graph, Plan(Grid(), {}), 2, input_grad=True)
    seen: list[Sample] = []

    def once(*args: Any) -> Iterator[Sample]:
        seen.extend(run_samples(*args))
        return iter(seen)

    monkeypatch.setattr(kernel_speeds, "run_samples", once)
    compute, apart = measure_compute(engine, dtype, [program], 3)
    assert apart == pytest.approx(np.mean([s.spread for s in seen]))
    products = {r.kernel for r in compute.table if r.k > 1}
    assert products == {"conv_forward", "conv_backward_data", "conv_backward_weights"}
    assert {(r.dtype, r.taps) for r in compute.table if r.k > 1} == {(dtype, 9)}
    fast = compute.model_copy(update={"memory_bandwidth": 1e21})  # what a copy takes is not what these kernels take
    machine = Machine(find_machine("laptop").file.model_copy(update={"compute": fast}))
    for s in seen:
        if touched(s.kernel, s.local, dtype) > 1 << 12 and s.seconds > 2 * compute.overhead:
            assert float(kernel_seconds(machine, s.kernel, s.local, dtype)) == pytest.approx(s.seconds, rel=1e-2)


def test_samples_show_every_kernel_that_takes_time() -> None:
    """All kernels of the trainer are run, but for those on a few numbers, of inference, or of losses that rarely matter."""
    engine = get_engine("numpy", "float32", 1)
    seen = {s.kernel.name for s in run_samples(engine, (p for p in samples() if p.batch == 4), 1)}
    rare = {"mse", "bce", "l1", "huber", "dice", "linear", "norm_inference", "reshape", "conv"}
    rare |= {
        "label_factors",
        "class_",
        "weighed_entropy",
        "smoothed_entropy",
        "region",
        "count_known_hits",
        "softmax_first",
        "error_sums",
    }
    missing = {k for k in BINDERS if k not in seen and not any(k.startswith(r) for r in rare)}
    assert missing <= {"identity", "norm_sums", "norm_moments", "norm_backward_data_add", "thin"}


def test_auto_is_measured_and_names_are_looked_up() -> None:
    machine = machine_of("auto", EngineConfig(name="numpy", threads=1))
    assert machine.name == "auto" and machine.file.compute.table and machine.file.cores is None
    assert machine_of("auto", EngineConfig(name="numpy", threads=1)).file is machine.file
    assert machine_of("cori-knl", EngineConfig()).name == "cori-knl"
    with pytest.raises(ConfigError, match="did you mean"):
        machine_of("cori-kn", EngineConfig())


@pytest.mark.parametrize(
    ("hosts", "size"),
    [("aaaa", 4), ("aabb", 2), ("aabbaa", 2), ("abab", 1), ("aabbb", 1), ("abc", 1), ("a", 1)],
)
def test_nodes_are_runs_of_equal_length(hosts: str, size: int) -> None:
    """Also where a node comes twice, as in the third case."""
    assert node_size(hosts) == size


def timed(seconds: float, messages: float, size: int, packing: float = 0.0) -> Timed:
    return Timed("node", "allgather", 2, size, seconds, 0.0, (messages, float(size), packing))


SIZES = [(2, 256), (2, 4096), (4, 65_536), (2, 1 << 20), (2, 1 << 23)]


def test_fit_recovers_what_times_were_made_of() -> None:
    line = fit([timed(5e-6 * m + 1e-9 * n + 1e-12 * n, m, n, 1e-12 * n) for m, n in SIZES])
    assert (line.alpha, line.bandwidth, line.beyond) == (pytest.approx(5e-6), pytest.approx(1e9), None)


def test_an_outlier_does_not_bend_the_line() -> None:
    """Least squares would follow it; the sum of absolute residuals is least where most points lie."""
    times = [5e-6 * m + 1e-9 * n for m, n in SIZES]
    times[2] *= 30
    line = fit([timed(t, m, n) for t, (m, n) in zip(times, SIZES, strict=True)])
    assert (line.alpha, line.bandwidth) == (pytest.approx(5e-6), pytest.approx(1e9))


def test_bytes_that_no_cache_holds_may_take_longer() -> None:
    sizes = [(2, 1 << i) for i in range(8, 24)]
    times = [5e-6 * m + 1e-9 * n + 3e-9 * max(0, n - (1 << 16)) for m, n in sizes]
    points = [timed(t, m, n) for t, (m, n) in zip(times, sizes, strict=True)]
    line = fit(points, [n for _, n in sizes[2:-1]])
    assert (line.knee, line.beyond) == (1 << 16, pytest.approx(1 / 4e-9))
    assert [line.seconds(p) for p in points] == pytest.approx(times)
    assert fit([timed(5e-6 * m + 1e-9 * n, m, n) for m, n in sizes], [1 << 16]).beyond is None


@pytest.mark.parametrize("times", [[1e-6] * 5, [1e-10 * n**1.5 for _, n in SIZES]])
def test_what_no_line_explains_has_large_residuals_and_no_unknown_below_its_least(times: list[float]) -> None:
    points = [timed(t, m, n) for t, (m, n) in zip(times, SIZES, strict=True)]
    line = fit(points)
    assert line.alpha >= 1e-8 and line.bandwidth <= 1e13
    assert line.error == pytest.approx(sum(abs(line.seconds(p) / p.seconds - 1) for p in points))


def test_spread_is_half_the_distance_of_the_quartiles() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 1000.0]) == pytest.approx(1 / 3)
    assert spread([7.0]) == 0.0


def test_a_networks_own_kernels_are_measured_on_the_blocks_that_ranks_have() -> None:
    """Every split of two ranks, without the other rank; the numbers that arrive from it are zero."""
    g = GraphBuilder((8, 8, 4))
    x = g.relu(g.norm(g.conv(g.input, 8, 3, pad=1, bias=False, name="conv")))
    graph = g.build(g.linear(g.flatten(x), 4)).with_loss(CrossEntropy())
    found = list(run_samples(get_engine("numpy", "float32", 1), own_programs(graph, 4, 2), 1))
    blocks = {tuple(s.local[loop] for loop in "NFCHW") for s in found if s.kernel.name == "conv_forward"}
    whole = (4, 8, 4, 8, 8)
    assert blocks == {whole, *(tuple(e // 2 if i == j else e for j, e in enumerate(whole)) for i in range(5))}


def test_nobody_answers_with_zeros() -> None:
    transport = Nobody(Grid((2,)))
    assert transport.allgather(np.ones(3), [3, 2], (0,)).wait().tolist() == [0.0] * 5
    assert transport.reduce_scatter(np.ones(5), [3, 2], (0,)).wait().shape == (3,)
    assert transport.allreduce(np.ones(2), (0,)).wait().tolist() == [1.0, 1.0]
    assert transport.exchange({1: np.ones(2)}, {1: 4}, np.float64, (0,)).wait()[1].tolist() == [0.0] * 4


def test_the_samples_have_a_loss_and_a_batch() -> None:
    for graph, batch in islice(networks(), 3):
        assert graph.loss is not None and batch >= 1


def test_a_kernel_that_takes_no_time_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reshape on a device, whose queue has nothing to do."""
    engine = get_engine("numpy", "float32", 1)
    found = [replace(s, seconds=0.0) for s in run_samples(engine, islice(samples(), 1), 1)]
    monkeypatch.setattr(kernel_speeds, "run_samples", lambda *_: iter(found))
    monkeypatch.setattr(kernel_speeds, "STREAM", 1 << 10)
    compute, _ = measure_compute(engine, "float32", [], 1)
    machine = Machine(find_machine("laptop").file.model_copy(update={"compute": compute}))
    assert all(0 <= float(kernel_seconds(machine, s.kernel, s.local, "float32")) < 1e-5 for s in found)
