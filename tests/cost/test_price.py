from __future__ import annotations

import numpy as np
import pytest

from lbpar.cost.kernel_time import local_extents, local_size, touched
from lbpar.cost.machine import Machine, find_machine
from lbpar.cost.price import item_of, price
from lbpar.cost.traffic import traffic
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.models.registry import build_model
from lbpar.plan.strategies import strategy_plan
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.steps import Compute
from lbpar.program.words import itemsize
from lbpar.transport.base import Sent
from tests.cost.nets import even, mixed
from tests.util.run import random_plan, run, samples

MACHINE = find_machine("perlmutter-a100")


@pytest.mark.parametrize("seed", range(4))
def test_priced_bytes_and_messages_are_those_that_the_ranks_send(seed: int) -> None:
    """The transport's books, step by step and rank by rank, against the price of the same program."""
    grid, rng, graph = Grid((2, 3)), np.random.default_rng(seed), mixed()
    out = run(graph, random_plan(graph, 5, grid, rng), 5, samples(graph, 5, rng))
    program = out.program
    priced = price(program, MACHINE, "float64")
    books = [e.transport.counter.by_tag() for e in out.executors]
    total = [0] * grid.size
    for step, cost in zip(program.steps, priced.steps, strict=True):
        if not cost.moves:
            continue
        sent = [b.get(step.dst, Sent()) for b in books]  # type: ignore[union-attr]
        assert cost.bytes == max(s.bytes for s in sent), (cost, sent)
        assert cost.messages in {s.messages for s in sent if s.bytes == cost.bytes}
        item = cost.bytes // max(1, traffic(step.move).busiest.elements)  # type: ignore[union-attr]
        for r in range(grid.size):
            total[r] += traffic(step.move).of(r).elements * item  # type: ignore[union-attr]
    assert total == [e.transport.counter.total().bytes for e in out.executors]
    assert priced.bytes >= max(total) > 0


@pytest.mark.parametrize("activations", ["float16", "float32"])
def test_half_types_are_priced_as_engines_hold_and_send_them(activations: str) -> None:
    """In two bytes, parameters and their gradients beside in four; on machines without ``half_arrays`` all in four. `verify` counts what is sent."""
    grid, graph, kinds = Grid((2, 3)), mixed(), (np.dtype("float32"), np.dtype(activations))
    program, halves = lower(graph, random_plan(graph, 5, grid, np.random.default_rng(3)), 5), activations == "float16"
    items = {s.src: item_of(program, s.src, "bfloat16", halves) for s in program.moves}
    assert items == {s.src: itemsize(program, s, *kinds) for s in program.moves}
    assert {items[s.src] for s in program.moves if s.src.endswith(":grad")} == {4}
    file = find_machine("h100-nvl8").file
    machine = Machine(file.model_copy(update={"compute": file.compute.model_copy(update={"half_arrays": halves})}))
    cost, plain = (price(program, machine, dtype) for dtype in ("bfloat16", "float32"))
    assert (cost.bytes < plain.bytes) == halves
    kernel = graph["c2"].op.forward(((64, 8, 8, 8),), True)[0]
    local = dict(kernel.loops)
    half, whole = (touched(kernel, local, "bfloat16", h) for h in (True, False))
    weights = sum(local_size(o, local, local) for o in kernel.reads if o.value in ("weight", "bias"))
    assert whole == touched(kernel, local, "float32") == 2 * half - 4 * weights


def test_one_rank_sends_nothing_and_does_all_the_work() -> None:
    graph = even()
    program = lower(graph, Plan(Grid()), 4)
    priced = price(program, MACHINE)
    assert priced.bytes == priced.messages == 0 and priced.move_seconds == 0
    kernels = [s.kernel for s in program.steps if isinstance(s, Compute)]
    assert sum(s.flops for s in priced.steps) == sum(k.flops for k in kernels)


def test_compute_is_priced_on_the_largest_block() -> None:
    """Seven samples on two ranks: four on the first, so 4/7 of the work."""
    graph = even()
    plan = strategy_plan("data", graph, Grid((2,)), 7)
    step = next(s for s in lower(graph, plan, 7).steps if isinstance(s, Compute) and s.node == "c2")
    local = local_extents(step.kernel, plan.grid, plan["c2"])
    assert local["N"] == 4
    two = price(lower(graph, plan, 7), MACHINE)
    one = price(lower(graph, Plan(Grid()), 7), MACHINE)
    share = sum(s.flops for s in two.of("c2")) / sum(s.flops for s in one.of("c2"))
    assert share == pytest.approx(4 / 7)


def test_allreduce_of_weights_in_data_parallel_training() -> None:
    """VGG-16 on 4 ranks: every rank sends 2 (p - 1) / p of its 138,357,544 parameters."""
    graph = build_model("vgg16").with_loss(CrossEntropy())
    program = lower(graph, strategy_plan("data", graph, Grid.of(4), 128), 128)
    sent = sum(s.bytes for s in price(program, MACHINE).steps if ":grad" in s.what)
    assert sent == pytest.approx(2 * 3 / 4 * 138_357_544 * 4, rel=1e-5)


def test_processes_that_share_cores_take_turns() -> None:
    """Four processes on two cores: twice the time where all have work (or repeat it), the same where two have none."""
    graph = build_model("lenet").with_loss(CrossEntropy())
    grid = Grid.of(4)
    shared = Machine(MACHINE.file.model_copy(update={"cores": 2, "levels": MACHINE.file.levels[-1:]}))
    own = Machine(MACHINE.file.model_copy(update={"levels": MACHINE.file.levels[-1:]}))
    cases = ((4, {"N": (0, 1)}, 2.0), (4, {"N": (0,)}, 2.0), (2, {"N": (0, 1)}, 1.0), (3, {"N": (0, 1)}, 1.5))
    for batch, op_grid, times in cases:
        program = lower(graph, Plan(grid, {n.name: op_grid for n in graph.ops}), batch)
        costs = zip(program.steps, price(program, own).steps, price(program, shared).steps, strict=True)
        for step, one, two in costs:
            if isinstance(step, Compute) and "N" in dict(step.kernel.loops):
                assert two.seconds == pytest.approx(times * one.seconds), step.kernel.name
