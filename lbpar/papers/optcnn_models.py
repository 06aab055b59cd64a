"""The networks of OptCNN's study: AlexNet (the variant with a 7 x 7 x 256 map, 74.7 M weights), VGG-16, Inception-v3, ResNet-50."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lbpar.graph import graph
from lbpar.graph.loops import Shape
from lbpar.graph.op import Op
from lbpar.graph.ops.pooling import AvgPool, GlobalAvgPool, MaxPool
from lbpar.graph.ops.weighted import Conv
from lbpar.models.registry import build_model
from lbpar.papers import networks
from lbpar.papers.optcnn import Graph, Kind, Layer, Size

_KINDS: dict[str, Kind] = {
    "conv": "conv",
    "linear": "fc",
    "concat": "concat",
    "add": "add",
    **dict.fromkeys(("max_pool", "avg_pool", "global_avg_pool"), "pool"),
}

MODELS: dict[str, Callable[[], graph.Graph]] = {
    "alexnet": partial(networks.alexnet, (64, 192, 384, 256, 256), size=224, pad=5, ceil=True),
    "vgg16": networks.vgg16,
    "inception-v3": networks.inception_v3,
    "resnet50": partial(build_model, "resnet50"),
}


def optcnn_graph(name: str) -> Graph:
    """The graph ``name``."""
    return from_graph(networks.named("optcnn", MODELS, name))


def from_graph(network: graph.Graph) -> Graph:
    """OptCNN's layers of a network and the loss: activations and normalisations are folded into what they follow."""
    shapes = network.shapes(1)
    out = Graph()
    for node, inputs in networks.kept(network, ("relu", "norm", "dropout", "flatten")):
        weights = node.op.params(network.input_shapes(node.name, 1))["weight"].size if node.op.weighted else 0
        sizes = tuple(_size(shapes[i]) for i in inputs)
        layer = Layer(_KINDS[node.op.kind], sizes, _size(shapes[node.name]), weights, *_window(node.op, sizes[0]))
        out.add(node.name, layer, inputs)
    scores = out.layers[node.name].output
    out.add("softmax", Layer("softmax", (scores,), scores), [node.name])
    return out


def _size(shape: Shape) -> Size:
    h, w, c = shape[1:] if len(shape) == 4 else (1, 1, shape[1])
    return h, w, c


def _window(op: Op, image: Size) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """Kernel, stride and padding."""
    if isinstance(op, Conv | MaxPool | AvgPool):
        return op.kernel, op.stride[0], tuple(before for before, _ in op.pad)
    return (image[:2] if isinstance(op, GlobalAvgPool) else (1, 1)), 1, (0, 0)
