"""The networks of OptCNN's study: AlexNet (the variant with a 7 x 7 x 256 map, 74.7 M weights), VGG-16, Inception-v3, ResNet-50."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lbpar.errors import ConfigError
from lbpar.papers.optcnn import Graph, Kind, Layer

Pair = tuple[int, int]


class Builder:
    """Adds layers to a :class:`Graph`; a layer is known by its name."""

    def __init__(self, size: int) -> None:
        self.graph = Graph()
        self.size = size

    def shape(self, name: str) -> tuple[int, int, int]:
        """Output shape of a layer; "" is the image."""
        return self.graph.layers[name].output if name else (self.size, self.size, 3)

    def add(self, name: str, layer: Layer, inputs: Sequence[str]) -> str:
        """Add ``layer``; without a name it is called by its kind and number."""
        name = name or f"{layer.kind}{len(self.graph.layers)}"
        self.graph.layers[name] = layer
        self.graph.edges += [(x, name, i) for i, x in enumerate(inputs) if x]
        return name

    def conv(
        self, x: str, filters: int, kernel: int | Pair, stride: int = 1, pad: int | Pair = 0, name: str = ""
    ) -> str:
        """A convolution with its activation."""
        return self._window("conv", x, filters, kernel, stride, pad, name)

    def pool(self, x: str, kernel: int, stride: int, pad: int = 0, ceil: bool = False, name: str = "") -> str:
        """A pooling; ``ceil`` rounds the output size up."""
        extra = stride - 1 if ceil else 0
        return self._window("pool", x, self.shape(x)[2], kernel, stride, pad, name, extra)

    def _window(
        self,
        kind: Kind,
        x: str,
        filters: int,
        kernel: int | Pair,
        stride: int,
        pad: int | Pair,
        name: str,
        extra: int = 0,
    ) -> str:
        k = (kernel, kernel) if isinstance(kernel, int) else kernel
        p = (pad, pad) if isinstance(pad, int) else pad
        shape = self.shape(x)
        h, w = ((s + 2 * q - r + extra) // stride + 1 for s, q, r in zip(shape[:2], p, k, strict=True))
        weights = k[0] * k[1] * shape[2] * filters if kind == "conv" else 0
        return self.add(name, Layer(kind, (shape,), (h, w, filters), weights, k, stride, p), [x])

    def fc(self, x: str, features: int, name: str = "") -> str:
        """A fully connected layer on everything before it."""
        h, w, c = self.shape(x)
        return self.add(name, Layer("fc", ((h, w, c),), (1, 1, features), h * w * c * features), [x])

    def softmax(self, x: str) -> str:
        """The loss."""
        return self.add("softmax", Layer("softmax", (self.shape(x),), self.shape(x)), [x])

    def concat(self, parts: Sequence[str]) -> str:
        """Channels side by side."""
        shapes = tuple(self.shape(x) for x in parts)
        h, w, _ = shapes[0]
        return self.add("", Layer("concat", shapes, (h, w, sum(s[2] for s in shapes))), parts)

    def total(self, x: str, y: str) -> str:
        """The sum of two layers."""
        return self.add("", Layer("add", (self.shape(x), self.shape(y)), self.shape(x)), [x, y])

    def chain(self, x: str, *layers: tuple) -> str:
        """Convolutions, each given as (filters, kernel[, stride[, pad]])."""
        for layer in layers:
            x = self.conv(x, *layer)
        return x


def alexnet() -> Graph:
    """AlexNet with one tower and rounded-up poolings, 224 -> 56 -> 28 -> 14 -> 7: 11 layers and the loss."""
    g = Builder(224)
    x = g.conv("", 64, 11, 4, 5, name="conv1")
    x = g.pool(x, 3, 2, ceil=True, name="pool1")
    x = g.conv(x, 192, 5, 1, 2, name="conv2")
    x = g.pool(x, 3, 2, ceil=True, name="pool2")
    x = g.conv(x, 384, 3, 1, 1, name="conv3")
    x = g.conv(x, 256, 3, 1, 1, name="conv4")
    x = g.conv(x, 256, 3, 1, 1, name="conv5")
    x = g.pool(x, 3, 2, ceil=True, name="pool5")
    x = g.fc(g.fc(x, 4096, "fc6"), 4096, "fc7")
    g.softmax(g.fc(x, 1000, "fc8"))
    return g.graph


def vgg16() -> Graph:
    """VGG-16: 21 layers and the loss; convolutions are called conv<block>_<number>."""
    g = Builder(224)
    x = ""
    for block, (repeats, filters) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), 1):
        for i in range(1, repeats + 1):
            x = g.conv(x, filters, 3, 1, 1, f"conv{block}_{i}")
        x = g.pool(x, 2, 2, name=f"pool{block}")
    x = g.fc(g.fc(x, 4096, "fc6"), 4096, "fc7")
    g.softmax(g.fc(x, 1000, "fc8"))
    return g.graph


def resnet50() -> Graph:
    """ResNet-50, normalisation folded into the convolutions."""
    g = Builder(224)
    x = g.pool(g.conv("", 64, 7, 2, 3), 3, 2, 1)
    for planes, repeats, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(repeats):
            stride = first if i == 0 else 1
            y = g.chain(x, (planes, 1), (planes, 3, stride, 1), (4 * planes, 1))
            x = g.total(y, g.conv(x, 4 * planes, 1, stride) if i == 0 else x)
    g.softmax(g.fc(g.pool(x, 7, 1), 1000))
    return g.graph


def inception_v3() -> Graph:
    """Inception-v3 without its auxiliary head, normalisation folded into the convolutions."""
    g = Builder(299)
    x = g.chain("", (32, 3, 2), (32, 3), (64, 3, 1, 1))
    x = g.pool(g.chain(g.pool(x, 3, 2), (80, 1), (192, 3)), 3, 2)
    row, column = ((1, 7), 1, (0, 3)), ((7, 1), 1, (3, 0))
    for pooled in (32, 64, 64):
        parts = [g.chain(x, (64, 1)), g.chain(x, (48, 1), (64, 5, 1, 2))]
        parts += [g.chain(x, (64, 1), (96, 3, 1, 1), (96, 3, 1, 1)), g.chain(g.pool(x, 3, 1, 1), (pooled, 1))]
        x = g.concat(parts)
    x = g.concat([g.chain(x, (384, 3, 2)), g.chain(x, (64, 1), (96, 3, 1, 1), (96, 3, 2)), g.pool(x, 3, 2)])
    for width in (128, 160, 160, 192):
        parts = [g.chain(x, (192, 1)), g.chain(x, (width, 1), (width, *row), (192, *column))]
        parts.append(g.chain(x, (width, 1), (width, *column), (width, *row), (width, *column), (192, *row)))
        x = g.concat([*parts, g.chain(g.pool(x, 3, 1, 1), (192, 1))])
    wide = g.chain(x, (192, 1), (192, *row), (192, *column), (192, 3, 2))
    x = g.concat([g.chain(x, (192, 1), (320, 3, 2)), wide, g.pool(x, 3, 2)])
    for _ in range(2):
        parts = [g.chain(x, (320, 1))]
        for stem in (g.chain(x, (384, 1)), g.chain(x, (448, 1), (384, 3, 1, 1))):
            parts.append(g.concat([g.conv(stem, 384, (1, 3), 1, (0, 1)), g.conv(stem, 384, (3, 1), 1, (1, 0))]))
        x = g.concat([*parts, g.chain(g.pool(x, 3, 1, 1), (192, 1))])
    g.softmax(g.fc(g.pool(x, 8, 1), 1000))
    return g.graph


MODELS: dict[str, Callable[[], Graph]] = {
    "alexnet": alexnet,
    "vgg16": vgg16,
    "inception-v3": inception_v3,
    "resnet50": resnet50,
}


def optcnn_graph(name: str) -> Graph:
    """The graph ``name``."""
    if name not in MODELS:
        raise ConfigError(f"optcnn: got model {name!r}; expected one of {', '.join(sorted(MODELS))}")
    return MODELS[name]()
