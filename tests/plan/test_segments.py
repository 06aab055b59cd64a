"""Segments: cut by size of outputs; what others read, and the last one, is kept."""

from __future__ import annotations

import pytest

from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.plan.segments import recomputed, segments


def chain(skip: bool = False) -> Graph:
    g = GraphBuilder((4, 4, 2))
    x = g.input
    for i in range(6):
        x = g.relu(x, name=f"r{i}")
    return g.build(g.add([x, "r1"], name="end") if skip else x).with_loss(LOSSES["mse"]())


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (1, ()),
        (2, ("r0", "r1")),
        (3, ("r0", "r2")),
        (6, ()),
        (100, ()),
    ],
)
def test_a_chain(count: int, names: tuple[str, ...]) -> None:
    assert segments(chain(), count) == names


def test_outputs_that_another_segment_reads_are_kept() -> None:
    assert segments(chain(skip=True), 2) == ("r0", "r2")


def test_segments_have_outputs_of_equal_size() -> None:
    """Two large outputs of 128 elements, six small ones: the first large one is half."""
    g = GraphBuilder((8, 8, 2))
    x = g.relu(g.relu(g.max_pool(g.input, 8, name="pool"), name="s0"), name="s1")
    x = g.upsample(x, 8, name="l0")
    graph = g.build(g.relu(x, name="l1")).with_loss(LOSSES["mse"]())
    assert segments(graph, 2) == ("pool", "s0", "s1")


def test_what_a_run_file_asks_for() -> None:
    assert recomputed(None, chain()) is None and recomputed("auto", chain()) is None
    assert recomputed(("r1", "r3"), chain()) == ("r1", "r3") and recomputed((), chain()) == ()
    assert recomputed(2, chain()) == ("r0", "r1")
