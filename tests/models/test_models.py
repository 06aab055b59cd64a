"""Named networks against published parameter counts and torchvision's names and shapes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar.errors import ConfigError, GraphError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.graph.ops.norm import Norm
from lbpar.graph.ops.pointwise import Tanh
from lbpar.layout.grid import Grid
from lbpar.models.registry import MODELS, build_model
from tests.util.run import assert_same, difference, random_plan, random_state, run, samples, serial

# Published counts, and the first digits of the SHA-256 of torchvision 0.29's sorted state dict names and shapes, one
# "name (shape)" a line, without num_batches_tracked and the auxiliary classifier.
TORCHVISION = {
    "alexnet": (61_100_840, "935c1ea73a7869ee"),
    "vgg11": (132_863_336, "b11acd4f90d9643f"),
    "vgg11_bn": (132_868_840, "eb52f2d89ad478d4"),
    "vgg13": (133_047_848, "79ca8fd7a1480aa7"),
    "vgg13_bn": (133_053_736, "e71996a6a29bacd7"),
    "vgg16": (138_357_544, "ba63c2556d912509"),
    "vgg16_bn": (138_365_992, "d8308b804a50efac"),
    "vgg19": (143_667_240, "393fac8b08b63fbe"),
    "vgg19_bn": (143_678_248, "8f342fea647d72df"),
    "resnet18": (11_689_512, "2bb53b15765c4651"),
    "resnet34": (21_797_672, "b945021fb00b779b"),
    "resnet50": (25_557_032, "cf11dad974eadeaa"),
    "resnet101": (44_549_160, "d916ed2068e1af5d"),
    "resnet152": (60_192_808, "2fe195791c8ffb5f"),
    "wide_resnet50_2": (68_883_240, "5b22ca8fa50e0423"),
    "inception_v3": (23_834_568, "5beceaea5a4204b9"),
    "densenet121": (7_978_856, "222a58d1fd8d2818"),
    "densenet169": (14_149_480, "a9eb5c1c253d9342"),
    "densenet201": (20_013_928, "aaf6c59d276cc495"),
}
OTHERS = {"lenet", "unet2d", "unet3d", "nnunet", "vnet", "cosmoflow"}


def test_every_network_is_covered() -> None:
    assert set(MODELS) == set(TORCHVISION) | OTHERS


@pytest.mark.parametrize("name", TORCHVISION)
def test_names_shapes_and_counts_are_torchvisions(name: str) -> None:
    count, digest = TORCHVISION[name]
    graph = build_model(name)
    assert graph.parameter_count == count
    assert graph.shapes(2)[graph.output] == (2, 1000)
    shapes = {k: p.shape for k, p in graph.params().items()}
    shapes = {k: (s[0], s[-1], *s[1:-1]) if len(s) > 2 else s for k, s in shapes.items()}
    text = "\n".join(f"{k} {s}" for k, s in sorted(shapes.items()))
    assert hashlib.sha256(text.encode()).hexdigest().startswith(digest)


@pytest.mark.parametrize("name", MODELS)
def test_options_that_all_networks_have(name: str) -> None:
    def spatial(x: int) -> tuple[int, ...]:
        return (x,) * (3 if name in ("unet3d", "nnunet", "vnet", "cosmoflow") else 2)

    size = {"inception_v3": 80, "alexnet": 64}.get(name, 32)
    thin = build_model(name, classes=7, input=(*spatial(size), 5), width=0.25)
    wide = build_model(name, classes=7, input=(*spatial(size), 5), width=0.5)
    shape = thin.shapes(3)
    assert shape["input"] == (3, *spatial(size), 5)
    assert shape[thin.output][0] == 3 and shape[thin.output][-1] == 7
    assert 2.5 < wide.parameter_count / thin.parameter_count < 4.5  # quadratic but for the first and the last layer
    assert [n.name for n in thin.nodes] == [n.name for n in wide.nodes]


def test_lenet_has_the_count_of_the_classic() -> None:
    assert build_model("lenet").parameter_count == 61_706


def test_grouped_alexnet_is_the_two_tower_original() -> None:
    graph = build_model("alexnet", grouped=True)
    params = graph.params()
    weights = [p.size for k, p in params.items() if k.endswith(".weight")]
    assert weights == [34_848, 307_200, 884_736, 663_552, 442_368, 37_748_736, 16_777_216, 4_096_000]
    assert sum(weights) == 60_954_656
    assert graph.parameter_count == 60_954_656 + 96 + 256 + 384 + 384 + 256 + 4096 + 4096 + 1000
    outputs = [graph.shapes(1)[k][1:] for k in ("features.0", "features.3", "features.6", "features.8", "features.10")]
    assert outputs == [(55, 55, 96), (27, 27, 256), (13, 13, 384), (13, 13, 384), (13, 13, 256)]


@pytest.mark.parametrize("grouped", [False, True])
def test_alexnet_pools_overlap(grouped: bool) -> None:
    graph = build_model("alexnet", grouped=grouped)
    pools = [n.op for n in graph.ops if n.op.kind == "max_pool"]
    assert [(p.kernel, p.stride) for p in pools] == [((3, 3), (2, 2))] * 3  # type: ignore[attr-defined]
    shapes = graph.shapes(1)
    assert [shapes[f"features.{i}"][1] for i in (2, 5, 12)] == [27, 13, 6]


def test_inception_with_its_auxiliary_classifier_would_have_the_published_count() -> None:
    # The head that training with two losses adds, on the 768 channels of 17 x 17 that Mixed_6e gives.
    assert build_model("inception_v3").shapes(1)["Mixed_6e.concat"] == (1, 17, 17, 768)
    g = GraphBuilder((17, 17, 768))
    x = g.norm(g.conv(g.avg_pool(g.input, 5, 3), 128, 1, bias=False))
    x = g.norm(g.conv(x, 768, 5, bias=False))
    aux = g.build(g.linear(g.global_avg_pool(x), 1000))
    assert build_model("inception_v3").parameter_count + aux.parameter_count == 27_161_264


def test_inception_attributes() -> None:
    graph = build_model("inception_v3")
    assert {n.op.eps for n in graph.ops if isinstance(n.op, Norm)} == {1e-3}
    shapes = graph.shapes(1)
    assert shapes["Mixed_5d.concat"] == (1, 35, 35, 288)
    assert shapes["Mixed_7c.concat"] == (1, 8, 8, 2048)


def test_resnet_stems() -> None:
    big, small = build_model("resnet18"), build_model("resnet18", stem="cifar", classes=10)
    assert big.shapes(1)["layer1.0.conv1"] == (1, 56, 56, 64)
    assert small.shapes(1)["layer1.0.conv1"] == (1, 32, 32, 64)
    assert "maxpool" not in small
    assert small.parameter_count == 11_173_962  # as usually reported for CIFAR-10


def test_bottlenecks_stride_in_their_3x3_convolution() -> None:
    ops = {n.name: n.op for n in build_model("resnet50").ops}
    assert [ops[f"layer2.0.conv{i}"].stride for i in (1, 2, 3)] == [(1, 1), (2, 2), (1, 1)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("norm", "count"), [(True, 31_037_633), (False, 31_031_745)])
def test_unet2d_counts(norm: bool, count: int) -> None:
    graph = build_model("unet2d", input=(64, 32, 3), classes=1, norm=norm)
    assert graph.parameter_count == count
    assert graph.shapes(1)[graph.output] == (1, 64, 32, 1)


def test_unet3d_count_is_the_papers() -> None:
    # The paper counts the convolutions' weights and biases, not the norms' scales and shifts.
    assert build_model("unet3d", norm=False).parameter_count == 19_069_955
    normed = build_model("unet3d")
    assert sum(p.size for p in normed.params().values() if p.kind in ("weight", "bias")) == 19_069_955
    assert normed.shapes(1)[normed.output] == (1, 64, 64, 64, 3)


def test_unets_join_the_skip_first() -> None:
    graph = build_model("unet2d", depth=2)
    assert graph["up2.concat"].inputs == ("down2.relu2", "up2.up")
    assert graph["up1.concat"].inputs == ("down1.relu2", "up1.up")


@pytest.mark.parametrize(
    ("name", "shape"),
    [("unet2d", (7, 10, 2)), ("unet2d", (1, 1, 2)), ("unet3d", (5, 1, 6, 2)), ("unet3d", (9, 11, 3, 1))],
)
@pytest.mark.parametrize("norm", ["group", False])
def test_unets_of_any_size(name: str, shape: tuple[int, ...], norm: Any) -> None:
    """The step that PyTorch makes, and the same on ranks that cut the odd extents."""
    torch_graph = pytest.importorskip("tests.util.torch_graph")
    graph = build_model(name, input=shape, depth=3, width=1 / 32, norm=norm)
    trains_as_pytorch(graph, torch_graph)


def trains_as_pytorch(graph: Graph, torch_graph: Any) -> None:
    assert graph.shapes(1)[graph.output][1:-1] == graph.shapes(1)["input"][1:-1]
    graph, rng = graph.with_loss(LOSSES["dice"]()), np.random.default_rng(1)
    feeds, state = samples(graph, 2, rng), random_state(graph, rng)
    got, want = serial(graph, 2, feeds, state=state), torch_graph.step(graph, feeds, state)
    assert difference(got.value("head:y"), want.y["head"]) < 1e-10
    for weight, grad in want.grad.items():
        assert difference(got.value(f"{weight}:grad"), grad, 1e-3) < 1e-8, weight
    # Norms over the few values of the deepest layers enlarge rounding, on one processor more than on another.
    assert_same(run(graph, random_plan(graph, 2, Grid.of(6), rng, 0.1), 2, feeds, state=state), got, 1e-8)


def test_nnunets_have_the_counts_of_the_original() -> None:
    """Of 3-D full resolution at 128³ with one channel and two classes, less the four heads of deep supervision."""
    heads = sum(2 * f + 2 for f in (64, 128, 256, 320))
    assert build_model("nnunet").parameter_count == 31_195_594 - heads
    assert build_model("nnunet", encoder="residual").parameter_count == 102_349_770 - heads
    plane = build_model("nnunet", input=(512, 512, 1))
    assert plane.params()["down8.2.conv.weight"].shape == (512, 3, 3, 512) and "down9.1.conv" not in plane


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nnunet", {"input": (11, 9, 8, 2), "width": 1 / 16}),
        ("nnunet", {"input": (9, 3, 2, 1), "width": 1 / 16, "encoder": "residual", "stages": 4}),
        ("nnunet", {"input": (13, 22, 1), "width": 1 / 16, "encoder": "residual"}),
        ("vnet", {"input": (5, 9, 3, 1), "width": 1 / 8}),
        ("vnet", {"input": (7, 4, 1, 3), "width": 1 / 8, "norm": False}),
    ],
)
def test_other_networks_for_volumes_of_any_size(name: str, options: dict[str, Any]) -> None:
    trains_as_pytorch(build_model(name, **options), pytest.importorskip("tests.util.torch_graph"))


def test_vnet_count() -> None:
    """As its paper draws it: a 5³ convolution each, norms and slopes per channel."""
    filters, convs, count = [16, 32, 64, 128, 256], [1, 2, 3, 3, 3], 0
    for i, (f, n) in enumerate(zip(filters, convs, strict=True)):
        before = filters[i - 1] if i else 1
        count += (before * f * 8 + f + 3 * f) * (i > 0) + (f if i else 1) * f * 125 + 4 * f
        count += (n - 1) * (f * f * 125 + 4 * f)
        if i < 4:
            count += min(2 * filters[i + 1], 256) * f * 8 + 4 * f + n * (2 * f * 2 * f * 125 + 8 * f)
    assert build_model("vnet").parameter_count == count + 32 * 2 + 2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("unet3d", {"input": (8, 8, 8, 1), "norm": "instance"}, "depth: got 3, expected at most 2 .* instance norm"),
        ("nnunet", {"input": (8, 8, 8, 1), "stages": 4}, "stages: got 4, expected at most 3"),
    ],
)
def test_one_position_at_the_bottom_is_refused_with_what_to_do(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        build_model(name, **options)


def test_a_join_of_unequal_sizes_names_what_made_them_unequal() -> None:
    g = GraphBuilder((9, 8, 2))
    up = g.upsample(g.max_pool(g.input, 2, name="pool"), 2, name="up")
    for join in (g.concat, g.add):
        with pytest.raises(GraphError, match=r"input \[9, 8\], up \[8, 8\], made unequal by pool; .* `fit`"):
            join([g.input, up])
    fitted = g.fit([up, g.input], name="fitted")
    graph = g.build(g.concat([g.input, fitted]))
    assert graph.shapes(1)[graph.output] == (1, 9, 8, 4)
    assert graph["fitted"].inputs == (up,)  # what planners price: nothing of the other is read


def test_cosmoflow_variants() -> None:
    convs = sum(27 * c * f + f for c, f in zip((4, 32, 64, 128, 256), (32, 64, 128, 256, 512), strict=True))
    linear = (512 * 64 * 128 + 128) + (128 * 64 + 64) + (64 * 4 + 4)
    mlperf = build_model("cosmoflow")
    assert mlperf.parameter_count == convs + linear
    assert mlperf.shapes(1)["pool5"] == (1, 4, 4, 4, 512)
    assert mlperf[mlperf.output].op == Tanh(1.2)
    assert {p.init for p in mlperf.params().values() if p.kind == "weight"} == {"glorot"}
    spatial = build_model("cosmoflow", variant="spatial", input=(256, 256, 256, 4), norm=True)
    assert spatial.shapes(1)["pool6"] == (1, 4, 4, 4, 256)
    assert spatial["pool1"].op.kind == "avg_pool" and "conv1.bias" not in spatial.params()
    with pytest.raises(GraphError, match="at least 8"):
        build_model("cosmoflow", input=(4, 64, 64, 1))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet8", {}, "model: got 'resnet8', did you mean 'resnet18'?"),
        ("resnet18", {"clases": 3}, "model resnet18: clases: unknown field.*did you mean 'classes'"),
        ("lenet", {"stem": "cifar"}, "stem: unknown field"),
        ("resnet18", {"stem": "cifer"}, "model resnet18: stem: got 'cifer', did you mean 'cifar'"),
        ("resnet18", {"width": "big"}, "width: got 'big', expected a number"),
        ("resnet18", {"width": 0}, "width: got 0, expected more than 0"),
        ("resnet18", {"classes": 2.5}, "classes: got 2.5"),
        ("alexnet", {"grouped": 1}, "grouped: got 1, expected true or false"),
        ("vgg11", {"input": [224]}, "features.0|input"),
    ],
)
def test_wrong_names_and_options_are_explained(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises((ConfigError, GraphError), match=message):
        build_model(name, **options)


def test_too_small_an_input_names_network_and_layer() -> None:
    with pytest.raises(GraphError, match="model vgg11: features.15: max_pool"):
        build_model("vgg11", input=(8, 8, 3))


@pytest.mark.parametrize(("norm", "kind"), [("batch", "norm"), ("instance", "instance_norm"), ("group", "group_norm")])
def test_unets_take_a_norm_by_name(norm: str, kind: str) -> None:
    for name, shape in (("unet2d", (8, 8, 1)), ("unet3d", (8, 8, 8, 1))):
        graph = build_model(name, input=shape, depth=2, width=0.25, norm=norm)
        norms = [n.op for n in graph.ops if n.name.rpartition(".")[2].startswith("norm")]
        assert len(norms) == 10 and {op.kind for op in norms} == {kind}


def test_a_file_that_is_no_network_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "cls.h5").write_text("")
    with pytest.raises(ConfigError, match=r"cls\.h5 is no network: files of networks are named \.onnx"):
        build_model(str(tmp_path / "cls.h5"))
