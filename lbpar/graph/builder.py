"""Build a network op by op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Any, Literal

from lbpar.config.layers import NormStats
from lbpar.errors import GraphError
from lbpar.graph.arguments import Ints, Pads, choice, each, known, names, number, pads, whole
from lbpar.graph.graph import Graph, Node, check_size
from lbpar.graph.loops import Shape
from lbpar.graph.op import Input, Op
from lbpar.graph.ops.convolution import Conv, ConvTranspose
from lbpar.graph.ops.linear import Linear
from lbpar.graph.ops.norm import Norm
from lbpar.graph.ops.pointwise import Add, Dropout, LeakyRelu, Multiply, Relu, Sigmoid, Tanh
from lbpar.graph.ops.pooling import AvgPool, GlobalAvgPool, MaxPool
from lbpar.graph.ops.shape import Concat, Flatten, Upsample

INITS = ("he", "glorot")
STATS = ("global", "sample", "local")


class GraphBuilder:
    """Adds ops one after another; each method returns the name of the new node.

    Parameters
    ----------
    input : sequence of int
        Shape of one sample: (H, W, C), (D, H, W, C) or (C,).
    name : str
        Name of the network.

    Notes
    -----
    Sizes (kernel, stride, ...) are an int for all spatial dimensions or one per dimension; a pad may be
    (before, after) per dimension. Nodes without a name are numbered by kind: ``conv1``, ``conv2``, ...
    Parameters are ``<node>.weight``, ``<node>.bias`` and, for norms, ``running_mean`` and ``running_var``.

    Examples
    --------
    >>> g = GraphBuilder(input=(8, 8, 1))
    >>> x = g.relu(g.conv(g.input, 4, 3, pad=1))
    >>> graph = g.build(g.linear(g.global_avg_pool(x), 10))
    >>> graph.parameter_count
    90
    """

    def __init__(self, input: Sequence[int], name: str = "network") -> None:
        if isinstance(input, (str, int)) or not 1 <= len(input) <= 4:
            raise GraphError(
                f"input: got the sample shape {input!r}, expected (C,), (W, C), (H, W, C) or (D, H, W, C), all positive."
            )
        shape = tuple(whole(e, "input") for e in input)
        self.name = name
        self.input = "input"
        self._nodes: list[Node] = [Node(self.input, Input(shape))]
        self._shapes: dict[str, Shape] = {self.input: check_size("input", (1, *shape))}
        self._counts: Counter[str] = Counter()

    def shape(self, x: str) -> Shape:
        """Shape of a node's output for one sample, with a leading 1 for the batch."""
        return self._shapes[known(x, self._shapes, "shape")]

    def add_op(self, op: Op, inputs: Sequence[str], name: str | None = None) -> str:
        """Append any op; returns its node's name."""
        self._counts[op.kind] += 1
        if name is None:
            while (name := f"{op.kind}{self._counts[op.kind]}") in self._shapes:
                self._counts[op.kind] += 1
        if not isinstance(name, str) or not name:
            raise GraphError(f"{op.kind}: got the name {name!r}, expected a text.")
        if name in self._shapes:
            raise GraphError(f"{name}: two nodes have this name; names must be unique.")
        inputs = [known(i, self._shapes, f"{name}: input") for i in inputs]
        xs = [self._shapes[i] for i in inputs]
        try:
            self._shapes[name] = check_size("output", op.infer(xs))
            for short, param in op.params(xs).items():
                check_size(short, param.shape)
        except GraphError as error:
            raise GraphError(f"{name}: {error}") from None
        self._nodes.append(Node(name, op, tuple(inputs)))
        return name

    def build(self, output: str) -> Graph:
        """The finished network whose output is the given node; nodes that it does not need are dropped."""
        needed: set[str] = set()
        todo = [known(output, self._shapes, "build: output")]
        by_name = {n.name: n for n in self._nodes}
        while todo:
            n = todo.pop()
            if n not in needed:
                needed.add(n)
                todo.extend(by_name[n].inputs)
        return Graph(tuple(n for n in self._nodes if n.name in needed or n.name == self.input), output, self.name)

    # Ops with windows.

    def conv(
        self,
        x: str,
        filters: int,
        kernel: Ints,
        stride: Ints = 1,
        pad: Pads = 0,
        dilation: Ints = 1,
        groups: int = 1,
        bias: bool = True,
        init: Literal["he", "glorot"] = "he",
        name: str | None = None,
    ) -> str:
        """Convolution."""
        at = name or "conv"
        k, s, p, d = self._window(x, at, kernel, stride, pad, dilation)
        f, g = whole(filters, f"{at}: filters"), whole(groups, f"{at}: groups")
        return self.add_op(Conv(f, k, s, p, d, g, bool(bias), choice(init, f"{at}: init", INITS)), [x], name)

    def conv_transpose(
        self,
        x: str,
        filters: int,
        kernel: Ints,
        stride: Ints = 1,
        pad: Pads = 0,
        dilation: Ints = 1,
        groups: int = 1,
        bias: bool = True,
        output_pad: Ints = 0,
        init: Literal["he", "glorot"] = "he",
        name: str | None = None,
    ) -> str:
        """Transposed convolution."""
        at = name or "conv_transpose"
        k, s, p, d = self._window(x, at, kernel, stride, pad, dilation)
        f, g = whole(filters, f"{at}: filters"), whole(groups, f"{at}: groups")
        q = each(output_pad, len(k), f"{at}: output_pad", 0)
        if any(a >= max(b, c) for a, b, c in zip(q, s, d, strict=True)):
            raise GraphError(f"{at}: output_pad: got {list(q)}, expected less than the stride {s} or the dilation {d}.")
        init = choice(init, f"{at}: init", INITS)
        return self.add_op(ConvTranspose(f, k, s, p, d, g, bool(bias), init, q), [x], name)

    def max_pool(
        self,
        x: str,
        kernel: Ints,
        stride: Ints | None = None,
        pad: Pads = 0,
        dilation: Ints = 1,
        ceil_mode: bool = False,
        name: str | None = None,
    ) -> str:
        """Max pooling; the stride defaults to the kernel."""
        k, s, p, d = self._window(x, name or "max_pool", kernel, kernel if stride is None else stride, pad, dilation)
        return self.add_op(MaxPool(k, s, p, d, bool(ceil_mode)), [x], name)

    def avg_pool(
        self,
        x: str,
        kernel: Ints,
        stride: Ints | None = None,
        pad: Pads = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        name: str | None = None,
    ) -> str:
        """Average pooling; the stride defaults to the kernel."""
        k, s, p, d = self._window(x, name or "avg_pool", kernel, kernel if stride is None else stride, pad, 1)
        return self.add_op(AvgPool(k, s, p, d, bool(ceil_mode), bool(count_include_pad)), [x], name)

    def global_avg_pool(self, x: str, name: str | None = None) -> str:
        """Mean over all spatial positions."""
        return self.add_op(GlobalAvgPool(), [x], name)

    def upsample(self, x: str, factor: Ints = 2, name: str | None = None) -> str:
        """Nearest-neighbour upsampling."""
        at = name or "upsample"
        return self.add_op(Upsample(each(factor, self._rank(x, at), f"{at}: factor")), [x], name)

    # Ops without.

    def norm(
        self,
        x: str,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        stats: NormStats = "global",
        name: str | None = None,
    ) -> str:
        """Batch normalisation."""
        at = name or "norm"
        eps = number(eps, f"{at}: eps", "a number above 0", 0 < eps < inf)
        momentum = number(momentum, f"{at}: momentum", "a number from 0 to 1", 0 <= momentum <= 1)
        return self.add_op(Norm(eps, momentum, bool(affine), choice(stats, f"{at}: stats", STATS)), [x], name)

    def relu(self, x: str, name: str | None = None) -> str:
        """max(x, 0)."""
        return self.add_op(Relu(), [x], name)

    def leaky_relu(self, x: str, slope: float = 0.01, name: str | None = None) -> str:
        """x where positive, slope * x elsewhere."""
        slope = number(slope, f"{name or 'leaky_relu'}: slope", "a number above 0", 0 < slope < inf)
        return self.add_op(LeakyRelu(slope), [x], name)

    def sigmoid(self, x: str, name: str | None = None) -> str:
        """Logistic function."""
        return self.add_op(Sigmoid(), [x], name)

    def tanh(self, x: str, scale: float = 1.0, name: str | None = None) -> str:
        """scale * tanh(x)."""
        scale = number(scale, f"{name or 'tanh'}: scale", "a number above 0", 0 < scale < inf)
        return self.add_op(Tanh(scale), [x], name)

    def add(self, xs: Sequence[str], name: str | None = None) -> str:
        """Sum of tensors of one shape."""
        return self.add_op(Add(), names(xs, name or "add"), name)

    def multiply(self, xs: Sequence[str], name: str | None = None) -> str:
        """Product of tensors of one shape."""
        return self.add_op(Multiply(), names(xs, name or "multiply"), name)

    def concat(self, xs: Sequence[str], name: str | None = None) -> str:
        """Concatenation along the channels."""
        return self.add_op(Concat(), names(xs, name or "concat"), name)

    def flatten(self, x: str, name: str | None = None) -> str:
        """All dimensions but the samples in one, in channels-last memory order."""
        return self.add_op(Flatten(), [x], name)

    def linear(
        self,
        x: str,
        features: int,
        bias: bool = True,
        init: Literal["he", "glorot"] = "he",
        name: str | None = None,
    ) -> str:
        """Fully connected layer."""
        at = name or "linear"
        features, init = whole(features, f"{at}: features"), choice(init, f"{at}: init", INITS)
        return self.add_op(Linear(features, bool(bias), init), [x], name)

    def dropout(self, x: str, rate: float = 0.5, name: str | None = None) -> str:
        """Dropout by global element index."""
        rate = number(rate, f"{name or 'dropout'}: rate", "a number from 0 to below 1", 0 <= rate < 1)
        return self.add_op(Dropout(rate), [x], name)

    def _rank(self, x: str, at: str) -> int:
        """Number of spatial dimensions of a node."""
        rank = len(self._shapes[known(x, self._shapes, f"{at}: input")]) - 2
        if rank < 1:
            raise GraphError(f"{at}: its input {x!r} has shape {self._shapes[x]}, expected spatial dimensions.")
        return rank

    def _window(self, x: str, at: str, kernel: Ints, stride: Ints, pad: Pads, dilation: Ints) -> tuple[Any, ...]:
        rank = self._rank(x, at)
        sizes = {"kernel": kernel, "stride": stride, "dilation": dilation}
        k, s, d = (each(v, rank, f"{at}: {what}") for what, v in sizes.items())
        return k, s, pads(pad, rank, f"{at}: pad"), d
