"""Which convolutions fall into an interior and rims, and what their parts read and write."""

from __future__ import annotations

import pytest

from lbpar.graph.builder import GraphBuilder
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.rims import split_rims
from lbpar.program.steps import Compute, Program, Wait


def program(size: int, kernel: int, ways: int = 2) -> Program:
    g = GraphBuilder((size, size, 2))
    x = g.relu(g.input, name="r")
    graph = g.build(g.conv(x, 4, kernel, pad=kernel // 2, bias=False, name="c")).with_loss(LOSSES["mse"]())
    plan = Plan(Grid((ways,)), {n.name: {"H": (0,)} for n in graph.ops})
    return lower(graph, plan, 1, fused=False, overlap=False, keep=True)


def test_a_convolution_with_a_halo_becomes_two_kernels_that_write_one_array() -> None:
    kernels = [s for s in split_rims(program(12, 3)).steps if isinstance(s, Compute)]
    inner, rims = (s for s in kernels if s.kernel.name.startswith("conv_forward"))
    assert (inner.kernel.name, rims.kernel.name) == ("conv_forward_interior", "conv_forward_rims")
    assert inner.writes == rims.writes == ("c:y",)
    assert inner.reads[0] == "r:y" and rims.reads[0].startswith("r:y@")  # without and with ghosts
    assert rims.reads[1:] == ("c.weight", "c:y")


@pytest.mark.parametrize(("size", "kernel", "ways"), [(12, 1, 2), (12, 3, 1), (4, 3, 4)])
def test_others_stay_whole(size: int, kernel: int, ways: int) -> None:
    """Without ghosts, on one process, and where blocks are all rim."""
    plain = program(size, kernel, ways)
    assert split_rims(plain) == plain


def test_only_the_rims_come_behind_the_wait() -> None:
    plain = program(12, 3)
    steps = lower(plain.graph, plain.plan, 1, rims=True).steps
    names = [s.kernel.name if isinstance(s, Compute) else type(s).__name__ for s in steps]
    wait = next(i for i, s in enumerate(steps) if isinstance(s, Wait) and s.dst.startswith("r:y"))
    assert names.index("conv_forward_interior") < wait < names.index("conv_forward_rims")
