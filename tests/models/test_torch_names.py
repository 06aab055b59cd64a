"""Weights to and from hand-written PyTorch modules: names, shapes, and the same outputs."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.errors import GraphError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.models.registry import build_model
from lbpar.models.torch_names import from_torch, to_torch

torch = pytest.importorskip("torch")
nn = torch.nn

from tests.models.interpreter import first, last, run


def lenet() -> tuple[object, Graph]:
    class LeNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
            self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

        def forward(self, x):  # type: ignore[no-untyped-def]
            x = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
            x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)
            return self.fc3(self.fc2(self.fc1(x.flatten(1)).relu()).relu())

    return LeNet(), build_model("lenet")


def vgg() -> tuple[object, Graph]:
    layers, c = [], 3
    for f, depth in ((8, 1), (16, 1), (32, 2), (64, 2), (64, 2)):
        for _ in range(depth):
            layers += [nn.Conv2d(c, f, 3, padding=1), nn.BatchNorm2d(f), nn.ReLU()]
            c = f
        layers.append(nn.MaxPool2d(2))

    class Vgg(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(*layers)
            hidden = [nn.Linear(64 * 2 * 3, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 512), nn.ReLU(), nn.Dropout()]
            self.classifier = nn.Sequential(*hidden, nn.Linear(512, 5))

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.classifier(self.features(x).flatten(1))

    return Vgg(), build_model("vgg11_bn", width=0.125, input=(64, 96, 3), classes=5)


def resnet() -> tuple[object, Graph]:
    class Block(nn.Module):
        def __init__(self, c: int, f: int, stride: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(c, f, 3, stride, 1, bias=False), nn.BatchNorm2d(f)
            self.conv2, self.bn2 = nn.Conv2d(f, f, 3, 1, 1, bias=False), nn.BatchNorm2d(f)
            if stride > 1:
                self.downsample = nn.Sequential(nn.Conv2d(c, f, 1, stride, bias=False), nn.BatchNorm2d(f))

        def forward(self, x):  # type: ignore[no-untyped-def]
            y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
            return (y + (self.downsample(x) if hasattr(self, "downsample") else x)).relu()

    class ResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
            c = 8
            for i in range(4):
                f = 8 * 2**i
                blocks = Block(c, f, 1 + (i > 0)), Block(f, f, 1)
                setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
                c = f
            self.fc = nn.Linear(64, 10)

        def forward(self, x):  # type: ignore[no-untyped-def]
            x = nn.functional.max_pool2d(self.bn1(self.conv1(x)).relu(), 3, 2, 1)
            return self.fc(self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean((2, 3)))

    return ResNet(), build_model("resnet18", width=0.125, input=(48, 40, 3), classes=10)


def transposed() -> tuple[object, Graph]:
    """3-D, grouped, transposed, a norm after flattening, and a join of flattened features."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv3d(4, 6, (1, 2, 3), groups=2)
            self.b = nn.ConvTranspose3d(6, 8, 2, 2, groups=2)
            self.c = nn.Conv3d(6, 3, 1)
            self.norm = nn.BatchNorm1d(6 * 3 * 2 * 2)
            self.fc = nn.Linear(72 + 8 * 6 * 4 * 4 + 3, 5)

        def forward(self, x):  # type: ignore[no-untyped-def]
            x = self.a(x).relu()
            parts = [self.norm(x.flatten(1)).relu(), self.b(x).flatten(1), self.c(x).mean((2, 3, 4))]
            return self.fc(torch.cat(parts, 1))

    g = GraphBuilder((3, 3, 4, 4))
    x = g.relu(g.conv(g.input, 6, (1, 2, 3), groups=2, name="a"))
    flat = g.relu(g.norm(g.flatten(x), name="norm"))
    up = g.flatten(g.conv_transpose(x, 8, 2, 2, groups=2, name="b"))
    mean = g.global_avg_pool(g.conv(x, 3, 1, name="c"))
    return Net(), g.build(g.linear(g.concat([flat, up, mean]), 5, name="fc"))


def within_samples() -> tuple[object, Graph]:
    module = nn.Sequential(
        *(nn.Conv2d(2, 6, 3), nn.InstanceNorm2d(6, affine=True), nn.ReLU(), nn.GroupNorm(3, 6)),
        *(nn.Flatten(), nn.LayerNorm(6 * 3 * 2), nn.Linear(36, 5)),
    )
    for p in module.parameters():
        nn.init.normal_(p)
    g = GraphBuilder((5, 4, 2))
    x = g.instance_norm(g.conv(g.input, 6, 3, name="0"), name="1")
    x = g.layer_norm(g.flatten(g.group_norm(g.relu(x), 3, name="3")), name="5")
    return module, g.build(g.linear(x, 5, name="6"))


@pytest.fixture(params=[lenet, vgg, resnet, transposed, within_samples], ids=lambda f: f.__name__)
def pair(request: pytest.FixtureRequest) -> tuple[object, Graph]:
    torch.manual_seed(3)
    module, graph = request.param()
    module = module.double().eval()
    for m in module.modules():
        if getattr(m, "running_mean", None) is not None:
            m.running_mean.normal_(0, 0.1)
            m.running_var.uniform_(0.5, 2)
    return module, graph


def test_a_converted_module_gives_the_same_output(pair) -> None:  # type: ignore[no-untyped-def]
    module, graph = pair
    params = from_torch(graph, module.state_dict())
    assert {k: v.shape for k, v in params.items()} == {k: p.shape for k, p in graph.params().items()}
    assert all(v.flags.c_contiguous for v in params.values())
    x = np.random.default_rng(1).standard_normal(graph.shapes(2)["input"])
    with torch.no_grad():
        expected = module(first(torch.from_numpy(x))).numpy()
    np.testing.assert_allclose(run(graph, params, x), expected, rtol=1e-10, atol=1e-12)


def test_there_and_back(pair) -> None:  # type: ignore[no-untyped-def]
    module, graph = pair
    state = module.state_dict()
    back = to_torch(graph, from_torch(graph, state))
    assert {k: v.shape for k, v in back.items()} == {k: tuple(v.shape) for k, v in state.items()}
    for name, value in state.items():
        assert np.array_equal(back[name], value.numpy()), name
    module.load_state_dict({k: torch.from_numpy(v) for k, v in back.items()})


def test_unet_of_transposed_convolutions_matches_torch() -> None:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 5, 3, 2, 1, 1)

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.up(x)

    torch.manual_seed(0)
    module = Up().double()
    g = GraphBuilder((4, 5, 3))
    graph = g.build(g.conv_transpose(g.input, 5, 3, 2, 1, output_pad=1, name="up"))
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    y = run(graph, from_torch(graph, module.state_dict()), last(x).numpy())
    np.testing.assert_allclose(y, last(module(x).detach()).numpy(), rtol=1e-12, atol=1e-12)


def test_statistics_are_float64_and_weights_keep_their_type() -> None:
    g = GraphBuilder((4, 4, 2))
    graph = g.build(g.norm(g.conv(g.input, 3, 1, name="a"), name="b"))
    state = nn.ModuleDict({"a": nn.Conv2d(2, 3, 1), "b": nn.BatchNorm2d(3)}).state_dict()
    params = from_torch(graph, state)
    assert {k: v.dtype for k, v in params.items() if "running" in k} == dict.fromkeys(
        ("b.running_mean", "b.running_var"), np.dtype("float64")
    )
    assert params["a.weight"].dtype == params["b.weight"].dtype == np.float32
    half = from_torch(graph, {k: v.bfloat16() if v.is_floating_point() else v for k, v in state.items()})
    np.testing.assert_allclose(half["a.weight"], params["a.weight"], rtol=1e-2)


def test_wrong_state_dicts_are_explained() -> None:
    graph = build_model("lenet")
    state = lenet()[0].state_dict()  # type: ignore[attr-defined]
    with pytest.raises(GraphError, match=r"got no 'conv1.bias', did you mean 'conv2.bias'\?"):
        from_torch(graph, {k: v for k, v in state.items() if k != "conv1.bias"})
    with pytest.raises(GraphError, match=r"got 'fc9.weight'.*ignore"):
        from_torch(graph, state | {"fc9.weight": state["fc1.weight"]})
    assert from_torch(graph, state | {"fc9.weight": state["fc1.weight"]}, ignore=["fc9."]).keys() == state.keys()
    with pytest.raises(GraphError, match=r"'fc1.bias' has shape \(84,\), expected \(120,\)"):
        from_torch(graph, state | {"fc1.bias": state["fc2.bias"]})
    params = from_torch(graph, state)
    with pytest.raises(GraphError, match="got no 'fc3.bias'"):
        to_torch(graph, {k: v for k, v in params.items() if k != "fc3.bias"})
    with pytest.raises(GraphError, match="'fc3.bias' has shape"):
        to_torch(graph, params | {"fc3.bias": params["fc2.bias"]})


def test_adding_differently_flattened_features_has_no_torch_order() -> None:
    g = GraphBuilder((2, 6, 4))
    a = g.flatten(g.input)
    b = g.flatten(g.conv(g.input, 6, (1, 3), pad=(0, 0), name="c"))
    c = g.linear(a, 48, name="d")
    assert g.shape(b) == (1, 48)
    with pytest.raises(GraphError, match="add1"):
        from_torch(*_with_state(g.build(g.linear(g.add([a, c]), 3))))
    with pytest.raises(GraphError, match="add2"):
        from_torch(*_with_state(g.build(g.linear(g.add([a, b]), 3))))


def _with_state(graph: Graph) -> tuple[Graph, dict[str, np.ndarray]]:
    return graph, {k: np.zeros(p.shape) for k, p in graph.params().items()}


def test_a_module_with_two_names_is_one_layer_that_another_shares() -> None:
    """PyTorch lists its tensors under both; ours has them once, and gives the same outputs."""
    twice = nn.Conv2d(3, 3, 3, padding=1)
    module = nn.Sequential()
    module.add_module("a", twice)
    module.add_module("act", nn.Tanh())
    module.add_module("b", twice)
    g = GraphBuilder(input=(5, 4, 3))
    graph = g.build(g.conv(g.tanh(g.conv(g.input, 3, 3, pad=1, name="a")), 3, 3, pad=1, name="b", share="a"))
    weights = from_torch(graph, module.state_dict())
    assert set(weights) == {"a.weight", "a.bias"}
    x = np.random.default_rng(0).standard_normal((2, 5, 4, 3)).astype(np.float32)
    want = last(module(first(torch.from_numpy(x)))).detach().numpy()
    np.testing.assert_allclose(run(graph, weights, x), want, rtol=1e-5, atol=1e-6)
    state = dict(module.state_dict()) | {"b.weight": torch.zeros(3, 3, 3, 3)}
    with pytest.raises(GraphError, match="'b.weight' differs from 'a.weight', but these layers share"):
        from_torch(graph, state)
    out = to_torch(graph, weights)
    assert set(out) == {"a.weight", "a.bias"}


def test_matrices_that_read_features_in_different_orders_are_not_shared() -> None:
    g = GraphBuilder(input=(2, 2, 2))
    graph = g.build(g.linear(g.linear(g.flatten(g.input), 8, name="one"), 8, name="two", share="one"))
    with pytest.raises(
        GraphError, match="one: it shares its parameters with a layer that reads flattened features in another order"
    ):
        to_torch(graph, {n: np.zeros(p.shape) for n, p in graph.params().items()})
