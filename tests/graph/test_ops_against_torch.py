"""Each op through the whole path (graph, program, executor, NumPy engine) on one rank, against PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lbpar.errors import GraphError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.plan import Plan
from tests.util.run import difference, random_state, run, samples, serial

pytest.importorskip("torch")

from tests.util.torch_graph import step

CONVS = {
    "k3": {"kernel": 3},
    "k3-p1": {"kernel": 3, "pad": 1},
    "k7-s2-p3": {"kernel": 7, "stride": 2, "pad": 3},
    "k4-s3": {"kernel": 4, "stride": 3, "pad": 1},
    "k1-s2": {"kernel": 1, "stride": 2},
    "k2-s2": {"kernel": 2, "stride": 2},
    "dilation2": {"kernel": 3, "pad": 2, "dilation": 2},
    "dilation3-s2": {"kernel": 3, "pad": 2, "dilation": 3, "stride": 2},
    "asymmetric-pad": {"kernel": 4, "pad": [0, 2], "stride": 2},
    "no-bias": {"kernel": 3, "bias": False},
    "groups2": {"kernel": 3, "pad": 1, "groups": 2},
    "depthwise": {"kernel": 3, "pad": 1, "groups": 4},
    "depthwise-s2-d2": {"kernel": 3, "pad": 1, "groups": 4, "stride": 2, "dilation": 2},
}
CUBES = {2: (9, 10, 4), 3: (7, 8, 9, 4)}


def per_dim(options: dict, rank: int) -> dict:
    """A pad of [before, after] holds for the last dimension; the others have none."""
    pad = options.get("pad")
    return options | {"pad": [*[1] * (rank - 1), pad]} if isinstance(pad, list) else options


def check(graph: Graph, batch: int = 3, training: bool = True, seed: int = 0, tolerance: float = 1e-11) -> None:
    """y, dx, dw, db, running statistics and loss."""
    rng = np.random.default_rng(seed)
    feeds = samples(graph, batch, rng)
    state = random_state(graph, rng)
    got = serial(graph, batch, feeds, state=state, training=training)
    want = step(graph, feeds, state, training)
    for node in graph.nodes:
        if node.name != "target":
            if node.name != graph.inputs[0].name:
                assert difference(got.value(f"{node.name}:y"), want.y[node.name]) < tolerance, f"{node.name}:y"
            if training and node.name != "loss":
                assert difference(got.value(f"{node.name}:dy"), want.dy[node.name], 1e-3) < tolerance, f"{node.name}:dy"
    if training:
        for name, grad in want.grad.items():
            assert difference(got.value(f"{name}:grad"), grad, 1e-3) < tolerance, name
        for name in state:
            if "running" in name:
                assert difference(got.state(name), want.state[name]) < tolerance, name


def tail(g: GraphBuilder, x: str, seed_loss: str = "mse") -> Graph:
    """The op under test feeds a loss whose gradient differs at every element."""
    return g.build(x).with_loss(LOSSES[seed_loss]())


def around(shape: tuple[int, ...], op: Callable[[GraphBuilder, str], str]) -> Graph:
    g = GraphBuilder(input=shape)
    return tail(g, op(g, g.input))


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("options", CONVS.values(), ids=CONVS.keys())
def test_conv(options: dict, rank: int) -> None:
    check(around(CUBES[rank], lambda g, x: g.conv(x, 8, **per_dim(options, rank))))


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("options", CONVS.values(), ids=CONVS.keys())
def test_conv_transpose(options: dict, rank: int) -> None:
    shape = tuple(e // 2 for e in CUBES[rank][:-1]) + (4,)
    check(around(shape, lambda g, x: g.conv_transpose(x, 8, **per_dim(options, rank))))


@pytest.mark.parametrize("extra", [1, (0, 1), (1, 2)])
def test_conv_transpose_lengthened_output(extra: int | tuple[int, ...]) -> None:
    check(around((4, 5, 3), lambda g, x: g.conv_transpose(x, 2, 3, stride=(2, 3), pad=1, output_pad=extra)))


POOLS = {
    "k2": {"kernel": 2},
    "k3-s2-p1": {"kernel": 3, "stride": 2, "pad": 1},
    "k3-s1-p1": {"kernel": 3, "stride": 1, "pad": 1},
    "k2-s3": {"kernel": 2, "stride": 3},
    "ceil": {"kernel": 3, "stride": 2, "ceil_mode": True},
    "ceil-p1": {"kernel": 2, "stride": 3, "pad": 1, "ceil_mode": True},
}


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("options", POOLS.values(), ids=POOLS.keys())
def test_max_pool(options: dict, rank: int) -> None:
    check(around(CUBES[rank], lambda g, x: g.max_pool(x, **options)))


@pytest.mark.parametrize(
    "options", [{"kernel": 3, "stride": 2, "dilation": 2, "pad": 1}, {"kernel": 4, "stride": 2, "pad": [1, [0, 2]]}]
)
def test_max_pool_dilated_and_padded_unevenly(options: dict) -> None:
    check(around(CUBES[2], lambda g, x: g.max_pool(x, **options)))


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("options", POOLS.values(), ids=POOLS.keys())
def test_avg_pool(options: dict, counted: bool, rank: int) -> None:
    check(around(CUBES[rank], lambda g, x: g.avg_pool(x, count_include_pad=counted, **options)))


@pytest.mark.parametrize("shape", [(5, 6, 3), (3, 4, 5, 2)])
def test_global_avg_pool(shape: tuple[int, ...]) -> None:
    check(around(shape, lambda g, x: g.global_avg_pool(x)))


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("shape", [(4, 5, 3), (3, 4, 5, 2), (7,)], ids=["2d", "3d", "features"])
def test_norm(shape: tuple[int, ...], affine: bool, training: bool) -> None:
    check(around(shape, lambda g, x: g.norm(x, momentum=0.3, eps=1e-3, affine=affine)), training=training)


SAMPLE_NORMS = {
    "instance": ("instance_norm", {}),
    "groups1": ("group_norm", {"groups": 1}),
    "groups2": ("group_norm", {"groups": 2}),
    "groups6": ("group_norm", {"groups": 6}),
    "layer": ("layer_norm", {}),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("shape", [(4, 5, 6), (3, 4, 5, 6), (5, 6), (6,)], ids=["2d", "3d", "1d", "features"])
@pytest.mark.parametrize(("kind", "options"), SAMPLE_NORMS.values(), ids=SAMPLE_NORMS.keys())
def test_norm_within_samples(kind: str, options: dict, shape: tuple[int, ...], affine: bool, training: bool) -> None:
    if len(shape) == 1 and kind == "instance_norm":
        with pytest.raises(GraphError, match="more than one position"):
            around(shape, lambda g, x: g.instance_norm(x))
    else:
        check(
            around(shape, lambda g, x: g.layer(kind, x, eps=1e-3, affine=affine, **options)),
            training=training,
            tolerance=1e-10,
        )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(("elu", {}), ("elu", {"alpha": 0.3}), ("gelu", {}), ("gelu", {"approximate": "tanh"}), ("silu", {})),
        *(("softplus", {}), ("softplus", {"beta": 2.0}), ("hardsigmoid", {}), ("hardswish", {})),
    ],
)
def test_activation(kind: str, options: dict) -> None:
    """Of inputs on both sides of every bend."""

    def op(g: GraphBuilder, x: str) -> str:
        return g.layer(kind, g.tanh(x, 5.0), **options)

    check(around((6, 5, 7), op))


@pytest.mark.parametrize("kind", ["relu", "leaky_relu", "sigmoid", "tanh", "flatten"])
def test_one_input(kind: str) -> None:
    check(around((4, 5, 3), lambda g, x: getattr(g, kind)(x)))


@pytest.mark.parametrize("shape", [(3, 2, 7), (2, 3, 2, 4)])
@pytest.mark.parametrize(
    "options",
    [{}, {"size": 3, "alpha": 2.0}, {"size": 4, "alpha": 0.5, "beta": 0.6, "k": 2.0}, {"size": 20, "alpha": 5.0}],
)
def test_local_response_norm(options: dict, shape: tuple[int, ...]) -> None:
    """Sizes that are odd, even, and larger than there are channels."""
    check(around(shape, lambda g, x: g.local_response_norm(x, **options)))


@pytest.mark.parametrize("shape", [(4, 5, 6), (2, 3, 2, 6), (6,)])
def test_softmax_inside(shape: tuple[int, ...]) -> None:
    check(around(shape, lambda g, x: g.softmax(x)))


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_channel_shuffle(groups: int) -> None:
    check(around((4, 5, 6), lambda g, x: g.channel_shuffle(x, groups)))
    with pytest.raises(GraphError, match="channel_shuffle: groups=4 must divide the channels \\(6\\)"):
        around((4, 5, 6), lambda g, x: g.channel_shuffle(x, 4))


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias: bool) -> None:
    check(around((7,), lambda g, x: g.linear(x, 5, bias=bias)))


@pytest.mark.parametrize("factor", [2, (3, 1)])
def test_upsample(factor: int | tuple[int, ...]) -> None:
    check(around((4, 5, 3), lambda g, x: g.upsample(x, factor)))


SHIFTS = {
    "pad": lambda g, x: g.pad(x, [[1, 2], 3]),
    "crop": lambda g, x: g.crop(x, [[0, 1], [2, 0]]),
    "fit": lambda g, x: fitted(g, x, g.conv(x, 1, (3, 4), pad=[2, 0])),
}


def fitted(g: GraphBuilder, x: str, like: str) -> str:
    return g.concat([g.fit([x, like]), like])


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("shape", [(5, 2), (5, 4, 2), (1, 4, 3, 2)], ids=["line", "plane", "volume"])
@pytest.mark.parametrize("factor", [1, 2, 3, 4, 5])
def test_linear_upsampling(factor: int, shape: tuple[int, ...], corners: bool) -> None:
    check(around(shape, lambda g, x: g.upsample(x, factor, "linear", corners)))


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("pad", [1, [[3, 0], [1, 2]], [0, [2, 4]]])
def test_rims_of_what_lies_inside(mode: str, pad: Any) -> None:
    check(around((4, 6, 3), lambda g, x: g.pad(x, pad, mode)))
    check(around((4, 6, 3), lambda g, x: g.conv(x, 5, 3, stride=2, pad=pad, pad_mode=mode)))


def test_a_convolution_that_reflects_is_padded_by_a_node_of_its_own() -> None:
    g = GraphBuilder((4, 6, 3))
    graph = g.build(g.conv(g.conv(g.input, 2, 3, pad=1, pad_mode="reflect", name="a"), 2, 1, pad_mode="reflect"))
    assert [n.name for n in graph.ops] == ["a_pad", "a", "conv2"] and graph.params()["a.weight"].shape == (2, 3, 3, 3)
    with pytest.raises(GraphError, match=r"pad: got an input of shape \(1, 4, 6, 3\) and .* to reflect, expected less"):
        g.pad(g.input, 4, "reflect")


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("shape", [(6,), (4, 5, 6), (2, 3, 2, 6)])
def test_prelu(shape: tuple[int, ...], per_channel: bool) -> None:
    check(around(shape, lambda g, x: g.prelu(x, per_channel)))


@pytest.mark.parametrize("kind", SHIFTS)
def test_pad_crop_and_fit(kind: str) -> None:
    """Fit pads one dimension and crops the other."""
    check(around((4, 6, 3), SHIFTS[kind]))


def test_a_crop_of_everything_is_refused() -> None:
    with pytest.raises(GraphError, match="crop: nothing would be left"):
        around((4, 6, 3), lambda g, x: g.crop(x, 2))


@pytest.mark.parametrize("kind", ["add", "multiply", "concat"])
def test_several_inputs_and_fan_out(kind: str) -> None:
    def op(g: GraphBuilder, x: str) -> str:
        a, b = g.conv(x, 3, 3, pad=1), g.sigmoid(x)
        return getattr(g, kind)([a, b, a])

    check(around((4, 5, 3), op))


WEIGHTS = (0.5, 2.0, 0.0, 1.0, 3.0, 1.5, 0.25)
LOSS_CASES = {
    "cross-entropy": ("cross_entropy", {}),
    "cross-entropy-smoothed": ("cross_entropy", {"smoothing": 0.1}),
    "cross-entropy-weighted": ("cross_entropy", {"class_weights": WEIGHTS}),
    "cross-entropy-ignored": ("cross_entropy", {"ignore_index": 255}),
    "cross-entropy-all": ("cross_entropy", {"class_weights": WEIGHTS, "ignore_index": 2, "smoothing": 0.1}),
    "focal": ("focal", {}),
    "focal-below-one": ("focal", {"gamma": 0.5, "class_weights": WEIGHTS, "ignore_index": -1}),
    "dice": ("dice", {}),
    "dice-eps": ("dice", {"eps": 0.01}),
    "dice-per-sample": ("dice", {"per_sample": True, "background": False, "eps": 1e-5}),
    "dice-weighted": ("dice", {"class_weights": WEIGHTS, "ignore_index": 255}),
    "dice-cross-entropy": ("dice_cross_entropy", {"dice": 0.5, "cross_entropy": 2.0, "smoothing": 0.1}),
    "dice-cross-entropy-all": (
        "dice_cross_entropy",
        {"dice": 0.5, "class_weights": WEIGHTS, "ignore_index": 0, "background": False, "per_sample": True},
    ),
    "dice-focal": ("dice_cross_entropy", {"gamma": 1.5}),
    "mse": ("mse", {}),
    "l1": ("l1", {}),
    "huber": ("huber", {}),
    "bce": ("bce", {}),
}


@pytest.mark.parametrize("shape", [(7,), (4, 5, 7), (2, 3, 4, 7)], ids=["samples", "pixels", "voxels"])
@pytest.mark.parametrize(("kind", "options"), LOSS_CASES.values(), ids=LOSS_CASES.keys())
def test_loss(kind: str, options: dict, shape: tuple[int, ...]) -> None:
    g = GraphBuilder(input=shape)
    graph = g.build(g.leaky_relu(g.input)).with_loss(LOSSES[kind](**options))
    check(graph, batch=4)


@pytest.mark.parametrize("kind", ["cross_entropy", "focal", "dice_cross_entropy"])
def test_a_batch_of_ignored_positions_only_has_no_gradient(kind: str) -> None:
    g = GraphBuilder(input=(3, 2, 4))
    graph = g.build(g.leaky_relu(g.input)).with_loss(LOSSES[kind](ignore_index=9, class_weights=(1.0, 0.5, 2.0, 1.0)))
    feeds = samples(graph, 2, np.random.default_rng(0))
    feeds["target"][:] = 9
    got = serial(graph, 2, feeds)
    np.testing.assert_array_equal(got.value("input:dy"), 0)
    assert got.results[0]["loss"] == 0 and list(got.results[0]["hits"]) == [0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_weights": (1.0, 2.0)}, "got the class weights .*expected 3, one per class"),
        ({"class_weights": (0.0, 0.0, 0.0)}, "not all 0"),
    ],
)
def test_class_weights_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    g = GraphBuilder(input=(3, 3))
    graph = g.build(g.relu(g.input)).with_loss(LOSSES["dice"](**options))
    with pytest.raises(GraphError, match=message):
        graph.shapes(2)


@pytest.mark.parametrize("shape", [(7,), (4, 5, 7)], ids=["samples", "pixels"])
@pytest.mark.parametrize("kind", ["cross_entropy", "dice"])
def test_hits_in_the_top_one_and_five(kind: str, shape: tuple[int, ...]) -> None:
    import torch

    g = GraphBuilder(input=shape)
    graph = g.build(g.leaky_relu(g.input, 0.1)).with_loss(LOSSES[kind]())
    feeds = samples(graph, 6, np.random.default_rng(3))
    got = serial(graph, 6, feeds).results[0]["hits"]
    x = torch.tensor(feeds["input"]).reshape(-1, 7)
    t = torch.tensor(feeds["target"]).reshape(-1, 1)
    want = [int((x.topk(k).indices == t).sum()) for k in (1, 5)]
    assert list(got) == want


@pytest.mark.parametrize("kind", ["cross_entropy", "dice"])
@pytest.mark.parametrize(("classes", "hits"), [(6, (8, 40)), (5, (8,))])
@pytest.mark.parametrize(
    "grid", [{}, {"F": (0,)}, {"N": (0,)}, {"H": (0,)}], ids=["whole", "classes", "samples", "space"]
)
def test_equal_outputs_hit_the_first_class_only(kind: str, classes: int, hits: tuple[int, ...], grid: dict) -> None:
    """And a top 5 is counted only where there are more than 5 classes."""
    g = GraphBuilder(input=(4, 2, classes))
    graph = g.build(g.relu(g.input)).with_loss(LOSSES[kind]())
    target = np.arange(48).reshape(6, 4, 2) % 6 % classes
    if classes == 5:
        target[target == 0] = 1
        target.flat[:8] = 0
    plan = Plan(Grid((2,)), {"loss": grid}) if grid else Plan(Grid())
    feeds = {"input": -np.ones((6, 4, 2, classes)), "target": target}
    for result in run(graph, plan, 6, feeds).results:
        assert tuple(result["hits"]) == hits


def test_dropout_zeroes_a_share_and_passes_the_gradient_through_the_same_mask() -> None:
    g = GraphBuilder(input=(20, 20, 5))
    graph = tail(g, g.dropout(g.input, 0.3, name="drop"))
    feeds = samples(graph, 4, np.random.default_rng(0))
    got = serial(graph, 4, feeds)
    y = got.value("drop:y")
    dropped = y == 0
    assert abs(dropped.mean() - 0.3) < 0.02
    np.testing.assert_allclose(y[~dropped], feeds["input"][~dropped] / 0.7, rtol=1e-14)
    want = np.where(dropped, 0, got.value("drop:dy") / 0.7)
    np.testing.assert_allclose(got.value("input:dy"), want, rtol=1e-14)
    off = serial(graph, 4, feeds, training=False)
    np.testing.assert_array_equal(off.value("drop:y"), feeds["input"])


def test_running_statistics_keep_their_convention_over_several_steps() -> None:
    """running = (1 - momentum) * running + momentum * batch, with the unbiased variance."""
    g = GraphBuilder(input=(4, 3, 2))
    graph = tail(g, g.norm(g.input, momentum=0.25, name="norm"))
    feeds = samples(graph, 3, np.random.default_rng(0))
    feeds["input"] = 5 * feeds["input"] + 3
    got = serial(graph, 3, feeds, steps=2)
    mean, var = feeds["input"].mean((0, 1, 2)), feeds["input"].var((0, 1, 2), ddof=1)
    np.testing.assert_allclose(got.state("norm.running_mean"), mean * (1 - 0.75**2), rtol=1e-12)
    np.testing.assert_allclose(got.state("norm.running_var"), 0.75**2 + var * (1 - 0.75**2), rtol=1e-12)
