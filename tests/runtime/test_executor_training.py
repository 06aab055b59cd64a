"""Thirty training steps of a residual network with batch norm and dropout are the same on any grid.

Guards convergence with batch norm on many ranks (chainer/chainermn #203, #254; Lightning-AI/pytorch-lightning #6789).
"""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.registry import get_engine
from lbpar.errors import EngineError
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.transport.virtual import VirtualTransport, VirtualWorld
from tests.util.graphs import residual_network
from tests.util.run import cut
from tests.util.steps import BATCH, Rank, batches, five_plans, train_alone

GRAPH = residual_network()


@pytest.fixture(scope="module")
def alone() -> tuple[np.ndarray, Rank]:
    losses, rank = train_alone(GRAPH, batches(GRAPH))
    assert losses[-5:].mean() < 0.8 * losses[:5].mean(), "it learns"
    return losses, rank


@pytest.mark.parametrize("which", five_plans(GRAPH, Grid((2, 2))))
@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2), (3, 2)], ids=str)
def test_loss_curve_and_state(alone: tuple[np.ndarray, Rank], sizes: tuple[int, ...], which: str) -> None:
    grid = Grid(sizes)
    program = lower(GRAPH, five_plans(GRAPH, grid)[which], BATCH, bucket_bytes=1000)
    world, feeds = VirtualWorld(grid), batches(GRAPH)

    def job(transport: VirtualTransport) -> tuple[np.ndarray, Rank]:
        rank = Rank(program, GRAPH, transport)
        return rank.train(feeds), rank

    for losses, rank in world.run(job):
        np.testing.assert_allclose(losses, alone[0], rtol=1e-8)
        for name, block in rank.state.items():
            want = cut(program.params[name].box(rank.rank), alone[1].state[name])
            np.testing.assert_allclose(block, want, rtol=1e-7, atol=1e-8, err_msg=name)
            if name in rank.optimizer.state:
                assert rank.optimizer.state[name]["momentum"].shape == block.shape
    world.check_idle()


@pytest.mark.parametrize("engine", ["numpy", "onednn"])
@pytest.mark.parametrize("which", five_plans(GRAPH, Grid((2, 2))))
def test_replicas_stay_equal_in_every_bit(which: str, engine: str) -> None:
    """Ranks that share a parameter would drift apart if one of them rounded its gradient differently."""
    try:
        kernels = get_engine(engine, "float32", 1)
    except EngineError as error:
        pytest.skip(str(error))
    grid = Grid((2, 2))
    program = lower(GRAPH, five_plans(GRAPH, grid)[which], BATCH, bucket_bytes=1000)
    feeds = batches(GRAPH, 10)

    def job(transport: VirtualTransport) -> Rank:
        rank = Rank(program, GRAPH, transport, engine=kernels)
        rank.train(feeds)
        return rank

    ranks = VirtualWorld(grid).run(job)
    for name, layout in program.params.items():
        first: dict[object, np.ndarray] = {}
        for rank in ranks:
            block = first.setdefault(layout.box(rank.rank), rank.state[name])
            np.testing.assert_array_equal(rank.state[name], block, err_msg=f"{name} of rank {rank.rank}")
