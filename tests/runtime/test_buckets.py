"""Gradients that travel together are written where they are sent from."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.base import Engine
from lbpar.engine.registry import get_engine
from lbpar.errors import EngineError
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.models.registry import build_model
from lbpar.plan.strategies import strategy_plan
from lbpar.program.lowering import lower
from lbpar.program.steps import Compute, StartMany
from lbpar.runtime.buckets import PLACED, Buckets


@pytest.fixture(params=["numpy", "onednn"])
def engine(request: pytest.FixtureRequest) -> Engine:
    try:
        return get_engine(request.param, "float32", 1)
    except EngineError as error:
        pytest.skip(str(error))


def test_messages_hold_their_gradients_and_only_others_are_copied(engine: Engine) -> None:
    graph = build_model("lenet").with_loss(CrossEntropy())
    program = lower(graph, strategy_plan("data", graph, Grid((2,)), 4), 4, bucket_bytes=40_000)
    buckets = Buckets(program, engine, 0)
    messages = [s for s in program.steps if isinstance(s, StartMany)]
    assert len(messages) > 1
    placed = {s.writes[0] for s in program.steps if isinstance(s, Compute) and s.kernel.name in PLACED}
    for message in messages:
        arrays = {}
        for number, start in enumerate(message.starts):
            shape = start.move.src.local_shape(0)
            assert start.src in buckets
            arrays[start.src] = buckets.place(start.src) if start.src in placed else np.empty(shape, np.float32)
            arrays[start.src][...] = number
        flat = buckets.take(message, arrays)
        sizes = [int(np.prod(s.move.src.local_shape(0))) for s in message.starts]
        assert flat.tolist() == np.repeat(np.arange(len(sizes)), sizes).tolist()
        for start in message.starts:
            assert np.may_share_memory(arrays[start.src], flat) == (start.src in placed)
        assert not np.may_share_memory(buckets.take(message, arrays), flat)  # the next step has a message of its own
    assert "c1:y" not in buckets


def test_kernels_write_into_places_at_any_offset(engine: Engine) -> None:
    rng = np.random.default_rng(1)
    x, dy = rng.standard_normal((5, 7)).astype("f"), rng.standard_normal((5, 3)).astype("f")
    flat = np.zeros(1 + 21 + 2, np.float32)
    out = flat[1:22].reshape(3, 7)
    got = engine.linear_backward_weights(x, dy, out)
    np.testing.assert_allclose(got, dy.T @ x, rtol=1e-5, atol=1e-6)
    assert np.may_share_memory(got, flat) and flat[0] == 0 and not flat[22:].any()
