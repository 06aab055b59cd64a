"""Norms in one kernel, for engines that find statistics and what is made by them in one go."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.steps import Compute, Free, Program
from lbpar.program.whole_norms import whole_norms
from lbpar.transport.single import SingleTransport
from tests.util.steps import Rank, batches


def network() -> Graph:
    """Norms alone, with ReLU, with ReLU and a sum, and one behind which another layer reads the norm's result twice."""
    g = GraphBuilder(input=(6, 5, 4))
    x = g.relu(g.norm(g.conv(g.input, 4, 3, pad=1, bias=False), name="n1"), name="r1")
    x = g.relu(g.add([g.norm(g.conv(x, 4, 3, pad=1), name="n2"), x]), name="r2")
    y = g.norm(x, name="n3")
    x = g.instance_norm(g.add([g.relu(y), g.sigmoid(y)]), name="n4")
    x = g.group_norm(g.layer_norm(x, name="n5"), 2, affine=False, name="n6")
    return g.build(g.linear(g.flatten(x), 3)).with_loss(LOSSES["cross_entropy"]())


def kernels(program: Program) -> Counter[str]:
    return Counter(s.kernel.name for s in program.steps if isinstance(s, Compute) and "norm_" in s.kernel.name)


def test_each_norm_is_one_kernel() -> None:
    program = lower(network(), Plan(Grid()), 7)
    paired = whole_norms(program)
    assert kernels(program)["norm_statistics"] == 3 and len(paired.steps) == len(program.steps)
    parts = {
        "norm_statistics",
        "norm_apply",
        "norm_relu_forward",
        "norm_add_relu_forward",
        *(f"sample_norm_{p}" for p in ("sums", "moments", "apply")),
    }
    assert parts <= set(kernels(program)) and not parts & set(kernels(paired))
    assert kernels(paired)["norm_forward"] == kernels(paired)["sample_norm_forward"] == 3
    assert sum(s == Free(()) for s in paired.steps) == 3 + 2 * 3
    assert whole_norms(paired) == paired


def test_split_statistics_are_left() -> None:
    program = lower(
        network(), Plan(Grid((2,)), {"n1": {"N": (0,)}, "n2": {"C": (0,)}, "n4": {"H": (0,)}, "n5": {"N": (0,)}}), 7
    )
    assert kernels(whole_norms(program))["norm_forward"] == 2  # of channels each rank has all rows
    assert kernels(whole_norms(program))["norm_sums"] == kernels(whole_norms(program))["sample_norm_sums"] == 1


def test_what_is_made_twice_gets_the_same_bits() -> None:
    program = lower(network(), Plan(Grid(), recompute=("r1", "n4")), 7)
    assert kernels(whole_norms(program)) - kernels(program) == Counter(norm_forward=2, sample_norm_forward=2)


@pytest.mark.parametrize("recompute", [(), ("n1", "r1")])
def test_training_is_the_same(recompute: tuple[str, ...]) -> None:
    graph, trained = network(), []
    for whole in (False, True):
        engine = NumpyEngine(np.float64)
        engine.whole_norms = whole
        rank = Rank(lower(graph, Plan(Grid(), recompute=recompute), 7), graph, SingleTransport(), engine=engine)
        losses = list(rank.train(batches(graph, 4)))
        assert (kernels(rank.executor.program)["norm_forward"] > 0) == whole
        trained.append((losses, rank.state))
    (losses, state), (others, other) = trained
    assert losses == others
    for name, array in state.items():
        np.testing.assert_array_equal(other[name], array, err_msg=name)
