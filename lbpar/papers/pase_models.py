"""The networks of PaSE's public prototype, built shape by shape as it builds them, with its departures from the originals.

AlexNet has 1024 outputs and no groups; Inception-v3 and ResNet-101 count no point-wise operation after a normalisation;
the residual sum carries one. ``pase-alexnet``, ``pase-inception-v3`` and ``pase-resnet101`` are their names here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lbpar.errors import ConfigError
from lbpar.papers.pase import Graph, Vertex

Pair = tuple[int, int]


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else value


@dataclass(frozen=True)
class Tensor:
    """A tensor of the graph: who makes it (None: the input) and its shape, (b, c, h, w) or (b, c)."""

    maker: str | None
    shape: tuple[int, ...]


class Builder:
    """Adds vertices to a :class:`Graph`, naming those without a name by kind and number."""

    def __init__(self) -> None:
        self.graph = Graph()

    def add(self, name: str, vertex: Vertex, inputs: Sequence[Tensor]) -> Tensor:
        """Add ``vertex`` with edges from the makers of ``inputs``."""
        name = name or f"{vertex.kind}{len(self.graph.vertices)}"
        self.graph.vertices[name] = vertex
        self.graph.edges += [(t.maker, name, i) for i, t in enumerate(inputs) if t.maker is not None]
        return Tensor(name, vertex.output)

    def conv(
        self,
        x: Tensor,
        filters: int,
        kernel: int | Pair,
        stride: int = 1,
        pad: int | Pair = 0,
        relu: bool = False,
        name: str = "",
    ) -> Tensor:
        """A convolution; its loops are over the output's height and width, which stay whole."""
        b, c, h, w = x.shape
        (r, s), (ph, pw) = _pair(kernel), _pair(pad)
        ho, wo = (h + 2 * ph - r) // stride + 1, (w + 2 * pw - s) // stride + 1
        extents = (b, c, ho, wo, r, s, filters)
        out = (b, filters, ho, wo)
        return self.add(
            name, Vertex("conv", "bchwrsn", extents, (x.shape,), "bchw", out, "bnhw", "hw", pointwise=int(relu)), [x]
        )

    def pool(self, x: Tensor, kernel: int, stride: int, pad: int = 0, name: str = "") -> Tensor:
        """A pooling; it may be split in space."""
        b, c, h, w = x.shape
        out = (b, c, (h + 2 * pad - kernel) // stride + 1, (w + 2 * pad - kernel) // stride + 1)
        return self.add(
            name, Vertex("pool", "bchw", out, (x.shape,), "bchw", out, "bchw", window=(kernel, kernel)), [x]
        )

    def norm(self, x: Tensor) -> Tensor:
        """A batch normalisation."""
        return self.add("", Vertex("norm", "bchw", x.shape, (x.shape,), "bchw", x.shape, "bchw"), [x])

    def total(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum of two tensors and one point-wise operation."""
        return self.add(
            "", Vertex("add", "bchw", x.shape, (x.shape, y.shape), "bchw", x.shape, "bchw", pointwise=1), [x, y]
        )

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenation of channels, which stay whole."""
        b, _, h, w = parts[0].shape
        out = (b, sum(t.shape[1] for t in parts), h, w)
        shapes = tuple(t.shape for t in parts)
        return self.add("", Vertex("concat", "bchw", (b, 1, h, w), shapes, "bchw", out, "bchw", "c"), parts)

    def mean(self, x: Tensor) -> Tensor:
        """Mean over height and width."""
        return self.add("", Vertex("mean", "bchw", x.shape, (x.shape,), "bchw", x.shape[:2], "bc"), [x])

    def flatten(self, x: Tensor) -> Tensor:
        """To a flat tensor and back to (b, features): two vertices."""
        size = 1
        for n in x.shape:
            size *= n
        flat = self.add("ravel", Vertex("ravel", "bchw", x.shape, (x.shape,), "bchw", (size,), "*"), [x])
        out = (x.shape[0], size // x.shape[0])
        return self.add("unravel", Vertex("unravel", "bc", out, ((size,),), "*", out, "bc"), [flat])

    def linear(self, x: Tensor, features: int, relu: bool = False, name: str = "") -> Tensor:
        """A fully connected layer."""
        b, c = x.shape
        return self.add(
            name,
            Vertex("linear", "bnc", (b, features, c), (x.shape,), "bc", (b, features), "bn", pointwise=int(relu)),
            [x],
        )

    def softmax(self, x: Tensor) -> Tensor:
        """Softmax and cross-entropy."""
        return self.add("softmax", Vertex("softmax", "bn", x.shape, (x.shape,), "bn", x.shape, "bn"), [x])

    def conv_norm(self, x: Tensor, filters: int, kernel: int | Pair, stride: int = 1, pad: int | Pair = 0) -> Tensor:
        """A convolution and its normalisation."""
        return self.norm(self.conv(x, filters, kernel, stride, pad))

    def chain(self, x: Tensor, *layers: tuple) -> Tensor:
        """Convolutions with normalisation, each given as (filters, kernel[, stride[, pad]])."""
        for layer in layers:
            x = self.conv_norm(x, *layer)
        return x


def pase_alexnet(batch: int) -> Graph:
    """AlexNet: 14 vertices in a chain."""
    g = Builder()
    x = g.conv(Tensor(None, (batch, 3, 227, 227)), 96, 11, 4, relu=True, name="conv1")
    x = g.pool(x, 3, 2, name="pool1")
    x = g.conv(x, 256, 5, pad=2, relu=True, name="conv2")
    x = g.pool(x, 3, 2, name="pool2")
    x = g.conv(x, 384, 3, pad=1, relu=True, name="conv3")
    x = g.conv(x, 384, 3, pad=1, relu=True, name="conv4")
    x = g.conv(x, 256, 3, pad=1, relu=True, name="conv5")
    x = g.flatten(g.pool(x, 3, 2, name="pool5"))
    x = g.linear(x, 4096, relu=True, name="fc6")
    x = g.linear(x, 4096, relu=True, name="fc7")
    g.softmax(g.linear(x, 1024, name="fc8"))
    return g.graph


def pase_resnet101(batch: int, size: int = 227) -> Graph:
    """ResNet-101; the prototype's images are 227 x 227."""
    g = Builder()
    x = g.conv_norm(Tensor(None, (batch, 3, size, size)), 64, 7, 2, 3)
    x = g.pool(x, 3, 2, 1)
    for planes, blocks, first_stride in ((64, 3, 1), (128, 4, 2), (256, 23, 2), (512, 3, 2)):
        for i in range(blocks):
            stride = first_stride if i == 0 else 1
            y = g.chain(x, (planes, 1), (planes, 3, stride, 1), (4 * planes, 1))
            x = g.total(y, g.conv_norm(x, 4 * planes, 1, stride) if i == 0 else x)
    g.softmax(g.linear(g.mean(x), 1000))
    return g.graph


def pase_inception_v3(batch: int) -> Graph:
    """Inception-v3 without its auxiliary head: 218 vertices."""
    g = Builder()
    x = g.chain(Tensor(None, (batch, 3, 299, 299)), (32, 3, 2), (32, 3), (64, 3, 1, 1))
    x = g.chain(g.pool(x, 3, 2), (80, 1), (192, 3))
    x = g.pool(x, 3, 2)
    for pooled in (32, 64, 64):
        x = _inception_a(g, x, pooled)
    x = g.concat([g.chain(x, (384, 3, 2)), g.chain(x, (64, 1), (96, 3, 1, 1), (96, 3, 2)), g.pool(x, 3, 2)])
    for width in (128, 160, 160, 192):
        x = _inception_c(g, x, width)
    wide = g.chain(x, (192, 1), (192, (1, 7), 1, (0, 3)), (192, (7, 1), 1, (3, 0)), (192, 3, 2))
    x = g.concat([g.chain(x, (192, 1), (320, 3, 2)), wide, g.pool(x, 3, 2)])
    for _ in range(2):
        x = _inception_e(g, x)
    g.softmax(g.linear(g.mean(x), 1000))
    return g.graph


def _inception_a(g: Builder, x: Tensor, pooled: int) -> Tensor:
    single = g.chain(x, (64, 1))
    five = g.chain(x, (48, 1), (64, 5, 1, 2))
    three = g.chain(x, (64, 1), (96, 3, 1, 1), (96, 3, 1, 1))
    return g.concat([single, five, three, g.chain(g.pool(x, 3, 1, 1), (pooled, 1))])


def _inception_c(g: Builder, x: Tensor, width: int) -> Tensor:
    row, column = ((1, 7), 1, (0, 3)), ((7, 1), 1, (3, 0))
    single = g.chain(x, (192, 1))
    once = g.chain(x, (width, 1), (width, *row), (192, *column))
    twice = g.chain(x, (width, 1), (width, *column), (width, *row), (width, *column), (192, *row))
    return g.concat([single, once, twice, g.chain(g.pool(x, 3, 1, 1), (192, 1))])


def _inception_e(g: Builder, x: Tensor) -> Tensor:
    def fork(y: Tensor) -> Tensor:
        return g.concat([g.chain(y, (384, (1, 3), 1, (0, 1))), g.chain(y, (384, (3, 1), 1, (1, 0)))])

    single = g.chain(x, (320, 1))
    three = fork(g.chain(x, (384, 1)))
    double = fork(g.chain(x, (448, 1), (384, 3, 1, 1)))
    return g.concat([single, three, double, g.chain(g.pool(x, 3, 1, 1), (192, 1))])


MODELS: dict[str, Callable[[int], Graph]] = {
    "pase-alexnet": pase_alexnet,
    "pase-inception-v3": pase_inception_v3,
    "pase-resnet101": pase_resnet101,
}


def pase_graph(name: str, batch: int) -> Graph:
    """The graph ``name`` for a mini-batch of ``batch`` samples."""
    if name not in MODELS:
        raise ConfigError(f"pase: got model {name!r}; expected one of {', '.join(sorted(MODELS))}")
    if batch < 1:
        raise ConfigError(f"pase: got batch {batch}; expected at least 1")
    return MODELS[name](batch)
