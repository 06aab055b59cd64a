"""Several outputs with weights, coarser ones against every second or fourth target: the step of PyTorch, on any grid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lbpar.errors import GraphError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.models.registry import build_model
from lbpar.program.plan import Plan
from tests.util.counting import assert_counted
from tests.util.run import assert_same, difference, random_plan, random_state, run, samples, serial
from tests.util.training import run_file, train

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cross_entropy": ("cross_entropy", {"smoothing": 0.1}),
    "dice": ("dice", {}),
    "all": (
        "dice_cross_entropy",
        {"ignore_index": 255, "class_weights": (1.0, 2.0, 0.5), "per_sample": True, "gamma": 1.5},
    ),
    "mse": ("mse", {}),
    "huber": ("huber", {}),
}
INLINE = """
model:
  input: [9, 6, 2]
  layers:
    - {op: conv, filters: 4, kernel: 3, pad: 1, stride: 2, name: low}
    - {op: relu, name: act}
    - {op: conv, filters: 3, kernel: 1, name: coarse}
    - {op: upsample, from: act}
    - {op: crop, crop: [[0, 1], 0]}
    - {op: conv, filters: 3, kernel: 3, pad: 1, name: fine}
  heads: {coarse: 0.5}
data: {train: synthetic, test: synthetic, samples: 7}
train: {batch: 3, epochs: 2, seed: 5, loss: dice_cross_entropy, evaluate: {metrics: [dice]}}
engine: {name: numpy, dtype: float64}
"""


def pyramid(shape: tuple[int, ...], classes: int = 3) -> Graph:
    """Outputs of all, a half and a quarter of the extents, rounded up."""
    g = GraphBuilder(shape)
    fine = g.leaky_relu(g.conv(g.input, 4, 3, pad=1))
    half = g.leaky_relu(g.conv(fine, 4, 3, stride=2, pad=1))
    quarter = g.conv(half, 4, 3, stride=2, pad=1)
    heads = {g.conv(half, classes, 1, name="half"): 0.5, g.conv(quarter, classes, 1, name="quarter"): 0.25}
    return g.build(g.conv(fine, classes, 1, name="whole"), heads)


@pytest.mark.parametrize("shape", [(9, 6, 2), (5, 7, 3, 1), (8, 8, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_against_pytorch_and_on_any_grid(case: str, shape: tuple[int, ...]) -> None:
    torch_graph = pytest.importorskip("tests.util.torch_graph")
    kind, options = CASES[case]
    graph, rng = pyramid(shape).with_loss(LOSSES[kind](**options)), np.random.default_rng(1)
    feeds, state = samples(graph, 3, rng), random_state(graph, rng)
    got, want = serial(graph, 3, feeds, state=state), torch_graph.step(graph, feeds, state)
    assert difference(got.value("loss:y"), want.y["loss"]) < 1e-12
    for name, grad in want.grad.items():
        assert difference(got.value(f"{name}:grad"), grad, 1e-3) < 1e-10, name
    assert difference(got.value("input:dy"), want.dy["input"], 1e-3) < 1e-10
    plans = [random_plan(graph, 3, Grid.of(p), rng, 0.1) for p in (2, 3, 4, 6, 12)]
    plans += [Plan(Grid((3,)), {"loss": {loop: (0,)}}) for loop in ("N", "H", "F")]
    for plan in plans:
        other = run(graph, plan, 3, feeds, state=state)
        assert_same(other, got)
        assert_counted(other)


@pytest.mark.parametrize("case", ["dice", "all", "cross_entropy"])
def test_labels_may_be_bytes(case: str) -> None:
    kind, options = CASES[case]
    graph, rng = pyramid((9, 6, 2)).with_loss(LOSSES[kind](**options)), np.random.default_rng(1)
    feeds, state = samples(graph, 3, rng), random_state(graph, rng)
    narrow = {**feeds, "target": feeds["target"].astype(np.uint8)}
    want = serial(graph, 3, feeds, state=state)
    assert_same(serial(graph, 3, narrow, state=state), want)
    assert_same(run(graph, random_plan(graph, 3, Grid.of(4), rng, 0.1), 3, narrow, state=state), want)


def test_the_loss_is_the_weighted_mean_of_the_outputs_losses() -> None:
    graph, rng = pyramid((8, 8, 2)), np.random.default_rng(1)
    deep = graph.with_loss(LOSSES["mse"]())
    feeds, state = samples(deep, 2, rng), random_state(deep, rng)
    got = serial(deep, 2, feeds, state=state)
    errors = [
        np.mean((got.value(f"{name}:y") - feeds["target"][:, ::s, ::s]) ** 2)
        for name, s in (("whole", 1), ("half", 2), ("quarter", 4))
    ]
    assert got.results[0]["loss"] == pytest.approx(np.average(errors, weights=[1, 0.5, 0.25]), rel=1e-12)


def test_nnunet_supervises_all_resolutions_but_the_coarsest() -> None:
    graph = build_model("nnunet", deep_supervision=True)
    assert dict(graph.heads) == {"up2.head": 0.5, "up3.head": 0.25, "up4.head": 0.125}
    assert graph.parameter_count == build_model("nnunet").parameter_count + sum(2 * f + 2 for f in (64, 128, 256))
    small = build_model("nnunet", input=(17, 9, 8, 1), width=1 / 16, stages=4, deep_supervision=True)
    shapes = small.with_loss(LOSSES["dice"]()).shapes(2)
    assert shapes["up2.head"] == (2, 9, 5, 4, 2) and shapes["loss"] == ()


def test_every_target_that_counts_is_found_where_extents_are_rounded_up() -> None:
    deep = pyramid((9, 6, 2)).with_loss(LOSSES["mse"]()).nodes[-1].op
    assert deep.strides((1, 9, 8, 3), (1, 3, 2, 3)) == (4, 4)  # type: ignore[attr-defined]
    assert deep.strides((1, 7, 6, 3), (1, 4, 2, 3)) == (2, 4)  # type: ignore[attr-defined]
    assert deep.strides((1, 12, 9, 3), (1, 4, 1, 3)) == (3, 9)  # type: ignore[attr-defined]


@pytest.mark.parametrize("procs", [1, 3, 4])
def test_a_run_file_names_heads_and_any_grid_trains_alike(procs: int) -> None:
    plan = {1: "{}", 3: "{strategy: spatial}", 4: "{strategy: data, layers: {loss: {F: 2, H: 2}}}"}[procs]
    alone, seen = train(run_file([], INLINE)), []

    def job(trainer: Any) -> list[dict[str, Any]]:
        records = list(trainer.train())
        assert records[-1]["test_dice"] is not None
        seen.append(trainer.predict(trainer.test.read(np.arange(7)), normalised=True).shape)
        return records

    several = train(run_file([f"parallel={plan}"], INLINE), procs, job)
    for name, tensor in alone.tensors.items():
        np.testing.assert_allclose(several.tensors[name], tensor, rtol=1e-9, atol=1e-12)
    assert set(seen) == {(7, 9, 6, 3)}
    assert (
        np.abs(
            alone.tensors["coarse.weight"]
            - train(run_file(["model.heads={coarse: 0.25}"], INLINE)).tensors["coarse.weight"]
        ).max()
        > 1e-6
    )


def test_heads_that_do_not_fit_are_refused() -> None:
    g = GraphBuilder((9, 6, 2))
    fine = g.conv(g.input, 3, 1)
    graph = g.build(fine, {g.conv(g.input, 4, 1, name="other"): 1.0})
    with pytest.raises(GraphError, match="dice: got a further output of shape .*expected the same channels"):
        graph.with_loss(LOSSES["dice"]()).shapes(2)
    graph = g.build(fine, {g.crop(fine, 1, name="less"): 1.0})
    with pytest.raises(GraphError, match="a half, a quarter"):
        graph.with_loss(LOSSES["dice"]()).shapes(2)
    with pytest.raises(GraphError, match="build: output"):
        g.build(fine, {"nothing": 1.0})
