"""Several inputs and several outputs, each with a loss on a target of its own: the step of PyTorch, on any grid."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.errors import GraphError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES, Loss
from lbpar.layout.grid import Grid
from lbpar.program.plan import Plan
from tests.util.counting import assert_counted
from tests.util.run import assert_same, difference, random_plan, random_state, run, samples, serial


def network() -> Graph:
    """A volume, a field of half its extents and a vector; classes of voxels, of the whole, and real numbers of the whole."""
    g = GraphBuilder({"image": (6, 5, 4, 2), "field": (3, 3, 2, 1), "facts": (3,)})
    x = g.leaky_relu(g.conv(g.input, 4, 3, pad=1))
    low = g.concat([g.conv(x, 4, 3, stride=2, pad=1), "field"])
    seg = g.conv(g.concat([x, g.crop(g.upsample(low), [[0, 0], [0, 1], [0, 0]])]), 3, 1, name="seg")
    both = g.concat([g.global_avg_pool(low), g.linear("facts", 4)])
    return g.build([seg, g.linear(both, 4, name="kind"), g.linear(both, 2, name="size")])


def losses(**options: float) -> dict[str, tuple[Loss, str]]:
    return {
        "seg": (LOSSES["dice_cross_entropy"](ignore_index=255, factor=0.5), "mask"),
        "kind": (LOSSES["cross_entropy"](factor=2.0), "kind"),
        "size": (LOSSES["huber"](), "size"),
    }


def test_against_pytorch_and_on_any_grid() -> None:
    torch_graph = pytest.importorskip("tests.util.torch_graph")
    graph, rng = network().with_losses(losses()), np.random.default_rng(2)
    assert [n.name for n in graph.samples] == ["image", "field", "facts"]
    assert [n.name for n in graph.targets] == ["target/mask", "target/kind", "target/size"]
    feeds, state = samples(graph, 3, rng), random_state(graph, rng)
    got, want = serial(graph, 3, feeds, state=state), torch_graph.step(graph, feeds, state)
    assert difference(got.value("loss:y"), want.y["loss"]) < 1e-12
    for name, grad in want.grad.items():
        assert difference(got.value(f"{name}:grad"), grad, 1e-3) < 1e-10, name
    for name in ("image", "field", "facts"):
        assert difference(got.value(f"{name}:dy"), want.dy[name], 1e-3) < 1e-10, name
    each = [got.results[0][f"loss/{name}"] for name in ("seg", "kind", "size")]
    assert sum(each) == pytest.approx(float(want.y["loss"]), rel=1e-12)
    assert got.results[0]["hits/kind"][0] == (want.y["kind"].argmax(-1) == feeds["target/kind"]).sum()
    plans = [random_plan(graph, 3, Grid.of(p), rng, 0.1) for p in (2, 3, 4, 6)]
    plans += [Plan(Grid((p,)), {"loss": {loop: (0,)}}) for p, loop in ((2, "N"), (2, "H"), (3, "F"), (4, "D"))]
    for plan in plans:
        other = run(graph, plan, 3, feeds, state=state)
        assert_same(other, got)
        assert_counted(other)


def test_two_outputs_may_share_a_target() -> None:
    g = GraphBuilder((6, 4, 2))
    x = g.conv(g.input, 3, 3, pad=1, name="first")
    graph = g.build([x, g.conv(x, 3, 1, name="second")])
    loss = LOSSES["dice"]()
    joint = graph.with_losses({"second": (loss, "mask"), "first": (loss, "mask")})
    assert [n.name for n in joint.targets] == ["target/mask"] and joint.shapes(2)["target/mask"] == (2, 6, 4)
    assert list(joint.compared) == ["first", "second"]
    with pytest.raises(GraphError, match="second takes targets 'mask' of shape .* but another output takes"):
        graph.with_losses({"first": (loss, "mask"), "second": (LOSSES["mse"](), "mask")})
    with pytest.raises(GraphError, match="expected one for each output: first, second"):
        graph.with_losses({"first": (loss, "mask")})
