"""Imported ONNX files compute what ONNX's own reference says, and refusals say what is wrong."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from lbpar.config.model import InlineModel, OnnxModel
from lbpar.cost.machine import find_machine
from lbpar.cost.price import price
from lbpar.errors import GraphError
from lbpar.graph.ops.channels import LocalResponseNorm
from lbpar.graph.ops.losses import LOSSES, CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.models.load import load_graph, load_weights
from lbpar.models.onnx_import import import_onnx
from lbpar.plan.strategies import strategy_plan
from lbpar.program.lowering import lower
from tests.models.onnx_files import FLOAT, Net, check, compare, ours, reference

IMAGE = ("n", 3, 9, 8)


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"pads": [2, 0, 1, 3]},
        {"strides": [2, 3], "pads": [1, 2, 0, 1]},
        {"dilations": [2, 1], "pads": [1, 0, 2, 0]},
        {"auto_pad": "SAME_UPPER", "strides": [2, 3]},
        {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
        {"auto_pad": "VALID"},
    ],
    ids=str,
)
def test_conv(attributes: dict[str, Any], tmp_path: Path) -> None:
    net = Net(IMAGE)
    y = net.add("Conv", "x", net.weight(4, 3, 3, 2), net.weight(4), kernel_shape=[3, 2], **attributes)
    check(net, y, tmp_path)


def test_conv_grouped_without_bias_in_one_and_three_dimensions(tmp_path: Path) -> None:
    net = Net(("n", 4, 9, 8))
    check(net, net.add("Conv", "x", net.weight(6, 2, 3, 3), group=2), tmp_path)
    net = Net((2, 4, 5, 4, 6))
    y = net.add("Conv", "x", net.weight(8, 1, 3, 2, 3), net.weight(8), group=4, pads=[1, 0, 0, 1, 1, 2])
    check(net, y, tmp_path)
    net = Net((2, 4, 9))
    check(net, net.add("Conv", "x", net.weight(5, 4, 3), pads=[2, 1]), tmp_path)


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"strides": [2, 3], "pads": [1, 0, 0, 1], "output_padding": [1, 2]},
        {"group": 4, "strides": [2, 1]},
        {"dilations": [2, 1], "pads": [0, 1, 1, 0]},
        {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
        {"strides": [2, 2], "auto_pad": "SAME_LOWER"},
    ],
    ids=str,
)
def test_conv_transpose(attributes: dict[str, Any], tmp_path: Path) -> None:
    net = Net(("n", 4, 9, 8))
    groups = attributes.get("group", 1)
    bias = [] if groups > 1 else [net.weight(4)]  # the reference cannot do both
    y = net.add("ConvTranspose", "x", net.weight(4, 4 // groups, 3, 3), *bias, **attributes)
    check(net, y, tmp_path)


@pytest.mark.parametrize(
    "kind, opset, sizes, attributes",
    [
        ("InstanceNormalization", 17, (4,), {}),
        ("GroupNormalization", 21, (4,), {"num_groups": 2}),
        ("GroupNormalization", 18, (2,), {"num_groups": 2}),
    ],
)
def test_norm_within_samples(kind: str, opset: int, sizes: Any, attributes: dict[str, Any], tmp_path: Path) -> None:
    """The reference counts statistics in float32."""
    net = Net(("n", 4, 5, 3), opset)
    graph = check(
        net,
        net.add(kind, "x", net.weight(*sizes), net.weight(*sizes), epsilon=1e-3, **attributes),
        tmp_path,
        tolerance=1e-6,
    )
    assert graph.ops[0].op.eps == 1e-3  # type: ignore[attr-defined]


def test_layer_norm_over_the_last_dimension(tmp_path: Path) -> None:
    net = Net(("n", 4, 5, 3))
    y = net.add("Transpose", "x", perm=[0, 2, 3, 1])
    y = net.add("LayerNormalization", y, net.weight(4), net.weight(4), axis=-1, epsilon=1e-3)
    check(net, net.add("Transpose", y, perm=[0, 3, 1, 2]), tmp_path, tolerance=1e-6)
    net = Net(("n", 4, 5, 3))
    with pytest.raises(GraphError, match="expected the channels"):
        import_onnx(net.save(net.add("LayerNormalization", "x", net.weight(3), axis=-1), tmp_path))


@pytest.mark.parametrize(
    "kind, attributes",
    [
        *(
            ("Elu", {"alpha": 0.5}),
            ("Gelu", {}),
            ("Gelu", {"approximate": "tanh"}),
            ("Softplus", {}),
            ("HardSwish", {}),
        ),
        ("HardSigmoid", {"alpha": 0.25}),
    ],
)
def test_activation_by_name(kind: str, attributes: dict[str, Any], tmp_path: Path) -> None:
    net = Net(("n", 4, 5, 3), 20)
    check(net, net.add(kind, "x", **attributes), tmp_path, tolerance=1e-7)


@pytest.mark.parametrize(
    "shape, pad, extra",
    [([18, 16], ((1, 0), (1, 0)), (0, 0)), ([17, 14], ((1, 1), (2, 1)), (0, 0)), ([20, 17], ((0, 0), (0, 0)), (1, 0))],
)
def test_conv_transpose_to_a_given_shape(shape: Any, pad: Any, extra: Any, tmp_path: Path) -> None:
    """The reference cannot; these are the equations of ONNX's documentation."""
    net = Net(("n", 4, 9, 8))
    y = net.add("ConvTranspose", "x", net.weight(4, 2, 3, 3), strides=[2, 2], output_shape=shape)
    graph, _ = import_onnx(net.save(y, tmp_path))
    op: Any = graph.ops[0].op
    assert (op.pad, op.output_pad) == (pad, extra)
    assert graph.shapes(1)[graph.output] == (1, *shape, 2)


POOLS = pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])


@POOLS
def test_pools_of_the_same_size(kind: str, tmp_path: Path) -> None:
    """The reference gets SAME_LOWER wrong for max pools, so the same by explicit pads is what it must be."""
    for auto, pads in (("SAME_UPPER", [0, 0, 1, 0]), ("SAME_LOWER", [1, 0, 0, 0])):
        kinds = []
        for how in ({"auto_pad": auto}, {"pads": pads}):
            net = Net(("n", 3, 8, 8))
            path = net.save(net.add(kind, "x", kernel_shape=[3, 2], strides=[2, 2], **how), tmp_path)
            kinds.append(import_onnx(path)[0])
        assert kinds[0] == kinds[1]


@POOLS
@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"strides": [2, 2]},
        {"strides": [2, 2], "ceil_mode": 1},
        {"strides": [3, 2], "pads": [1, 0, 0, 1]},
        {"strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1},
        {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
    ],
    ids=str,
)
def test_pools(kind: str, attributes: dict[str, Any], tmp_path: Path) -> None:
    net = Net(IMAGE)
    check(net, net.add(kind, "x", kernel_shape=[3, 2], **attributes), tmp_path)


@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1]])
@pytest.mark.parametrize("include", [0, 1])
def test_average_pool_counts_padding_or_not(include: int, pads: list[int], tmp_path: Path) -> None:
    net = Net(IMAGE)
    y = net.add("AveragePool", "x", kernel_shape=[3, 2], strides=[1, 2], pads=pads, count_include_pad=include)
    check(net, y, tmp_path)


def test_ceil_mode_and_counted_padding_as_in_pytorch(tmp_path: Path) -> None:
    """The reference counts taps beyond the padding, PyTorch and we do not; so PyTorch judges."""
    torch = pytest.importorskip("torch")
    net = Net((2, 3, 8, 8))
    x = net.rng.standard_normal((2, 3, 8, 8))
    attributes = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1}
    path = net.save(net.add("AveragePool", "x", count_include_pad=1, **attributes), tmp_path)
    want = torch.nn.functional.avg_pool2d(torch.from_numpy(x), 3, 2, 1, ceil_mode=True).numpy()
    compare(ours(path, x), want, 1e-12)


def _exported(folder: Path, **options: Any) -> tuple[Any, Path, Any]:
    """A PyTorch module, its file and samples; the statistics of its norms have been moved."""
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Module(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4, momentum=0.05), nn.ReLU())
            self.up = nn.ConvTranspose2d(4, 4, 3, 2, 1, 1, groups=2)
            self.drop, self.fc = nn.Dropout(0.3), nn.Linear(8 * 2 * 5, 6)

        def forward(self, x: Any) -> Any:
            x = self.stem(x)
            y = nn.functional.max_pool2d(nn.functional.silu(self.up(x)), 2)
            y = nn.functional.avg_pool2d(torch.cat([x, y + x], 1), (4, 2), 3, 1, ceil_mode=True)
            return self.fc(self.drop(y.view(y.size(0), -1)))

    torch.manual_seed(1)
    module, x = Module().double(), torch.randn(3, 3, 9, 28, dtype=torch.float64)
    module(x)
    path = folder / "net.onnx"
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (x,), str(path), input_names=["x"], **options)
    module.eval()
    return module, path, x


@pytest.mark.parametrize(
    "dynamo", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["torchscript", "torch.export"]
)
def test_exported_from_pytorch(dynamo: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if dynamo:
        pytest.importorskip("onnxscript")
        options: dict[str, Any] = {"dynamo": True, "dynamic_shapes": ({0: "n"},), "optimize": False}
    else:
        training = torch.onnx.TrainingMode.TRAINING
        options = {"dynamo": False, "training": training, "do_constant_folding": False, "dynamic_axes": {"x": {0: "n"}}}
    module, path, x = _exported(tmp_path, **options)
    graph, weights = import_onnx(path)
    theirs = {n: v for n, v in module.state_dict().items() if not n.endswith("num_batches_tracked")}
    assert set(weights) == set(theirs)
    assert graph["stem.1"].op.momentum == 0.05  # type: ignore[attr-defined]
    assert [n.op.rate for n in graph.ops if n.op.kind == "dropout"] == [0.3]  # type: ignore[attr-defined]
    np.testing.assert_array_equal(weights["stem.0.weight"], np.moveaxis(theirs["stem.0.weight"].numpy(), 1, -1))
    # The export of a module in training mode may have moved the statistics; those of the file are what counts.
    module.load_state_dict({n: torch.from_numpy(weights[n]) for n in theirs if "running" in n}, strict=False)
    with torch.no_grad():
        compare(ours(path, x.numpy()), module(x).numpy(), 1e-12)


def test_dilated_max_pool(tmp_path: Path) -> None:
    net = Net(IMAGE)
    check(net, net.add("MaxPool", "x", kernel_shape=[2, 3], dilations=[2, 1], pads=[1, 1, 0, 1]), tmp_path)


def test_norm_momentum_is_the_other_share(tmp_path: Path) -> None:
    net = Net(IMAGE)
    path = net.save(net.norm("x", 3, momentum=0.8, epsilon=1e-3), tmp_path)
    op: Any = import_onnx(path)[0].ops[0].op
    assert op.momentum == 0.2 and op.eps == 1e-3
    check(net, net.nodes[-1].output[0], tmp_path)
    net = Net(IMAGE)
    op = import_onnx(net.save(net.norm("x", 3), tmp_path))[0].ops[0].op
    assert op.momentum == 0.1 and op.eps == 1e-5


def test_activations(tmp_path: Path) -> None:
    net = Net(IMAGE)
    y = net.add("LeakyRelu", net.add("Sigmoid", net.add("Conv", "x", net.weight(4, 3, 1, 1))), alpha=0.25)
    y = net.add("LeakyRelu", net.add("Conv", y, net.weight(4, 4, 1, 1)), alpha=0.5)
    check(net, net.add("Mul", net.add("Tanh", y), net.add("Sigmoid", y)), tmp_path)


@pytest.mark.parametrize("how", ["flatten", "reshape", "view", "squeeze", "transpose"])
def test_flatten_before_gemm(how: str, tmp_path: Path) -> None:
    """Columns are permuted to channels last; a transpose before the flatten undoes the need."""
    net = Net((*IMAGE[:2], 3, 1)) if how == "squeeze" else Net(IMAGE)
    features = int(np.prod(net.shape[1:]))  # type: ignore[arg-type]
    y = "x"
    match how:
        case "flatten":
            y = net.add("Flatten", y)
        case "reshape":
            y = net.add("Reshape", y, net.tensor(np.array([0, -1])))
        case "view":  # x.view(x.size(0), -1)
            n = net.add("Gather", net.add("Shape", y), net.tensor(np.array(0)))
            n = net.add("Unsqueeze", n, net.tensor(np.array([0])))
            y = net.add("Reshape", y, net.add("Concat", n, net.tensor(np.array([-1])), axis=0))
        case "squeeze":
            y = net.add("AveragePool", y, kernel_shape=[3, 1])
            y = net.add("Squeeze", net.add("Squeeze", y, net.tensor(np.array([3]))), net.tensor(np.array([-1])))
            features = 3
        case "transpose":
            y = net.add("Flatten", net.add("Transpose", y, perm=[0, 2, 3, 1]))
    y = net.add("Relu", net.norm(net.add("Relu", y), features))  # a norm of features in their order
    y = net.add("Gemm", y, net.weight(7, features), net.weight(7), transB=1)
    check(net, net.add("Gemm", y, net.weight(7, 5), net.weight(1, 5), alpha=0.5, beta=2.0), tmp_path)


def test_concatenated_flattened_features(tmp_path: Path) -> None:
    net = Net(IMAGE)
    a = net.add("Flatten", "x")
    b = net.add("Flatten", net.add("MaxPool", "x", kernel_shape=[2, 2], strides=[2, 2]))
    c = net.add("Flatten", net.add("GlobalAveragePool", "x"))
    y = net.add("Concat", a, b, c, axis=-1)
    check(net, net.add("Gemm", y, net.weight(216 + 48 + 3, 5)), tmp_path)


def test_matmul_and_conv_take_the_add_as_bias(tmp_path: Path) -> None:
    net = Net(IMAGE)
    y = net.add("Add", net.add("Conv", "x", net.weight(4, 3, 3, 3)), net.weight(1, 4, 1, 1))
    y = net.add("Flatten", y)
    y = net.add("Add", net.weight(5), net.add("MatMul", y, net.weight(4 * 7 * 6, 5)))
    graph, weights = import_onnx(net.save(y, tmp_path))
    assert [n.op.kind for n in graph.ops] == ["conv", "flatten", "linear"]
    assert weights["linear1.bias"].shape == (5,) and weights["conv1.bias"].shape == (4,)
    check(net, y, tmp_path)


@pytest.mark.parametrize("opset", [11, 13, 18, 21])
@pytest.mark.parametrize("keep", [0, 1])
def test_pooled_heads(opset: int, keep: int, tmp_path: Path) -> None:
    net = Net(IMAGE, opset)
    if opset < 18:
        y = net.add("ReduceMean", "x", axes=[2, 3], keepdims=keep)
    else:
        y = net.add("ReduceMean", "x", net.tensor(np.array([-1, -2])), keepdims=keep)
    if keep and opset < 13:
        y = net.add("Squeeze", y, axes=[2, 3])
    elif keep:
        y = net.add("Squeeze", y, net.tensor(np.array([2, 3])))
    ratio = {"ratio": 0.25} if opset < 12 else {}
    y = net.add("Dropout", y, *([] if ratio else [net.tensor(np.array(0.25, np.float32))]), **ratio)
    y = net.add("Gemm", y, net.weight(3, 5), net.weight(5))
    graph, _ = import_onnx(net.save(y, tmp_path))
    assert [n.op.kind for n in graph.ops] == ["global_avg_pool", "dropout", "linear"]
    assert graph["dropout1"].op.rate == 0.25  # type: ignore[attr-defined]
    check(net, y, tmp_path)


@pytest.mark.parametrize("keep", [0, 1])
def test_maximum_over_space(keep: int, tmp_path: Path) -> None:
    net = Net(IMAGE)
    y = net.add("ReduceMax", "x", axes=[3, 2], keepdims=keep)
    check(net, net.add("Gemm", net.add("Flatten", y) if keep else y, net.weight(3, 5)), tmp_path)


def test_squeeze_and_excite(tmp_path: Path) -> None:
    net = Net(IMAGE)
    y = net.add("Relu", net.add("Conv", net.add("GlobalAveragePool", "x"), net.weight(2, 3, 1, 1), net.weight(2)))
    y = net.add("Sigmoid", net.add("Conv", y, net.weight(3, 2, 1, 1), net.weight(3)))
    check(net, net.add("GlobalMaxPool", net.add("Mul", "x", y)), tmp_path)


def test_residual_and_dense_blocks(tmp_path: Path) -> None:
    net = Net(("n", 4, 8, 8))
    x = net.add("Relu", net.norm(net.add("Conv", "x", net.weight(6, 4, 3, 3), pads=[1, 1, 1, 1], strides=[2, 2]), 6))
    y = net.norm(net.add("Conv", x, net.weight(6, 3, 3, 3), group=2, auto_pad="SAME_UPPER"), 6)
    x = net.add("Relu", net.add("Add", net.add("Identity", y), x))
    y = net.add("Conv", net.add("Sum", x, y, x), net.weight(3, 6, 1, 1))
    y = net.add("Concat", x, y, net.add("MaxPool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1]), axis=1)
    y = net.add("Flatten", net.add("AveragePool", y, kernel_shape=[2, 2], strides=[2, 2]))
    check(net, net.add("Gemm", y, net.weight(10, 15 * 4), net.weight(10), transB=1), tmp_path)


@pytest.mark.parametrize("by", ["scales", "sizes", "shape"])
def test_nearest_upsampling(by: str, tmp_path: Path) -> None:
    net = Net(IMAGE)
    given = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    scales = net.tensor(np.array([1, 1, 2, 3], np.float32))
    if by == "scales":
        y = net.add("Resize", "x", "", scales, mode="nearest", **given)
    elif by == "sizes":
        y = net.add("Resize", net.add("Relu", "x"), "", "", net.tensor(np.array([2, 3, 18, 24])), mode="nearest")
        net.shape[0] = 2
    else:
        n = net.add("Slice", net.add("Shape", "x"), net.tensor(np.array([0])), net.tensor(np.array([2])))
        s = net.add("Concat", n, net.tensor(np.array([18, 24])), axis=0)
        y = net.add("Resize", "x", "", "", s, mode="nearest", **given)
    check(net, net.add("Conv", y, net.weight(2, 3, 2, 2)), tmp_path)


@pytest.mark.parametrize(
    "rounding, coordinates, good",
    [
        ("round_prefer_floor", "half_pixel", True),
        ("floor", "asymmetric", True),
        ("round_prefer_ceil", "pytorch_half_pixel", True),
        ("floor", "half_pixel", False),
        ("ceil", "asymmetric", False),
        ("round_prefer_floor", "align_corners", False),
    ],
)
def test_only_resizes_that_repeat_pixels(rounding: str, coordinates: str, good: bool, tmp_path: Path) -> None:
    net = Net(IMAGE)
    scales = net.tensor(np.array([1, 1, 3, 2], np.float32))
    how = {"nearest_mode": rounding, "coordinate_transformation_mode": coordinates}
    y = net.add("Resize", "x", "", scales, mode="nearest", **how)
    if good:
        check(net, y, tmp_path)
    else:
        with pytest.raises(GraphError, match=f"Resize.*'{coordinates}' and nearest_mode '{rounding}'.*repeat"):
            import_onnx(net.save(y, tmp_path))


@pytest.mark.parametrize("coordinates", ["half_pixel", "pytorch_half_pixel", "align_corners"])
def test_linear_upsampling(coordinates: str, tmp_path: Path) -> None:
    net = Net(IMAGE)
    scales = net.tensor(np.array([1, 1, 3, 2], np.float32))
    y = net.add("Resize", "x", "", scales, mode="linear", coordinate_transformation_mode=coordinates)
    graph = check(net, net.add("Conv", y, net.weight(2, 3, 2, 2)), tmp_path)
    assert graph.ops[0].op.kind == "upsample"


@pytest.mark.parametrize("shape", [(1,), (3, 1, 1), (1, 3, 1, 1), (1, 1, 1)])
def test_prelu(shape: tuple[int, ...], tmp_path: Path) -> None:
    net = Net(IMAGE)
    graph = check(net, net.add("PRelu", "x", net.weight(*shape)), tmp_path)
    assert graph.params()["prelu1.weight"].size == max(shape)


def test_prelu_of_features_keeps_their_order(tmp_path: Path) -> None:
    net = Net((2, 3, 4, 5))
    y = net.add("PRelu", net.add("Flatten", "x"), net.weight(60))
    check(net, net.add("Gemm", y, net.weight(7, 60), transB=1), tmp_path)


def test_pads_are_taken_over_by_the_next_window(tmp_path: Path) -> None:
    def padded(net: Net, x: str, value: float = 0.0) -> str:
        pads, fill = net.tensor(np.array([0, 0, 0, 1, 0, 0, 1, 0])), net.tensor(np.array(value))
        return net.add("Pad", x, pads, fill, mode="constant")

    net = Net(IMAGE)
    y = padded(net, "x")
    y = net.add("Conv", y, net.weight(4, 3, 3, 3), pads=[1, 0, 0, 2], strides=[2, 2])
    y = net.add("MaxPool", padded(net, net.add("Relu", y)), kernel_shape=[2, 2])
    y = net.add("MaxPool", padded(net, y, -np.inf), kernel_shape=[2, 2])
    check(net, net.add("AveragePool", padded(net, y), kernel_shape=[2, 2], strides=[1, 2]), tmp_path)
    net = Net(IMAGE)
    path = net.save(net.add("MaxPool", padded(net, "x"), kernel_shape=[2, 2]), tmp_path)
    with pytest.raises(GraphError, match=r"MaxPool.*Pad before it fills with 0.0"):
        import_onnx(path)
    net = Net(IMAGE)
    with pytest.raises(GraphError, match="Relu.*comes from a Pad.*Conv, MaxPool"):
        import_onnx(net.save(net.add("Relu", padded(net, "x")), tmp_path))


def test_same_padding_looks_at_the_padded_extent(tmp_path: Path) -> None:
    net = Net(IMAGE)
    y = net.add("Pad", "x", net.tensor(np.array([0, 0, 1, 0, 0, 0, 1, 1])))
    check(net, net.add("Conv", y, net.weight(2, 3, 3, 3), auto_pad="SAME_LOWER", strides=[3, 2]), tmp_path)


def test_channels_last_files(tmp_path: Path) -> None:
    """As exported from TensorFlow: samples are channels last, transposed around the convolutions."""
    net = Net(("n", 9, 8, 3))
    y = net.add("Conv", net.add("Transpose", "x", perm=[0, 3, 1, 2]), net.weight(4, 3, 3, 3), auto_pad="SAME_UPPER")
    y = net.add("Relu", net.add("Transpose", y, perm=[0, 2, 3, 1]))
    y = net.add("MatMul", net.add("Reshape", y, net.tensor(np.array([-1, 9 * 8 * 4]))), net.weight(9 * 8 * 4, 5))
    path = net.save(y, tmp_path)
    x = net.rng.standard_normal((2, 9, 8, 3))
    reference = pytest.importorskip("onnx.reference")
    assert import_onnx(path)[0].shapes(1)["input"] == (1, 9, 8, 3)
    compare(ours(path, np.moveaxis(x, -1, 1)), reference.ReferenceEvaluator(str(path)).run(None, {"x": x})[0], 1e-10)


def test_file_of_float32_with_a_fixed_batch(tmp_path: Path) -> None:
    net = Net((1, 3, 9, 8), dtype=np.float32)
    y = net.add("Cast", net.add("Conv", "x", net.weight(4, 3, 3, 3)), to=FLOAT)
    y = net.add("Reshape", y, net.tensor(np.array([1, 4 * 7 * 6])))
    y = net.add("Gemm", y, net.weight(4 * 7 * 6, 5))
    check(net, y, tmp_path, batch=1, tolerance=1e-5)
    graph, weights = import_onnx(tmp_path / "net.onnx")
    assert {w.dtype for w in weights.values()} == {np.dtype(np.float32)}
    assert graph.shapes(8)[graph.output] == (8, 5)


def test_open_sizes_need_an_input_shape(tmp_path: Path) -> None:
    net = Net(("n", 3, "h", "w"))
    y = net.add("Flatten", net.add("Conv", "x", net.weight(2, 3, 3, 3)))
    y = net.add("Gemm", y, net.weight(2 * 16, 5))
    path = net.save(y, tmp_path)
    with pytest.raises(GraphError, match=r"\[\?, \?, 3\] \(channels last\).*give `input`"):
        import_onnx(path)
    with pytest.raises(GraphError, match=r"input: got the sample shape \[6, 6, 4\], but the file says \[\?, \?, 3\]"):
        import_onnx(path, (6, 6, 4))
    with pytest.raises(GraphError, match=r"Gemm.*read 32 features, its input has 18"):
        import_onnx(path, (5, 5, 3))
    check(net, y, tmp_path, input=(6, 6, 3))


def test_softmax_at_the_end_is_dropped_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = Net((2, 6))
    logits = net.add("Gemm", "x", net.weight(6, 5))
    path = net.save(net.add("Identity", net.add("Softmax", logits)), tmp_path)
    with caplog.at_level(logging.WARNING):
        graph, _ = import_onnx(path)
        import_onnx(path)
    assert [n.op.kind for n in graph.ops] == ["linear"]
    assert "Softmax" in caplog.text and caplog.text.count("cross_entropy") == 1


def test_softmax_inside(tmp_path: Path) -> None:
    net = Net(IMAGE)
    graph = check(net, net.add("Conv", net.add("Softmax", "x", axis=1), net.weight(4, 3, 1, 1)), tmp_path)
    assert [n.op.kind for n in graph.ops] == ["softmax", "conv"]
    net = Net((2, 6))
    check(net, net.add("Gemm", net.add("Softmax", "x"), net.weight(6, 5)), tmp_path)
    net = Net(IMAGE)
    with pytest.raises(GraphError, match="LogSoftmax.*not the last op.*use Softmax inside"):
        import_onnx(net.save(net.add("Relu", net.add("LogSoftmax", "x", axis=1)), tmp_path))


def test_softmax_before_opset_13_is_over_all_that_follows_its_axis(tmp_path: Path) -> None:
    net = Net(IMAGE, 12)
    with pytest.raises(GraphError, match=r"over the axes \[1, 2, 3\] together \(as softmax is before opset 13\)"):
        import_onnx(net.save(net.add("Softmax", "x"), tmp_path))
    for readers in (0, 1):
        net = Net(IMAGE, 12)
        y = net.add("Softmax", net.add("GlobalAveragePool", "x"), axis=1)
        graph, _ = import_onnx(net.save(net.add("Relu", y) if readers else y, tmp_path))
        assert [n.op.kind for n in graph.ops] == ["global_avg_pool", "softmax", "relu"][: 1 + 2 * readers]


def test_local_response_norm(tmp_path: Path) -> None:
    net = Net((3, 7, 4, 3), dtype=np.float32)
    graph = check(net, net.add("LRN", "x", size=5, alpha=0.5, beta=0.6, bias=2.0), tmp_path, tolerance=1e-5)
    assert graph.ops[0].op == LocalResponseNorm(size=5, alpha=0.5, beta=0.6, k=2.0)
    for size, message in ((4, "its size is 4, expected an odd number"), (0, "its size is 0")):
        net = Net(IMAGE)
        with pytest.raises(GraphError, match=message):
            import_onnx(net.save(net.add("LRN", "x", size=size), tmp_path))


def test_channel_shuffle(tmp_path: Path) -> None:
    def shuffle(net: Net, perm: list[int], back: list[int]) -> str:
        y = net.add("Reshape", "x", net.tensor(np.array([0, 3, 2, 4, 5])))
        return net.add("Reshape", net.add("Transpose", y, perm=perm), net.tensor(np.array(back)))

    net = Net((2, 6, 4, 5))
    y = net.add("Conv", shuffle(net, [0, 2, 1, 3, 4], [0, -1, 4, 5]), net.weight(4, 3, 1, 1), group=2)
    graph = check(net, y, tmp_path)
    assert [n.op.kind for n in graph.ops] == ["channel_shuffle", "conv"]
    for perm, back in (([0, 1, 2, 4, 3], [0, 6, 4, 5]), ([0, 2, 1, 3, 4], [0, 3, 4, 10])):
        net = Net((2, 6, 4, 5))
        with pytest.raises(GraphError, match=r"reshapes \(N, 6, 4, 5\) to \(0, 3, 2, 4, 5\)"):
            import_onnx(net.save(shuffle(net, perm, back), tmp_path))


def test_constants_after_a_norm_are_folded(tmp_path: Path) -> None:
    net = Net(IMAGE)
    y = net.norm("x", 3)
    y = net.add("Mul", y, net.weight(3, 1, 1))
    y = net.add("Add", net.weight(1, 3, 1, 1), y)
    y = net.add("Mul", net.add("Add", y, net.tensor(0.5)), net.tensor(np.array([2.0])))
    graph = check(net, net.add("Relu", y), tmp_path)
    assert [n.op.kind for n in graph.ops] == ["norm", "relu"]
    net = Net(IMAGE)  # behind a flatten, whose features are in another order
    y = net.add("Mul", net.norm(net.add("Flatten", "x"), 216), net.weight(216))
    check(net, net.add("Gemm", y, net.weight(216, 4)), tmp_path)


def test_an_unknown_op_gets_no_misleading_hint(tmp_path: Path) -> None:
    for kind, words in (("Max", "Instead, change the network"), ("Sigmoit", "Instead, did you mean 'Sigmoid'")):
        net = Net(IMAGE)
        with pytest.raises(GraphError, match=words):
            import_onnx(net.save(net.add(kind, "x", *(["x"] if kind == "Max" else [])), tmp_path))


def test_hostile_files(tmp_path: Path) -> None:
    """Dimensions that do not fit their data, constants that a few numbers blow up, data outside the folder."""
    net = Net(IMAGE)
    y = net.add("Conv", "x", net.weight(4, 3, 1, 1, name="w"))
    for dims in ([4, 3, 1, 2**40], [2**62, 2**62, 1, 1], [4, 3, 1, -1], [4, 3], []):
        model = net.model(y)
        del model.graph.initializer[0].dims[:]
        model.graph.initializer[0].dims.extend(dims)
        onnx.save(model, tmp_path / "net.onnx")
        with pytest.raises(GraphError, match="net.onnx: "):
            import_onnx(tmp_path / "net.onnx")
    net = Net((1, 3, 2**40, 2**62))
    with pytest.raises(GraphError, match="expected the shape of one sample .* less than 2³¹"):
        import_onnx(net.save(net.add("Relu", "x"), tmp_path))
    net = Net(IMAGE)
    big = net.add("ConstantOfShape", net.tensor(np.array([2**20, 2**20])))
    with pytest.raises(GraphError, match=r"ConstantOfShape.*would have shape \[1048576, 1048576\]"):
        import_onnx(net.save(net.add("Add", "x", big), tmp_path))
    net = Net(IMAGE)
    ones = [net.tensor(np.ones(shape, "f")) for shape in ((100_000, 1), (1, 100_000))]
    with pytest.raises(GraphError, match=r"Mul.*would have shape \[100000, 100000\]"):
        import_onnx(net.save(net.add("Add", "x", net.add("Mul", *ones)), tmp_path))
    (tmp_path / "secret").write_bytes(b"\0" * 96)
    (tmp_path / "here").mkdir()
    net = Net(IMAGE)
    model = net.model(net.add("Conv", "x", net.weight(4, 3, 1, 1)))
    for place in ("../secret", str(tmp_path / "secret")):
        tensor = model.graph.initializer[0]
        tensor.raw_data = b"\\0" * 96
        onnx.external_data_helper.set_external_data(tensor, place, length=96)
        tensor.ClearField("raw_data")
        (tmp_path / "here" / "net.onnx").write_bytes(model.SerializeToString())
        with pytest.raises(GraphError, match="net.onnx: "):
            import_onnx(tmp_path / "here" / "net.onnx")


def _light() -> list[Path]:
    return sorted((Path(onnx.__file__).parent / "backend" / "test" / "data" / "light").glob("*.onnx"))


def _with_random_weights(path: Path) -> Any:
    """A light network of the package, whose constant weights are drawn instead: equal channels would hide a wrong order."""
    model, rng = onnx.load(path), np.random.default_rng(1)
    folded = {o: n for n in model.graph.node if n.op_type == "ConstantOfShape" for o in n.output}
    shapes = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    for output, node in folded.items():
        shape = shapes[node.input[0]]
        wide = np.prod(shape[1:]) if len(shape) > 1 else 1
        values = rng.standard_normal(shape) * np.sqrt(2 / wide) if len(shape) > 1 else rng.uniform(0.5, 1.5, shape)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), output))
        model.graph.node.remove(node)
    if model.graph.node[-1].op_type == "Softmax":  # logits tell more, and the reference has its axis as of opset 13
        model.graph.output[0].name = model.graph.node.pop().input[0]
    return model


LARGE = ("light_vgg19", "light_zfnet512", "light_bvlc_alexnet")


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.stem in LARGE)) for p in _light()]
)
def test_light_networks_import_and_plan(path: Path) -> None:
    graph, weights = import_onnx(path)
    assert set(weights) == set(graph.params())
    graph = graph.with_loss(CrossEntropy() if graph.shapes(1)[graph.output][1:] == (1000,) else LOSSES["mse"]())
    plan = strategy_plan("data", graph, Grid.of(4), 8, {})
    assert price(lower(graph, plan, 8), find_machine("laptop")).seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize("path", _light(), ids=lambda p: p.stem)
def test_light_networks_give_the_values_of_the_reference(path: Path, tmp_path: Path) -> None:
    model = _with_random_weights(path)
    onnx.save(model, tmp_path / "net.onnx")
    x = np.random.default_rng(2).standard_normal((1, 3, 224, 224)).astype(np.float32)
    wanted = reference(model, x)
    got = ours(tmp_path / "net.onnx", x)
    np.testing.assert_allclose(got.ravel(), wanted.ravel(), rtol=2e-3, atol=2e-3 * np.abs(wanted).max())


def test_layers_with_the_same_constants_share_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = Net(IMAGE)
    w, b = net.weight(3, 3, 1, 1, name="shared.weight"), net.weight(3, name="shared.bias")
    y = net.add("Conv", net.add("Relu", net.add("Conv", "x", w, b)), w, b, strides=[2, 2])
    graph = check(net, net.add("ConvTranspose", y, w, b), tmp_path)
    assert [n.share for n in graph.ops] == [None, None, "shared", "shared"]
    assert set(graph.params()) == {"shared.weight", "shared.bias"} and not caplog.text


def test_layers_that_share_a_part_become_separate_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bias of its own; and constants that are equal by chance."""
    net = Net(IMAGE)
    w = net.weight(3, 3, 1, 1, name="shared.weight")
    y = net.add("Conv", net.add("Conv", "x", w, net.weight(3)), w, net.weight(3))
    graph = check(net, y, tmp_path)
    assert "shared and conv2 share 'shared.weight'" in caplog.text and not graph.shared
    net = Net(IMAGE)
    net.tensor(np.ones((3, 3, 1, 1)), "ones")
    assert not check(net, net.add("Conv", net.add("Conv", "x", "ones"), "ones"), tmp_path).shared


def test_matrices_are_shared_unless_a_flatten_permutes_one(tmp_path: Path) -> None:
    net = Net(("n", 6))
    w = net.weight(6, 6, name="fc.weight")
    assert check(net, net.add("MatMul", net.add("Relu", net.add("MatMul", "x", w)), w), tmp_path).shared
    net = Net(("n", 2, 2, 2))
    w = net.weight(8, 8, name="fc.weight")
    y = net.add("MatMul", net.add("MatMul", net.add("Flatten", "x"), w), w)
    assert not check(net, y, tmp_path).shared


def test_names_come_from_the_modules(tmp_path: Path) -> None:
    net = Net(IMAGE)
    y = net.add("Conv", "x", net.weight(3, 3, 1, 1, name="layer1.0.conv1.weight"), name="/layer1/layer1.0/conv1/Conv")
    y = net.add("Relu", y, name="/layer1/layer1.0/relu/Relu_1")
    y = net.add("Conv", y, net.weight(3, 3, 1, 1, name="onnx::Conv_12"), name="/layer1/layer1.0/conv2/Conv")
    y = net.add("Add", y, "x", name="/layer1/layer1.0/Add")
    y = net.add("Relu", net.add("Flatten", y, name="/Flatten"), name="node_relu_4")
    y = net.add("MatMul", y, net.weight(3 * 72, 2), name="/fc/MatMul")
    graph, _ = import_onnx(net.save(y, tmp_path))
    assert [n.name for n in graph.ops] == [
        "layer1.0.conv1",
        "layer1.0.relu_1",
        "layer1.0.conv2",
        "layer1.0.add",
        "flatten1",
        "relu2",
        "fc",
    ]
    assert graph.name == "net"


def test_weights_are_contiguous_and_of_our_order(tmp_path: Path) -> None:
    net = Net(IMAGE)
    y = net.norm(net.add("Conv", "x", net.weight(4, 3, 3, 2)), 4)
    y = net.add("ConvTranspose", y, net.weight(4, 5, 2, 2))
    graph, weights = import_onnx(net.save(net.add("Gemm", net.add("Flatten", y), net.weight(5 * 64, 2)), tmp_path))
    assert {n: w.shape for n, w in weights.items()} == {n: p.shape for n, p in graph.params().items()}
    assert all(w.flags.c_contiguous for w in weights.values())
    assert weights["norm1.running_var"].dtype == np.float64
    theirs = onnx.numpy_helper.to_array(net.tensors[0])
    np.testing.assert_array_equal(weights["conv1.weight"][1, 2, 0], theirs[1, :, 2, 0])


def _one(kind: str, *more: Any, shape: Any = IMAGE, **attributes: Any) -> tuple[Net, str]:
    net = Net(shape)
    return net, net.add(kind, "x", *(net.tensor(np.asarray(m)) for m in more), name="here", **attributes)


@pytest.mark.parametrize(
    "made, message",
    [
        (lambda: _one("Erf"), r"node 'here' \(Erf\).*supported are Add, .*use Gelu \(opset 20\).*Python function"),
        (lambda: _one("Clip"), r"\(Clip\).*Instead, use Relu"),
        (lambda: _one("Mul", np.full(1, 2.0)), r"\(Mul\).*constant of shape \(1,\).*scale the data"),
        (lambda: _one("Reshape", np.array([0, 3, 72])), r"\(Reshape\).*reshapes \(N, 3, 9, 8\) to \(0, 3, 72\)"),
        (lambda: _one("Reshape", np.array([1, -1])), r"\(Reshape\).*to \(1, -1\)"),
        (lambda: _one("Flatten", axis=2), r"\(Flatten\): its axis is 2, expected 1"),
        (lambda: _one("ReduceMean", axes=[1]), r"averages over the axes \[1\].*\(N, 3, 9, 8\)"),
        (lambda: _one("Pad", np.array([0, 0, 1, 1, 0, 0, 1, 1]), mode="reflect"), "'reflect', expected 'constant'"),
        (lambda: _one("Pad", np.array([0, 1, 0, 0, 0, 1, 0, 0])), "pads the samples or the channels"),
        (lambda: _one("Conv", np.ones((4, 2, 1, 1))), "reads 2 channels; its input has 3"),
        (lambda: _one("Conv", np.ones((4, 3, 1))), r"kernel \[1\], expected 2 sizes"),
        (lambda: _one("Conv", np.ones((4, 3, 1, 1)), odd=3), "attribute 'odd' is unknown"),
        (lambda: _one("Conv", np.ones((4, 3, 19, 1))), r"node 'here' \(Conv\).*kernel 19"),
        (lambda: _one("Conv", np.ones((4, 3, 1, 1), np.int8)), "weights are int8.*unquantized"),
        (lambda: _one("Gemm", np.ones((3, 4))), r"shape \(N, 3, 9, 8\), expected \(N, C\)"),
        (lambda: _one("Gemm", np.ones((3, 4)), shape=("n", 3), transA=1), "transA=1"),
        (lambda: _one("AveragePool", kernel_shape=[2, 2], dilations=[2, 2]), r"dilations are \[2, 2\]"),
        (
            lambda: _one("Resize", [], np.ones(4, "f") * [1, 1, 2, 2], mode="cubic"),
            "mode is 'cubic', expected 'nearest' or",
        ),
        (
            lambda: _one(
                "Resize", [], np.ones(4, "f") * [1, 1, 2, 2], mode="linear", coordinate_transformation_mode="asymmetric"
            ),
            "mode is 'asymmetric', expected 'half_pixel'",
        ),
        (lambda: _one("PRelu", np.ones((3, 9, 1), "f")), "slopes have shape .3, 9, 1., expected one number or one per"),
        (lambda: _one("Resize", [], np.array([1, 1, 1.5, 2], "f"), mode="nearest"), r"factors are \[1.0, 1.0, 1.5"),
        (lambda: _one("Softmax", axis=2), "axis 2 of a tensor of shape .N, 3, 9, 8., expected the channels alone"),
        (lambda: _one("Cast", to=7), "casts to INT64"),
    ],
)
def test_what_cannot_be_imported_is_said(made: Any, message: str, tmp_path: Path) -> None:
    net, output = made()
    with pytest.raises(GraphError, match=message) as caught:
        import_onnx(net.save(output, tmp_path))
    assert "net.onnx: node 'here'" in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"nowhere.onnx: No such file"):
        import_onnx(tmp_path / "nowhere.onnx")
    for content in (b"", b"this is no protobuf" * 9):
        (tmp_path / "bad.onnx").write_bytes(content)
        with pytest.raises(GraphError, match=r"bad.onnx: (not a readable|the file holds no)"):
            import_onnx(tmp_path / "bad.onnx")
    with pytest.raises(GraphError, match="opset 8, expected 9"):
        import_onnx(Net(IMAGE, 8).save("x", tmp_path))
    net = Net(IMAGE)
    model = net.model(net.add("Relu", "x"))
    model.graph.output.append(model.graph.output[0])
    onnx.save(model, tmp_path / "two.onnx")
    with pytest.raises(GraphError, match=r"inputs \[x\] and the outputs \[v0, v0\], expected one of each"):
        import_onnx(tmp_path / "two.onnx")


def test_only_the_nodes_of_the_output_matter(tmp_path: Path) -> None:
    net = Net(IMAGE)
    net.add("Erf", "x")
    check(net, net.add("Relu", net.add("MaxPool", "x", kernel_shape=[2, 2], outputs=2)), tmp_path)
    net.nodes[-1].input[0] = "v1_1"
    with pytest.raises(GraphError, match="output 'v1_1' is read"):
        import_onnx(net.save("v2", tmp_path))


def test_in_a_run_file(tmp_path: Path) -> None:
    net = Net(("n", 3, "h", "w"))
    path = net.save(net.add("Conv", "x", net.weight(2, 3, 3, 3, name="c.weight")), tmp_path)
    section = OnnxModel(onnx=str(path), input=(6, 5, 3))
    graph, weights = load_graph(section), load_weights(section)
    assert graph.shapes(2)[graph.output] == (2, 4, 3, 2)
    assert weights is not None and set(weights) == {"c.weight"}
    inline = InlineModel.model_validate({"input": [4], "layers": [{"op": "linear", "features": 2}]})
    assert load_weights(inline) is None
