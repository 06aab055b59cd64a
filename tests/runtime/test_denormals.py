"""While an executor runs a float32 program, denormal numbers count as zero; before and after, NumPy keeps them."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.registry import get_engine
from lbpar.errors import EngineError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.runtime.executor import Executor
from lbpar.runtime.initial import initial_state
from lbpar.transport.single import SingleTransport
from tests.util.run import local_feeds, samples


def keeps_denormals() -> bool:
    return bool(np.full(3, 1e-30, np.float32)[0] * np.float32(1e-10) > 0)


@pytest.mark.parametrize("name", ["onednn", "numpy"])
def test_only_inside_a_run(name):
    try:
        engine = get_engine(name, "float32", 1)
    except EngineError as error:
        pytest.skip(str(error))
    if name == "onednn" and (engine.native is None or engine.native.lib.lbpar_flush_bits() == 0):
        pytest.skip("no compiled passes, or a processor without the switch")
    builder = GraphBuilder(input=(5, 5, 2))
    network = builder.build(builder.linear(builder.flatten(builder.conv(builder.input, 3, 3)), 4))
    graph = network.with_loss(LOSSES["cross_entropy"]())
    program = lower(graph, Plan(Grid(), {}), 2)
    state = initial_state(graph.params(), program.params, 0, 1, np.dtype(np.float32))
    executor, seen = Executor(program, engine, SingleTransport(), state), []
    executor.on_update = lambda params, grads: seen.append(keeps_denormals())
    feeds = local_feeds(program, 0, samples(graph, 2, np.random.default_rng(0)), np.float32)
    assert keeps_denormals()
    executor.run(feeds)
    assert seen
    assert set(seen) == {name == "numpy"}
    assert keeps_denormals()
