"""A network: nodes in topological order, with global shapes for any batch size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from lbpar.errors import GraphError
from lbpar.graph.loops import Param, Shape
from lbpar.graph.op import Input, Op
from lbpar.graph.ops.deep import Deep
from lbpar.graph.ops.losses import Loss

TARGET = "target"
LOSS = "loss"


MOST_ELEMENTS = 2**48
"""Of one tensor: a petabyte in float32, and far from the end of 64-bit counts of bytes and operations."""


def check_size(what: str, shape: Shape) -> Shape:
    """The shape itself; raises GraphError if no machine could hold such a tensor."""
    if prod(shape) > MOST_ELEMENTS:
        raise GraphError(f"{what}: a tensor of shape {shape} has more than 2⁴⁸ elements, expected fewer.")
    return shape


@dataclass(frozen=True)
class Node:
    """One op of the network and the names of the nodes it reads."""

    name: str
    op: Op
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order; ``output`` names the network's output (before any loss).

    ``heads`` are further outputs that are trained beside it (deep supervision), each with its weight, that of the output being 1.
    """

    nodes: tuple[Node, ...]
    output: str
    name: str = "network"
    heads: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for node in self.nodes:
            if node.name in seen:
                raise GraphError(f"{node.name}: two nodes have this name; names must be unique.")
            for i in node.inputs:
                if i not in seen:
                    raise GraphError(f"{node.name}: reads {i!r}, which is not an earlier node.")
            seen.add(node.name)
        for name in (self.output, *(head for head, _ in self.heads)):
            if name not in seen:
                raise GraphError(f"graph: output {name!r} is not a node.")

    def __getitem__(self, name: str) -> Node:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def inputs(self) -> tuple[Node, ...]:
        """Nodes fed from outside."""
        return tuple(n for n in self.nodes if isinstance(n.op, Input))

    @cached_property
    def ops(self) -> tuple[Node, ...]:
        """Nodes that compute."""
        return tuple(n for n in self.nodes if not isinstance(n.op, Input))

    @property
    def loss(self) -> Node | None:
        """The loss node, if there is one."""
        last = self.nodes[-1]
        return last if isinstance(last.op, Loss) else None

    def shapes(self, batch: int) -> dict[str, Shape]:
        """Global shape of every node's output, for a mini-batch of ``batch`` samples."""
        return dict(self._shapes(batch))

    def input_shapes(self, name: str, batch: int) -> tuple[Shape, ...]:
        """Global shapes of what a node reads."""
        shapes = self._shapes(batch)
        return tuple(shapes[i] for i in self[name].inputs)

    def params(self) -> dict[str, Param]:
        """Every parameter and running statistic as ``"<node>.<name>"``."""
        return dict(self._params)

    @property
    def parameter_count(self) -> int:
        """Number of trainable parameters."""
        return sum(p.size for p in self.params().values() if p.kind != "statistic")

    def consumers(self, name: str) -> tuple[Node, ...]:
        """Nodes that read a node."""
        return tuple(n for n in self.nodes if name in n.inputs)

    def with_loss(self, loss: Loss) -> Graph:
        """The same network followed by a loss that reads its output, a new input ``target``, and further outputs, if there are any."""
        for reserved in (TARGET, LOSS):
            if reserved in self:
                raise GraphError(f"{reserved}: this node name is reserved for the loss; rename the layer.")
        shape = loss.target_shape(self.shapes(1)[self.output])[1:]
        target = Node(TARGET, Input(shape, "int64" if loss.labels else None))
        total = 1 + sum(weight for _, weight in self.heads)
        if self.heads:
            loss = Deep(loss, (1 / total, *(w / total for _, w in self.heads)), metrics=loss.metrics)
        last = Node(LOSS, loss, (self.output, TARGET, *(head for head, _ in self.heads)))
        return Graph((*self.nodes, target, last), self.output, self.name, self.heads)

    # Tables, made once: a graph does not change, and looking at all of it for each lookup would take n² time.

    @cached_property
    def _hash(self) -> int:
        return hash((self.nodes, self.output, self.name, self.heads))

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {n.name: n for n in self.nodes}

    @cached_property
    def _batches(self) -> dict[int, dict[str, Shape]]:
        return {}

    def _shapes(self, batch: int) -> dict[str, Shape]:
        if batch not in self._batches:
            self._batches[batch] = self._infer(batch)
        return self._batches[batch]

    def _infer(self, batch: int) -> dict[str, Shape]:
        out: dict[str, Shape] = {}
        for node in self.nodes:
            if isinstance(node.op, Input):
                out[node.name] = check_size(node.name, (batch, *node.op.shape))
                continue
            try:
                out[node.name] = check_size("output", node.op.infer([out[i] for i in node.inputs]))
            except GraphError as error:
                raise GraphError(f"{node.name}: {error}") from None
        return out

    @cached_property
    def _params(self) -> dict[str, Param]:
        out = {}
        for node in self.ops:
            for short, param in node.op.params(self.input_shapes(node.name, 1)).items():
                out[f"{node.name}.{short}"] = param
        return out
