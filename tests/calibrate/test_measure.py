from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from lbpar.calibrate.kernel_speeds import measure_compute, run_samples
from lbpar.calibrate.links import _fit, node_size
from lbpar.calibrate.machine import machine_of
from lbpar.calibrate.samples import samples
from lbpar.config.engine import EngineConfig
from lbpar.cost.kernel_time import kernel_seconds, local_extents, matrix_shape
from lbpar.cost.machine import Machine, find_machine
from lbpar.engine.registry import get_engine
from lbpar.errors import ConfigError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.runtime.binding import BINDERS


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_was_measured_is_what_is_priced(dtype: str) -> None:
    """A kernel of a measured shape is priced at the time that it took."""
    engine = get_engine("numpy", dtype, 1)
    g = GraphBuilder((16, 16, 8))
    graph = g.build(g.global_avg_pool(g.conv(g.input, 16, 3, pad=1, bias=False))).with_loss(CrossEntropy())
    compute = measure_compute(engine, dtype, [(graph, 2)], 1)
    assert {r.kernel for r in compute.table} == {"conv_forward", "conv_backward_data", "conv_backward_weights"}
    assert {(r.dtype, r.taps) for r in compute.table} == {(dtype, 9)}
    machine = Machine(find_machine("laptop").file.model_copy(update={"compute": compute}))
    for sample in run_samples(engine, graph, 2, 1):
        local = local_extents(sample.kernel, Grid(), {})
        shape = matrix_shape(sample.kernel, local)
        if shape is not None:
            (row,) = [r for r in compute.table if r.kernel == sample.kernel.name]
            assert machine.rate(row.kernel, *shape, dtype, 9) == pytest.approx(row.rate, rel=1e-3)
            assert float(kernel_seconds(machine, sample.kernel, local, dtype)) > compute.overhead


def test_samples_show_every_kernel_that_takes_time() -> None:
    """All kernels of the trainer are run, but for those on a few numbers, of inference, or of losses that rarely matter."""
    engine = get_engine("numpy", "float32", 1)
    graphs = [(g, n) for g, n in samples() if n == 4]
    seen = {s.kernel.name for graph, batch in graphs for s in run_samples(engine, graph, batch, 1)}
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
    assert missing <= {"identity", "norm_sums", "norm_moments", "norm_backward_data_add"}


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


def test_fit_recovers_alpha_and_beta_and_keeps_both_positive() -> None:
    a = np.array([[2.0, 1e3], [2.0, 1e6], [4.0, 1e4]])
    times = a @ np.array([5e-6, 1e-9])
    assert _fit(a / times[:, None], np.ones(3)) == pytest.approx((5e-6, 1e-9))
    for truth in ((-1e-6, 1e-9), (5e-6, -1e-12)):
        times = np.maximum(a @ np.array(truth), 1e-8)
        alpha, beta = _fit(a / times[:, None], np.ones(3))
        assert alpha > 0 and beta > 0


def test_the_first_samples_have_a_loss_and_a_batch() -> None:
    for graph, batch in islice(samples(), 3):
        assert graph.loss is not None and batch >= 1
