"""Programs of several micro-batches: which moves they have, and in which order; partitions of layers as special cases."""

from __future__ import annotations

from collections import Counter

import pytest

from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import SCHEDULES, Pipeline, Plan, Schedule
from lbpar.program.steps import Accumulate, Compute, Program, Start, StartMany, Update, Wait, reads, takes_part, writes

MICROS = 3


def chain() -> Graph:
    g = GraphBuilder(input=(4, 4, 8))
    x = g.input
    for i in range(4):
        x = g.relu(g.conv(x, 8, 3, pad=1, bias=False, name=f"c{i}"), name=f"r{i}")
    return g.build(x).with_loss(LOSSES["mse"]())


def half(graph: Graph) -> dict[str, int]:
    return {n.name: int(n.name[-1] in "23" or n is graph.loss) for n in graph.ops}


def moves(program: Program) -> Counter[tuple[str, str, bool]]:
    """Phase, kind, and whether it is between stages; slices and what the loss needs left out."""
    found = (s for s in program.moves if s.move.kind != "slice" and s.node != "loss")
    return Counter((s.phase, s.move.kind, s.move.src.at != s.move.dst.at) for s in found)


def test_a_partition_of_layers_only_communicates_at_its_border() -> None:
    graph = chain()
    program = lower(graph, Plan(Grid((2,)), {}, Pipeline((0,), half(graph), "1f1b", MICROS)), 6)
    assert moves(program) == {("forward", "p2p", True): MICROS, ("backward", "p2p", True): MICROS}
    assert all(s.src.partition("#")[0] == "r1:y" for s in program.moves if s.phase == "forward" and s.node != "loss")


def test_merged_layers_gather_once_a_block() -> None:
    """Filters of one layer are the channels of the next: nothing moves between them, one sum ends the block."""
    graph = chain()
    ops = {name: {"F": (0,)} for name in ("c0", "c2")} | {name: {"C": (0,)} for name in ("r0", "r2", "c1", "c3")}
    ops |= {name: {"C": (0,)} for name in ("r1", "r3")}
    program = lower(graph, Plan(Grid((2, 2)), ops, Pipeline((1,), half(graph), "1f1b", MICROS)), 6)
    inside = Counter(s.node for s in program.moves if s.phase == "forward" and s.move.kind == "reduce_scatter")
    assert inside == {"r1": MICROS, "r3": MICROS}
    gathers = Counter(s.node for s in program.moves if s.phase == "forward" and s.move.kind == "allgather")
    assert {n: c for n, c in gathers.items() if n != "loss"} == {"c2": MICROS}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_come_after_what_they_read(schedule: Schedule) -> None:
    graph = chain()
    stages = {n.name: min(3, i // 2) for i, n in enumerate(graph.ops)} if schedule == "interleaved" else half(graph)
    program = lower(graph, Plan(Grid((2,)), {}, Pipeline((0,), stages, schedule, 4)), 8, bucket_bytes=1 << 20)
    made = set(program.params) | set(program.feeds)
    started: set[str] = set()
    for step in program.steps:
        assert set(reads(step)) <= made, step
        if isinstance(step, Wait):
            assert step.dst in started
        if isinstance(step, Start):
            started.add(step.dst)
        if isinstance(step, StartMany):
            started |= {s.dst for s in step.starts}
        made |= set(writes(step))
    assert isinstance(program.steps[-2], Update) or isinstance(program.steps[-1], Update)


def test_gradients_are_kept_until_the_last_micro_batch() -> None:
    graph = chain()
    program = lower(graph, Plan(Grid((2,)), {}, Pipeline((0,), half(graph), "1f1b", MICROS)), 7)
    for name in ("c0.weight", "c3.weight"):
        parts = [s for s in program.steps if isinstance(s, Accumulate) and s.param == name]
        assert [s.last for s in parts] == [False, False, True]
        assert [s.weight for s in parts] == pytest.approx([3 / 7, 2 / 7, 2 / 7])


def test_zero_bubble_puts_gradients_of_weights_behind_what_others_wait_for() -> None:
    """In the last stage the first micro-batch's weights wait for the next one's way back."""
    graph = chain()
    program = lower(graph, Plan(Grid((2,)), {}, Pipeline((0,), half(graph), "zero-bubble", 4)), 8)
    order = [(s.kernel.name, s.writes[0]) for s in program.steps if isinstance(s, Compute)]
    weights = order.index(("conv_backward_weights", "c3.weight:grad#0"))
    assert weights > order.index(("conv_backward_data", "c3:dx0#1"))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("loop", "kind"), [("N", "allreduce"), ("H", "halo")])
def test_buckets_and_halos_are_hidden_behind_kernels_of_their_stage(loop: str, kind: str, schedule: Schedule) -> None:
    """Between the start of a move inside a stage and its wait the stage has kernels to run; behind the last sum of gradients there is none."""
    graph = chain()
    stages = {n.name: min(3, i // 2) for i, n in enumerate(graph.ops)} if schedule == "interleaved" else half(graph)
    ops = {n.name: {loop: (0,)} for n in graph.ops if loop in n.op.loops(graph.input_shapes(n.name, 8))}
    plan = Plan(Grid((2, 2)), ops, Pipeline((1,), stages, schedule, 4))
    program = lower(graph, plan, 8, bucket_bytes=1, rims=True)
    for rank in plan.places:
        own = [s for s in program.steps if takes_part(s, program, rank)]
        hidden = 0
        for i, s in enumerate(own):
            starts = s.starts if isinstance(s, StartMany) else (s,) if isinstance(s, Start) else ()
            for start in starts:
                if start.move.kind == kind and start.move.src.at == start.move.dst.at:
                    wait = next(k for k in range(i, len(own)) if isinstance(own[k], Wait) and own[k].dst == start.dst)
                    hidden += any(isinstance(x, Compute) for x in own[i:wait])
        assert hidden >= (1 if kind == "allreduce" else 4)
