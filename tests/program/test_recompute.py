"""Recomputed activations: the same results to the last bit, on any grid and with any stages; moves and kernels that are there are those that are priced."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.cost.machine import find_machine
from lbpar.cost.memory import memory
from lbpar.cost.price import price
from lbpar.errors import PlanError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.order import BUCKET_BYTES
from lbpar.program.plan import Pipeline, Plan
from lbpar.program.recompute import is_again
from lbpar.program.steps import Compute, Free, Program, Start, reads, writes
from tests.util.graphs import random_graph, residual_network
from tests.util.run import Run, random_pipeline, random_plan, random_state, run, samples

GRIDS = [(1,), (2,), (3,), (2, 2), (2, 3), (4,), (5,), (6,)]


def assert_equal(a: Run, b: Run) -> None:
    """Every value, parameter and result, bit for bit."""
    for value in sorted(b.comparable()):
        assert np.array_equal(a.value(value), b.value(value), equal_nan=True), value
    for name in b.program.params:
        assert np.array_equal(a.state(name), b.state(name)), name
    for ours, theirs in zip(a.results, b.results, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[k], theirs[k]) for k in ours)


def some(graph: Graph, rng: np.random.Generator) -> tuple[str, ...]:
    share = rng.choice([0.3, 0.7, 1.0])
    return tuple(n.name for n in graph.ops if n is not graph.loss and rng.random() < share)


def again(program: Program) -> list[str]:
    """The arrays that are computed again."""
    return [b for s in program.steps for b in writes(s) if is_again(b)]


@pytest.mark.parametrize("seed", range(60))
def test_any_layers_on_any_grid_give_the_same_bits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph, sizes = random_graph(rng), GRIDS[seed % len(GRIDS)]
    batch = int(rng.integers(1, 7))
    feeds, state = samples(graph, batch, rng), random_state(graph, rng)
    pipeline = None
    if seed % 3 == 0 and len(sizes) > 1 and sizes[0] <= len(graph.ops):
        pipeline = random_pipeline(graph, sizes[0], 0, rng, int(rng.integers(1, 4)))
    plan = random_plan(graph, batch, Grid(sizes), rng, pipeline=pipeline)
    options = {"state": state, "rate": 0.05, "steps": 2, "fused": bool(rng.random() < 0.7)}
    options |= {"rims": bool(rng.random() < 0.5), "bucket_bytes": BUCKET_BYTES, "keep": bool(rng.random() < 0.5)}
    lean = Plan(plan.grid, plan.ops, plan.pipeline, some(graph, rng))
    a, b = run(graph, lean, batch, feeds, **options), run(graph, plan, batch, feeds, **options)
    if options["keep"]:
        assert_equal(a, b)
    else:  # arrays are gone, and nothing reads what is
        assert all(np.array_equal(a.state(n), b.state(n)) for n in b.program.params)
        assert all(np.array_equal(x[k], y[k]) for x, y in zip(a.results, b.results, strict=True) for k in y)


def blocks(rank: int = 2) -> Graph:
    g = GraphBuilder(input=(8,) * rank + (3,))
    x = g.input
    for i in range(4):
        x = g.relu(g.norm(g.conv(x, 4, 3, pad=1, bias=False, name=f"c{i}"), name=f"n{i}"), name=f"r{i}")
    return g.build(g.conv(x, 2, 1, name="head")).with_loss(LOSSES["cross_entropy"]())


ALL = (*(f"{kind}{i}" for i in range(3) for kind in "cnr"), "n3", "r3")


def spatial(graph: Graph, ways: int, names: tuple[str, ...] = ()) -> Plan:
    loops = {n.name: n.op.loops(graph.input_shapes(n.name, 2)) for n in graph.ops}
    return Plan(Grid((ways,)), {n: {"H": (0,)} for n, own in loops.items() if "H" in own}, recompute=names)


def test_steps_that_are_done_again_are_priced_and_counted() -> None:
    """The halos of outputs that are computed again are exchanged again; statistics are summed over ranks once."""
    graph, machine = blocks(), find_machine("laptop")
    plain, lean = (lower(graph, spatial(graph, 2, names), 2) for names in ((), ("c1", "r1", "r2")))
    assert again(lean) == ["r2:y@again", "r2:y@again1", "c1:y@again", "r1:y@again", "r1:y@again1"]
    more = [s for s in lean.moves if is_again(s.dst)]
    assert [(s.move.kind, s.node, s.phase) for s in more] == [("halo", "c3", "backward"), ("halo", "c2", "backward")]
    kinds = [[s.move.kind for s in p.moves].count("allreduce") for p in (plain, lean)]
    assert kinds[0] == kinds[1]
    twice = [s for s in lean.steps if isinstance(s, Compute) and s.writes[0] in again(lean)]
    assert [s.kernel.name for s in twice] == ["norm_relu_forward", "conv_forward", "norm_relu_forward"]
    first, second = price(plain, machine), price(lean, machine)
    assert second.bytes == first.bytes + sum(
        c.bytes for s, c in zip(lean.steps, second.steps, strict=True) if isinstance(s, Start) and is_again(s.dst)
    )
    flops = [sum(s.flops for s in p.steps) for p in (first, second)]
    added = sum(c.flops for s, c in zip(lean.steps, second.steps, strict=True) if s in twice)
    assert flops[1] == pytest.approx(flops[0] + added) and added > 0


def test_arrays_are_computed_again_just_before_they_are_read() -> None:
    graph = blocks()
    program = lower(graph, Plan(Grid(), recompute=ALL), 2)
    for i, step in enumerate(program.steps):
        for b in writes(step):
            if is_again(b):
                readers = [j for j, s in enumerate(program.steps) if b in reads(s)]
                assert readers and min(readers) > i
    norms = [
        s for s in program.steps if isinstance(s, Compute) and s.kernel.name in ("norm_running", "norm_statistics")
    ]
    assert len(norms) == 8  # each once
    assert not [b for b in again(program) if b.startswith(("head", "loss"))]


@pytest.mark.parametrize("ways", [1, 2, 3, 4])
@pytest.mark.parametrize("names", [(), ("r0", "r1", "r2", "r3"), ALL])
def test_the_peak_that_is_counted_is_what_a_rank_holds(ways: int, names: tuple[str, ...]) -> None:
    graph, rng = blocks(), np.random.default_rng(0)
    plan = spatial(graph, ways, names)
    counted = memory(lower(graph, plan, 2), "float64")
    arrays = counted.peak - counted.weights - counted.optimizer - counted.reading - counted.overhead
    held: list[int] = []
    run(graph, plan, 2, samples(graph, 2, rng), keep=False, input_grad=False, held=held)
    assert max(held) <= arrays
    assert ways > 1 or max(held) == arrays


def test_less_is_held_while_the_result_is_the_same() -> None:
    graph = blocks(3)
    some_, most, none = (memory(lower(graph, Plan(Grid(), recompute=n), 2)) for n in (("r0", "r1", "r2"), ALL, ()))
    assert some_.activations < none.activations
    # All at once: the first kernel of the backward pass needs what all others made.
    assert most.activations >= some_.activations


def test_layers_that_cannot_be_computed_again_are_refused() -> None:
    graph = blocks()
    for name in ("loss", "input", "r9"):
        with pytest.raises(PlanError, match=f"recompute: '{name}' is not a layer of"):
            lower(graph, Plan(Grid(), recompute=("r1", name)), 2)


def test_stages_keep_what_others_read() -> None:
    """What crosses a border stays on both sides; a place with several stages too."""
    graph = residual_network()
    names = [n.name for n in graph.ops]
    stages = {n: min(3, 4 * i // len(names)) for i, n in enumerate(names)}
    plan = Plan(Grid((2,)), {}, Pipeline((0,), stages, "interleaved", 4), tuple(names[:-1]))
    program = lower(graph, plan, 4)
    crossing = {x for n in graph.ops for x in n.inputs if x in stages and stages[x] != stages[n.name]}
    assert crossing and not [b for b in again(program) if b.partition(":")[0] in crossing]
    between = [s for s in program.moves if s.move.src.at != s.move.dst.at and is_again(s.dst)]
    assert again(program) and not between


def test_evaluation_has_nothing_to_compute_again() -> None:
    graph = blocks()
    a, b = (lower(graph, Plan(Grid(), recompute=names), 2, training=False) for names in ((), ALL))
    assert a.steps == b.steps


@pytest.mark.parametrize("ways", [1, 2])
def test_what_a_long_connection_needs_early_is_not_held(ways: int) -> None:
    """The far end of a skip connection is computed again for the layer that joins it, let go, and once more where its own gradients are made."""
    g = GraphBuilder(input=(8, 8, 3))
    x = skip = g.relu(g.conv(g.input, 4, 3, pad=1, name="first"), name="skip")
    for i in range(6):
        x = g.relu(g.conv(x, 4, 3, pad=1, name=f"c{i}"), name=f"r{i}")
    x = g.conv(g.concat([skip, x], name="join"), 4, 3, pad=1, name="after")
    graph, rng = g.build(x).with_loss(LOSSES["mse"]()), np.random.default_rng(0)
    plan, names = spatial(graph, ways), ("skip", "join")
    lean = Plan(plan.grid, plan.ops, recompute=names)
    program = lower(graph, lean, 2)
    skips = [b for b in again(program) if b.startswith("skip:y@again") and "." in b or b == "skip:y@again"]
    assert len(skips) == 2
    made, freed = (next(i for i, s in enumerate(program.steps) if skips[0] in of(s)) for of in (writes, freed_by))
    gradients = next(i for i, s in enumerate(program.steps) if "c5.weight:grad" in writes(s))
    assert made < freed < gradients
    feeds, state = samples(graph, 2, rng), random_state(graph, rng)
    assert_equal(run(graph, lean, 2, feeds, state=state), run(graph, plan, 2, feeds, state=state))


def freed_by(step: object) -> tuple[str, ...]:
    return step.buffers if isinstance(step, Free) else ()
