"""Build a network op by op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, TypeVar

from lbpar.config.layers import LAYERS, Layer
from lbpar.config.report import check
from lbpar.config.section import check_shape
from lbpar.errors import ConfigError, GraphError
from lbpar.graph.arguments import known, names, plain
from lbpar.graph.graph import Graph, Node, check_shared, check_size
from lbpar.graph.loops import Param, Shape
from lbpar.graph.op import Input, Op
from lbpar.graph.ops.channels import ChannelShuffle, LocalResponseNorm, Softmax
from lbpar.graph.ops.norm import Norm
from lbpar.graph.ops.pointwise import (
    Add,
    Dropout,
    Elu,
    Gelu,
    Hardsigmoid,
    Hardswish,
    LeakyRelu,
    Multiply,
    PRelu,
    Relu,
    Sigmoid,
    Silu,
    Softplus,
    Tanh,
)
from lbpar.graph.ops.pooling import AvgPool, GlobalAvgPool, MaxPool
from lbpar.graph.ops.sample_norm import GroupNorm, InstanceNorm, LayerNorm
from lbpar.graph.ops.shape import Concat, Flatten, Upsample
from lbpar.graph.ops.shift import Crop, Fit, Pad
from lbpar.graph.ops.weighted import Conv, ConvTranspose, Linear
from lbpar.text import nearest, shorten

O = TypeVar("O", bound=type[Op])

OPS: dict[str, type[Op]] = {}


class GraphBuilder:
    """Adds ops one after another; each method returns the name of the new node.

    Parameters
    ----------
    input : sequence of int, or mapping of str to these
        Shape of one sample: (H, W, C), (D, H, W, C) or (C,); of several inputs by their names, the main one first.
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

    def __init__(self, input: Sequence[int] | Mapping[str, Sequence[int]], name: str = "network") -> None:
        self.name = name
        self._nodes: list[Node] = []
        self._shapes: dict[str, Shape] = {}
        for one, given in input.items() if isinstance(input, Mapping) else [("input", input)]:
            try:
                shape = check_shape(plain(given))
            except ValueError as error:
                raise GraphError(f"input: got {shorten(given)}, {error}.") from None
            self._nodes.append(Node(one, Input(shape)))
            self._shapes[one] = check_size(one, (1, *shape))
        if not self._nodes:
            raise GraphError("input: got no inputs, expected one at least.")
        self.input = self._nodes[0].name
        self._counts: Counter[str] = Counter()

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, x: str) -> Shape:
        """Shape of a node's output for one sample, with a leading 1 for the batch."""
        return self._shapes[known(x, self._shapes, "shape")]

    if TYPE_CHECKING:

        def __getattr__(self, kind: str) -> Callable[..., str]:
            """A method per op: ``g.conv(x, 64, 3, pad=1)`` is ``g.layer("conv", x, filters=64, kernel=3, pad=1)``."""

    def layer(
        self,
        kind: str | Layer,
        x: str | Sequence[str],
        name: str | None = None,
        share: str | None = None,
        **options: Any,
    ) -> str:
        """Append an op of any kind, those of `register_op` included.

        Parameters
        ----------
        kind : str or Layer
            Name of the op, or a layer of a run file with its options.
        x : str or sequence of str
            The node that it reads; several for add, multiply and concat.
        name : str, optional
            Name of the node.
        share : str, optional
            An earlier layer whose parameters it has; gradients of both are added.
        **options
            As in a run file.
        """
        word = kind if isinstance(kind, str) else kind.kind
        at = name or word
        if word not in OPS:
            raise GraphError(f"{at}: op: got {word!r}; {nearest(str(word), OPS)}expected {', '.join(OPS)}.")
        try:
            layer = check(LAYERS.sections[word], {"op": word, **plain(options)}, at) if isinstance(kind, str) else kind
        except ConfigError as error:
            raise GraphError(str(error)) from None
        inputs = names(x, at) if layer.joins else [x]
        rank = self._rank(inputs[0], at) if layer.has_sizes() else 0
        try:
            given = layer.options(rank)
            mode = given.pop("pad_mode", "zeros")
            if mode != "zeros" and any(map(any, given["pad"])):  # a node of its own
                inputs = [self.add_op(Pad(given["pad"], mode), inputs, name and f"{name}_pad")]
                given["pad"] = ((0, 0),) * rank
            op = OPS[word].make(**given)
        except ValueError as error:
            raise GraphError(f"{at}: {error}.") from None
        return self.add_op(op, inputs, name, layer.share if share is None else share)

    def add_op(self, op: Op, inputs: Sequence[Any], name: str | None = None, share: str | None = None) -> str:
        """Append any op, with the parameters of the layer ``share`` if it is given; returns its node's name."""
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
            if isinstance(op, Fit):  # of the second input nothing but its size is read: the network knows that already
                op, inputs, xs = op.padding(xs), inputs[:1], xs[:1]
            shape = check_size("output", op.infer(xs))
            params = op.params(xs)
            for short, param in params.items():
                check_size(short, param.shape)
        except GraphError as error:
            hint = ""
            if len({x[1:-1] for x in xs}) > 1 and len({len(x) for x in xs}) == 1:
                sizes = ", ".join(f"{i} {list(x[1:-1])}" for i, x in zip(inputs, xs, strict=True))
                hint = f" Their sizes: {sizes}{self._unequal(inputs)}; pad there, or put a `fit` between."
            raise GraphError(f"{name}: {error}{hint}") from None
        if share is not None:
            self._check_share(name, params, share)
        self._shapes[name] = shape
        self._nodes.append(Node(name, op, tuple(inputs), share))
        return name

    def share(self, node: str, other: str) -> None:
        """Let the newest node have the parameters of an earlier one; raises GraphError if they do not fit."""
        newest = self._nodes[-1]
        assert newest.name == node
        params = newest.op.params([self._shapes[i] for i in newest.inputs])
        self._check_share(node, params, other)
        self._nodes[-1] = replace(newest, share=other)

    def build(self, output: str | Sequence[str], heads: Mapping[str, float] | None = None) -> Graph:
        """The finished network whose output is the given node, or nodes; nodes that it does not need are dropped.

        ``heads`` are further outputs with weights, that of the output being 1, for deep supervision: each is compared with every
        second, fourth, ... target, as its size says, and the loss is the weighted mean.
        """
        needed: set[str] = set()
        first, *others = [output] if isinstance(output, str) else output
        todo = [known(n, self._shapes, "build: output") for n in (first, *others, *(heads or ()))]
        by_name = {n.name: n for n in self._nodes}
        while todo:
            n = todo.pop()
            if n not in needed:
                needed.add(n)
                todo.extend(by_name[n].inputs)
        for name in sorted(needed):
            share = by_name[name].share
            if share is not None and share not in needed:
                raise GraphError(
                    f"{name}: share: {share!r}, whose parameters it has, is not needed for the output; let {share!r} have those of {name!r}."
                )
        nodes = tuple(n for n in self._nodes if n.name in needed or n.name == self.input)
        return Graph(nodes, first, self.name, tuple((heads or {}).items()), tuple(others))

    def _check_share(self, name: str, own: Mapping[str, Param], share: Any) -> None:
        """Raise GraphError unless a new node can have the parameters of the node ``share``."""
        if share == name:
            raise GraphError(f"{name}: share: got its own name, expected an earlier layer; leave the field out.")
        other = next(n for n in self._nodes if n.name == known(share, self._shapes, f"{name}: share"))
        check_shared(name, own, other, other.op.params([self._shapes[i] for i in other.inputs]))

    def _unequal(self, inputs: Sequence[str]) -> str:
        """Which layers, on the way to inputs of different sizes, change a size by other than a whole factor."""
        by_name, found, todo, seen = {n.name: n for n in self._nodes}, [], list(inputs), set()
        while todo:
            node = by_name[todo.pop()]
            if node.name in seen:
                continue
            seen.add(node.name)
            todo += node.inputs
            for x in node.inputs[:1]:
                sides = zip(self._shapes[x][1:-1], self._shapes[node.name][1:-1], strict=False)
                if any(max(a, b) % min(a, b) for a, b in sides):
                    found.append(node.name)
        return f", made unequal by {', '.join(sorted(found))}" if found else ""

    def _rank(self, x: Any, at: str) -> int:
        """Number of spatial dimensions of a node."""
        rank = len(self._shapes[known(x, self._shapes, f"{at}: input")]) - 2
        if rank < 1:
            raise GraphError(f"{at}: its input {x!r} has shape {self._shapes[x]}, expected spatial dimensions.")
        return rank


def register_op(op: O) -> O:
    """Make an op known to run files (``op: kind``) and a method of `GraphBuilder`; a decorator. See docs/howto/add-an-op.md."""
    kind = LAYERS.kind(LAYERS.add(op.options))
    if kind in OPS or not hasattr(GraphBuilder, kind):  # an op called "shape" has no method, but `layer` makes it
        setattr(GraphBuilder, kind, _method(op.options))
    OPS[kind] = op
    return op


def _method(layer: type[Layer]) -> Callable[..., str]:
    """The builder's method of an op: its signature and documentation are those of the op's options."""
    kind, own = LAYERS.kind(layer), layer.own()

    def method(
        self: GraphBuilder, x: Any, *args: Any, name: str | None = None, share: str | None = None, **options: Any
    ) -> str:
        if len(args) > len(own):
            raise TypeError(f"{kind}() takes {len(own)} options but {len(args)} were given")
        return self.layer(kind, x, name=name, share=share, **dict(zip(own, args, strict=False)), **options)

    fields = [layer.model_fields[n] for n in own]
    defaults = [Parameter.empty if f.is_required() else f.default for f in fields]
    given = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD, default=d) for n, d in zip(own, defaults, strict=True)]
    fixed = [Parameter(n, Parameter.POSITIONAL_ONLY) for n in ("self", "xs" if layer.joins else "x")]
    method.__name__ = kind
    method.__signature__ = Signature(  # type: ignore[attr-defined]
        [*fixed, *given, *(Parameter(n, Parameter.KEYWORD_ONLY, default=None) for n in ("name", "share"))]
    )
    options = [f"{n}\n    {f.description}" for n, f in zip(own, fields, strict=True)]
    method.__doc__ = "\n".join([layer.__doc__ or "", *(["", "Parameters", "----------", *options] if options else [])])
    return method


for _op in (
    *(Conv, ConvTranspose, MaxPool, AvgPool, GlobalAvgPool, Norm, Relu, LeakyRelu, PRelu, Sigmoid, Tanh),
    *(Elu, Gelu, Silu, Softplus, Hardsigmoid, Hardswish),
    *(InstanceNorm, GroupNorm, LayerNorm, LocalResponseNorm, Softmax, ChannelShuffle),
    *(Add, Multiply, Concat, Flatten, Linear, Dropout, Upsample, Pad, Crop, Fit),
):
    register_op(_op)
