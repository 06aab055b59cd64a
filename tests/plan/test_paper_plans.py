"""The papers' algorithms are plans: each yields exactly its collectives, groups and volumes, in all three passes.

Stationary-X, -Y, -W: N. Dryden et al., "Channel and filter parallelism for large-scale CNN training", SC'19, as in DiHydrogen's
legacy DistConv. 1.5D: A. Gholami et al., "Integrated model, batch and domain parallelism in training neural networks", SPAA'18.
One weird trick: A. Krizhevsky, arXiv 1404.5997. Alternating splits: V. Elango, "PaSE", IPDPS'21.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.exchange import volume
from lbpar.layout.grid import Axes, Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import OpGrid, Plan
from lbpar.program.steps import Program
from tests.util.counting import assert_counted
from tests.util.run import assert_same, run, samples, serial

BATCH = 8


@dataclass(frozen=True)
class Line:
    """One collective of a layer: what moves, how, over which axes, and the elements that each rank sends."""

    phase: str
    value: str
    kind: str
    axes: Axes
    elements: int


def ledger(program: Program) -> set[Line]:
    """All collectives but those of the loss and of the layer before, as long as every rank sends the same."""
    lines = set()
    for m in program.moves:
        if m.node in ("loss", "first") or m.move.kind == "slice":
            continue
        sent = {volume(m.move, r).elements for r in range(program.plan.grid.size)}
        assert len(sent) == 1, f"{m.move} is uneven: choose sizes that divide"
        lines.add(Line(m.phase, m.src.split("@")[0], m.move.kind, m.move.axes, sent.pop()))
    return lines


def check(graph: Graph, plan: Plan, want: set[Line]) -> Program:
    """The program has exactly these collectives, and is right."""
    program = lower(graph, plan, BATCH)
    got = ledger(program)
    assert got == want, f"unexpected {got - want}, missing {want - got}"
    feeds = samples(graph, BATCH, np.random.default_rng(0))
    done = run(graph, plan, BATCH, feeds, input_grad=False)
    assert_same(done, serial(graph, BATCH, feeds, input_grad=False))
    assert_counted(done)
    return program


def groups(grid: Grid, axes: Axes) -> set[tuple[int, ...]]:
    return {grid.group(axes, r) for r in range(grid.size)}


# One convolution whose x and y are both cut G ways along their channels.

C, F, K, H, W = 12, 24, 3, 6, 4


def conv_layer() -> Graph:
    """``first`` makes dx needed; stride 2 in H makes S_x and S_y differ."""
    g = GraphBuilder(input=(H, W, C))
    x = g.sigmoid(g.conv(g.input, C, 1, bias=False, groups=C, name="first"), name="before")
    y = g.conv(x, F, K, stride=(2, 1), pad=1, bias=False, name="conv")
    return g.build(g.sigmoid(y, name="after")).with_loss(LOSSES["mse"]())


def conv_plan(grid: Grid, samples: Axes, conv: OpGrid, x: Axes, y: Axes) -> Plan:
    n = {"N": samples}
    return Plan(
        grid,
        {
            "first": {"G": x, **n},
            "before": {"C": x, **n},
            "conv": {**conv, **n},
            "after": {"C": y, **n},
            "loss": {"F": y, **n},
        },
    )


def sizes(p_n: int) -> tuple[int, int, int]:
    """S_x, S_y of one sample group, and the number of weights."""
    n = BATCH // p_n
    return n * C * H * W, n * F * (H // 2) * W, F * C * K * K


def _allreduce(n: int, p: int) -> int:
    assert n % p == 0
    return 2 * (p - 1) * n // p


@pytest.mark.parametrize(("g", "p_n"), [(2, 1), (4, 1), (3, 2), (2, 4), (6, 2)])
def test_stationary_x(g: int, p_n: int) -> None:
    """Forward: reduce-scatter of y. Backward: allgather of dy, kept for both products; dx needs nothing. Segmented allreduce of dw."""
    grid, (channel, sample) = Grid((g, p_n)), ((0,), (1,))
    _, s_y, w = sizes(p_n)
    ar = {
        Line("backward", "conv.weight:grad", "allreduce", sample, _allreduce(w // g, p_n))
    }  # of one process: no volume
    lines = {
        Line("forward", "conv:y", "reduce_scatter", channel, (g - 1) * s_y // g),
        Line("backward", "after:dx0", "allgather", channel, (g - 1) * s_y // g),
    }
    program = check(conv_layer(), conv_plan(grid, sample, {"C": channel}, channel, channel), lines | ar)
    assert sum(x.elements for x in lines) == 2 * (g - 1) * s_y // g  # V_X
    assert program.params["conv.weight"].local_shape(0) == (F, K, K, C // g)
    assert groups(grid, channel) == {tuple(range(i * g, (i + 1) * g)) for i in range(p_n)}
    assert groups(grid, sample) == {tuple(range(i, g * p_n, g)) for i in range(g)}


@pytest.mark.parametrize(("g", "p_n"), [(2, 1), (4, 1), (3, 2), (2, 4), (6, 2)])
def test_stationary_y(g: int, p_n: int) -> None:
    """Forward: allgather of x, kept until backward-weights. Backward-data: reduce-scatter of dx. Segmented allreduce of dw."""
    grid, (channel, sample) = Grid((g, p_n)), ((0,), (1,))
    s_x, _, w = sizes(p_n)
    lines = {
        Line("forward", "before:y", "allgather", channel, (g - 1) * s_x // g),
        Line("backward", "conv:dx0", "reduce_scatter", channel, (g - 1) * s_x // g),
    }
    ar = {Line("backward", "conv.weight:grad", "allreduce", sample, _allreduce(w // g, p_n))}
    program = check(conv_layer(), conv_plan(grid, sample, {"F": channel}, channel, channel), lines | ar)
    assert sum(x.elements for x in lines) == 2 * (g - 1) * s_x // g  # V_Y
    assert program.params["conv.weight"].local_shape(0) == (F // g, K, K, C)


@pytest.mark.parametrize(("g_c", "g_f", "p_n"), [(2, 2, 1), (2, 3, 1), (3, 2, 2), (2, 2, 2), (1, 4, 1), (4, 1, 1)])
def test_stationary_w(g_c: int, g_f: int, p_n: int) -> None:
    """x is gathered inside the channel sub-group, y scattered inside the filter sub-group; the same reversed in the backward pass."""
    grid, (c, f, sample) = Grid((g_c, g_f, p_n)), ((0,), (1,), (2,))
    s_x, s_y, w = sizes(p_n)
    x_part, y_part = (g_f - 1) * s_x // (g_c * g_f), (g_c - 1) * s_y // (g_c * g_f)
    lines = {
        Line("forward", "before:y", "allgather", f, x_part),
        Line("forward", "conv:y", "reduce_scatter", c, y_part),
        Line("backward", "after:dx0", "allgather", c, y_part),
        Line("backward", "conv:dx0", "reduce_scatter", f, x_part),
    }
    g = g_c * g_f
    ar = {Line("backward", "conv.weight:grad", "allreduce", sample, _allreduce(w // g, p_n))}
    plan = conv_plan(grid, sample, {"C": c, "F": f}, (0, 1), (1, 0))
    program = check(conv_layer(), plan, lines | ar)
    v_w = 2 * (g_f - 1) / g_f * s_x / g_c + 2 * (g_c - 1) / g_c * s_y / g_f
    assert sum(x.elements for x in lines) == round(v_w)
    assert program.params["conv.weight"].local_shape(0) == (F // g_f, K, K, C // g_c)


def test_weights_of_the_backward_pass_come_before_data() -> None:
    """Stationary-X and -W use the dy that backward-weights gathered: one gather serves both products."""
    grid = Grid((2, 2))
    program = lower(conv_layer(), conv_plan(grid, (1,), {"C": (0,)}, (0,), (0,)), BATCH)
    kernels = [s for s in program.steps if getattr(s, "node", "") == "conv" and hasattr(s, "kernel")]
    (dw,) = (s for s in kernels if s.kernel.name == "conv_backward_weights")
    (dx,) = (s for s in kernels if s.kernel.name == "conv_backward_data")
    assert kernels.index(dw) < kernels.index(dx)
    assert dw.reads[1] == dx.reads[0]


# Fully connected layers.

D = 24


def mlp(layers: int = 3) -> Graph:
    g = GraphBuilder(input=(D,))
    x = g.input
    for i in range(1, layers + 1):
        x = g.linear(x, D, bias=False, name=f"fc{i}")
        x = g.sigmoid(x, name=f"act{i}")
    return g.build(x).with_loss(LOSSES["mse"]())


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (3, 2), (2, 4), (4, 1), (1, 4)])
def test_1_5d(rows: int, columns: int) -> None:
    """W in Pr blocks of rows, X and Y in Pc blocks of samples: allgather of Y and allreduce of dX in a column, of dW in a row."""
    grid, (r, c) = Grid((rows, columns)), ((0,), (1,))
    ops: dict[str, OpGrid] = {"loss": {"N": c}}
    for i in (1, 2, 3):
        ops |= {f"fc{i}": {"F": r, "N": c}, f"act{i}": {"N": c}}  # the row axes are idle: every row holds all of Y
    n = BATCH // columns
    want = set()
    for i in (1, 2, 3):
        want.add(Line("forward", f"fc{i}:y", "allgather", r, (rows - 1) * n * D // rows))
        want.add(Line("backward", f"fc{i}.weight:grad", "allreduce", c, 2 * (columns - 1) * D * D // rows // columns))
        if i > 1:
            want.add(Line("backward", f"fc{i}:dx0", "allreduce", r, 2 * (rows - 1) * n * D // rows))
    program = check(mlp(), Plan(grid, ops), want)
    assert program.params["fc1.weight"].local_shape(0) == (D // rows, D)
    assert groups(grid, r) == {
        tuple(range(j * rows, (j + 1) * rows)) for j in range(columns)
    }  # the Pr processes of a column
    assert groups(grid, c) == {tuple(range(j, rows * columns, rows)) for j in range(rows)}  # the Pc processes of a row


def test_scattered_instead_of_replicated_halves_the_volume_of_backward_data() -> None:
    """The allreduce of dX becomes a reduce-scatter where the activation keeps the filters' split."""
    grid, r = Grid((4,)), (0,)
    idle = {f"{k}{i}": {"F": r} if k == "fc" else {} for i in (1, 2, 3) for k in ("fc", "act")}
    split = idle | {f"act{i}": {"C": r} for i in (1, 2, 3)} | {"loss": {"F": r}}
    sent = {}
    for name, ops in (("idle", idle), ("split", split)):
        sent[name] = {x.value: x for x in ledger(lower(mlp(), Plan(grid, ops), BATCH)) if x.phase == "backward"}[
            "fc2:dx0"
        ]
    assert (sent["idle"].kind, sent["split"].kind) == ("allreduce", "reduce_scatter")
    assert sent["idle"].elements == 2 * sent["split"].elements


def small_cnn() -> Graph:
    g = GraphBuilder(input=(4, 4, 3))
    x = g.sigmoid(g.conv(g.input, 8, 3, pad=1, bias=False, name="conv1"), name="act1")
    x = g.sigmoid(g.conv(x, 4, 3, pad=1, bias=False, name="conv2"), name="act2")
    x = g.sigmoid(g.linear(g.flatten(x, name="flat"), 16, bias=False, name="fc1"), name="act3")
    x = g.sigmoid(g.linear(x, 8, bias=False, name="fc2"), name="act4")
    return g.build(x).with_loss(LOSSES["mse"]())


@pytest.mark.parametrize("p", [2, 4])
def test_one_weird_trick(p: int) -> None:
    """Convolutions: allreduce of dW over all ranks. Linear layers: an allgather before each, a reduce-scatter back, no dW traffic."""
    every = (0,)
    n, f, c = {"N": every}, {"F": every}, {"C": every}
    convs = dict.fromkeys(("conv1", "act1", "conv2", "act2", "flat"), n)
    ops: dict[str, OpGrid] = {**convs, "fc1": f, "act3": c, "fc2": f, "act4": c, "loss": f}
    flat, hidden = 4 * 4 * 4, 16
    want = {
        Line("forward", "flat:y", "allgather", every, (p - 1) * BATCH * flat // p),
        Line("forward", "act3:y", "allgather", every, (p - 1) * BATCH * hidden // p),
        Line("backward", "fc2:dx0", "reduce_scatter", every, (p - 1) * BATCH * hidden // p),
        Line("backward", "fc1:dx0", "reduce_scatter", every, (p - 1) * BATCH * flat // p),
        Line("backward", "conv1.weight:grad", "allreduce", every, _allreduce(8 * 9 * 3, p)),
        Line("backward", "conv2.weight:grad", "allreduce", every, _allreduce(4 * 9 * 8, p)),
    }
    check(small_cnn(), Plan(Grid((p,)), ops), want)


@pytest.mark.parametrize(("a", "b"), [(2, 2), (2, 4), (4, 2), (3, 2)])
def test_alternating_splits_of_linear_layers(a: int, b: int) -> None:
    """(n, c) = (a, b), then (b, a), then (a, b): what one layer sums is what the next reads. Only the sums inside layers communicate."""
    grid, x, y = Grid((a, b)), (0,), (1,)
    ops: dict[str, OpGrid] = {}
    for i, (n, c) in enumerate(((x, y), (y, x), (x, y)), 1):
        ops |= {f"fc{i}": {"F": n, "C": c}, f"act{i}": {"C": n}}
    ops["loss"] = {"F": x}
    want = set()
    for i, (n, c) in enumerate(((x, y), (y, x), (x, y)), 1):
        pn, pc = grid.ways(n), grid.ways(c)
        want.add(Line("forward", f"fc{i}:y", "allreduce", c, _allreduce(BATCH * D // pn, pc)))
        if i > 1:
            want.add(Line("backward", f"fc{i}:dx0", "allreduce", n, _allreduce(BATCH * D // pc, pn)))
    program = check(mlp(), Plan(grid, ops), want)
    assert program.params["fc2.weight"].local_shape(0) == (D // b, D // a)


# Spatial and data parallelism.


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("p", [2, 4])
def test_spatial(p: int, kernel: int) -> None:
    """A halo of x forward, of dy backward, both (k-1)/2 rows to each neighbour; dW over all ranks. Nothing for 1 by 1 kernels."""
    h, w, c, f = 8, 4, 3, 5
    g = GraphBuilder(input=(h, w, c))
    x = g.sigmoid(g.conv(g.input, c, 1, bias=False, groups=c, name="first"), name="before")
    y = g.conv(x, f, kernel, pad=kernel // 2, bias=False, name="conv")
    graph = g.build(g.sigmoid(y, name="after")).with_loss(LOSSES["mse"]())
    grid, rows = Grid((p,)), {"H": (0,)}
    plan = Plan(grid, {n.name: rows for n in graph.ops})
    program = lower(graph, plan, BATCH)
    halos = [m for m in program.moves if m.move.kind == "halo"]
    assert [m.src for m in halos] == (["before:y", "after:dx0"] if kernel > 1 else [])
    for m, channels in zip(halos, (c, f), strict=False):
        row = (kernel // 2) * BATCH * w * channels
        assert [volume(m.move, r).elements for r in range(p)] == [row * (1 if r in (0, p - 1) else 2) for r in range(p)]
        assert [volume(m.move, r).messages for r in range(p)] == [1 if r in (0, p - 1) else 2 for r in range(p)]
    rest = [m for m in program.moves if m.move.kind != "halo" and m.node == "conv"]
    assert [(m.src, m.move.kind, m.move.axes) for m in rest] == [("conv.weight:grad", "allreduce", (0,))]
    feeds = samples(graph, BATCH, np.random.default_rng(0))
    assert_same(run(graph, plan, BATCH, feeds), serial(graph, BATCH, feeds))


@pytest.mark.parametrize("p", [2, 4, 8])
def test_data(p: int) -> None:
    """Only gradients move: one allreduce of each weight over all ranks."""
    graph, every = small_cnn(), (0,)
    sizes = {"conv1": 8 * 9 * 3, "conv2": 4 * 9 * 8, "fc1": 64 * 16, "fc2": 16 * 8}
    want = {Line("backward", f"{k}.weight:grad", "allreduce", every, _allreduce(n, p)) for k, n in sizes.items()}
    check(graph, Plan(Grid((p,)), {n.name: {"N": every} for n in graph.ops}), want)


def test_segmented_allreduces_are_smaller_than_one_of_all_weights() -> None:
    """V_AR = 2 (Q-1)/Q F C K^2 / G with Q = P/G, against 2 (P-1)/P F C K^2 of pure data parallelism."""
    p, w = 8, F * C * K * K
    for g in (1, 2, 4):
        q = p // g
        plan = conv_plan(Grid((g, q)), (1,), {"F": (0,)}, (0,), (0,))
        (line,) = (x for x in ledger(lower(conv_layer(), plan, BATCH)) if x.value == "conv.weight:grad")
        assert line.elements == 2 * (q - 1) * w // g // q
