"""Build a network op by op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from lbpar.errors import GraphError
from lbpar.graph.graph import Graph, Node
from lbpar.graph.loops import Shape
from lbpar.graph.op import Input, Op
from lbpar.graph.ops.convolution import Conv, ConvTranspose
from lbpar.graph.ops.linear import Linear
from lbpar.graph.ops.norm import Norm
from lbpar.graph.ops.pointwise import Add, Dropout, LeakyRelu, Multiply, Relu, Sigmoid
from lbpar.graph.ops.pooling import AvgPool, GlobalAvgPool, MaxPool
from lbpar.graph.ops.shape import Concat, Flatten, Upsample

Ints = int | Sequence[int]
Pads = int | Sequence[int | Sequence[int]]


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
        shape = tuple(int(e) for e in input)
        if not 1 <= len(shape) <= 4 or min(shape) < 1:
            raise GraphError(
                f"input: got the sample shape {tuple(input)}, expected (C,), (W, C), (H, W, C) or (D, H, W, C), all positive."
            )
        self.name = name
        self.input = "input"
        self._nodes: list[Node] = [Node(self.input, Input(shape))]
        self._shapes: dict[str, Shape] = {self.input: (1, *shape)}
        self._counts: Counter[str] = Counter()

    def shape(self, x: str) -> Shape:
        """Shape of a node's output for one sample, with a leading 1 for the batch."""
        return self._shapes[x]

    def add_op(self, op: Op, inputs: Sequence[str], name: str | None = None) -> str:
        """Append any op; returns its node's name."""
        self._counts[op.kind] += 1
        name = name or f"{op.kind}{self._counts[op.kind]}"
        if name in self._shapes:
            raise GraphError(f"{name}: two nodes have this name; names must be unique.")
        for i in inputs:
            if i not in self._shapes:
                raise GraphError(f"{name}: reads {i!r}, which is not an earlier node.")
        try:
            self._shapes[name] = op.infer([self._shapes[i] for i in inputs])
        except GraphError as error:
            raise GraphError(f"{name}: {error}") from None
        self._nodes.append(Node(name, op, tuple(inputs)))
        return name

    def build(self, output: str) -> Graph:
        """The finished network whose output is the given node; nodes that it does not need are dropped."""
        needed, todo = set(), [output]
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
        k, s, p, d = self._window(x, "conv", kernel, stride, pad, dilation)
        return self.add_op(Conv(filters, k, s, p, d, groups, bias, init), [x], name)

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
        k, s, p, d = self._window(x, "conv_transpose", kernel, stride, pad, dilation)
        q = _each(output_pad, len(k), "output_pad")
        return self.add_op(ConvTranspose(filters, k, s, p, d, groups, bias, init, q), [x], name)

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
        k, s, p, d = self._window(x, "max_pool", kernel, kernel if stride is None else stride, pad, dilation)
        return self.add_op(MaxPool(k, s, p, d, ceil_mode), [x], name)

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
        k, s, p, d = self._window(x, "avg_pool", kernel, kernel if stride is None else stride, pad, 1)
        return self.add_op(AvgPool(k, s, p, d, ceil_mode, count_include_pad), [x], name)

    def global_avg_pool(self, x: str, name: str | None = None) -> str:
        """Mean over all spatial positions."""
        return self.add_op(GlobalAvgPool(), [x], name)

    def upsample(self, x: str, factor: Ints = 2, name: str | None = None) -> str:
        """Nearest-neighbour upsampling."""
        return self.add_op(Upsample(_each(factor, self._rank(x), "factor")), [x], name)

    # Ops without.

    def norm(
        self,
        x: str,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        stats: Literal["global", "sample", "local"] = "global",
        name: str | None = None,
    ) -> str:
        """Batch normalisation."""
        return self.add_op(Norm(eps, momentum, affine, stats), [x], name)

    def relu(self, x: str, name: str | None = None) -> str:
        """max(x, 0)."""
        return self.add_op(Relu(), [x], name)

    def leaky_relu(self, x: str, slope: float = 0.01, name: str | None = None) -> str:
        """x where positive, slope * x elsewhere."""
        return self.add_op(LeakyRelu(slope), [x], name)

    def sigmoid(self, x: str, name: str | None = None) -> str:
        """Logistic function."""
        return self.add_op(Sigmoid(), [x], name)

    def add(self, xs: Sequence[str], name: str | None = None) -> str:
        """Sum of tensors of one shape."""
        return self.add_op(Add(), xs, name)

    def multiply(self, xs: Sequence[str], name: str | None = None) -> str:
        """Product of tensors of one shape."""
        return self.add_op(Multiply(), xs, name)

    def concat(self, xs: Sequence[str], name: str | None = None) -> str:
        """Concatenation along the channels."""
        return self.add_op(Concat(), xs, name)

    def flatten(self, x: str, name: str | None = None) -> str:
        """All dimensions but the samples in one, in channels-last memory order."""
        return self.add_op(Flatten(), [x], name)

    def linear(self, x: str, features: int, bias: bool = True, name: str | None = None) -> str:
        """Fully connected layer."""
        return self.add_op(Linear(features, bias), [x], name)

    def dropout(self, x: str, rate: float = 0.5, name: str | None = None) -> str:
        """Dropout by global element index."""
        return self.add_op(Dropout(rate), [x], name)

    def _rank(self, x: str) -> int:
        return len(self._shapes[x]) - 2 if x in self._shapes else 2

    def _window(self, x: str, kind: str, kernel: Ints, stride: Ints, pad: Pads, dilation: Ints) -> tuple[Any, ...]:
        rank = self._rank(x)
        if rank < 1:
            raise GraphError(f"{kind}: its input {x!r} has shape {self._shapes[x]}, expected spatial dimensions.")
        k, s, d = _each(kernel, rank, "kernel"), _each(stride, rank, "stride"), _each(dilation, rank, "dilation")
        if min(*k, *s, *d) < 1:
            raise GraphError(f"{kind}: kernel {k}, stride {s} and dilation {d} must be positive.")
        return k, s, _pads(pad, rank), d


def _each(value: Ints, rank: int, what: str) -> tuple[int, ...]:
    out = (value,) * rank if isinstance(value, int) else tuple(int(v) for v in value)
    if len(out) != rank:
        raise GraphError(f"{what}: got {list(out)}, expected one int or {rank} of them.")
    return out


def _pads(pad: Pads, rank: int) -> tuple[tuple[int, int], ...]:
    each = (pad,) * rank if isinstance(pad, int) else tuple(pad)
    if len(each) != rank:
        raise GraphError(f"pad: got {list(each)}, expected one int or {rank} ints or [before, after] pairs.")
    out = []
    for p in each:
        pair = (p, p) if isinstance(p, int) else tuple(p)
        if len(pair) != 2 or min(pair) < 0:
            raise GraphError(f"pad: got {p}, expected an int or [before, after], not negative.")
        out.append((int(pair[0]), int(pair[1])))
    return tuple(out)
