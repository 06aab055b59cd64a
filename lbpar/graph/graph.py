"""A network: nodes in topological order, with global shapes for any batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from lbpar.errors import GraphError
from lbpar.graph.loops import Param, Shape
from lbpar.graph.op import Input, Op
from lbpar.graph.ops.joint import Joint, Part
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
    """One op of the network, the names of the nodes it reads, and of the one whose parameters it has (default: its own)."""

    name: str
    op: Op
    inputs: tuple[str, ...] = ()
    share: str | None = None

    @property
    def owner(self) -> str:
        """Name of the node that its parameters are named after."""
        return self.share or self.name


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order; ``output`` names the network's output (before any loss).

    ``heads`` are further outputs that are trained beside it (deep supervision), each with its weight, that of the output being 1;
    ``others`` are further outputs that have targets of their own.
    """

    nodes: tuple[Node, ...]
    output: str
    name: str = "network"
    heads: tuple[tuple[str, float], ...] = ()
    others: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for node in self.nodes:
            if node.name in seen:
                raise GraphError(f"{node.name}: two nodes have this name; names must be unique.")
            for i in node.inputs:
                if i not in seen:
                    raise GraphError(f"{node.name}: reads {i!r}, which is not an earlier node.")
            if node.share is not None and node.share not in seen:
                raise GraphError(f"{node.name}: share: got {node.share!r}, expected an earlier layer.")
            seen.add(node.name)
        for name in (*self.outputs, *(head for head, _ in self.heads)):
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

    @cached_property
    def targets(self) -> tuple[Node, ...]:
        """Inputs that the loss compares outputs with."""
        read = () if self.loss is None else (self.loss.inputs[i] for i in sorted(self.loss.op.no_grad))
        return tuple(self[name] for name in read)

    @cached_property
    def samples(self) -> tuple[Node, ...]:
        """The other inputs; the first is the one that says what a sample is."""
        return tuple(n for n in self.inputs if n not in self.targets)

    @property
    def outputs(self) -> tuple[str, ...]:
        """All that have targets of their own."""
        return (self.output, *self.others)

    def result(self, output: str) -> str:
        """What programs call one of these among their results."""
        return "output" if output == self.output else f"output/{output}"

    @cached_property
    def compared(self) -> dict[str, tuple[str, Loss]]:
        """For each of these its target and its loss, in order."""
        assert self.loss is not None
        named = [p for p in getattr(self.loss.op, "parts", ()) if p.name]
        if not named:
            return {self.output: (self.loss.inputs[1], self.loss.op)}  # type: ignore[dict-item]
        return {self.loss.inputs[p.x]: (self.loss.inputs[p.target], p.loss) for p in named}

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
        """Every parameter and running statistic as ``"<node>.<name>"``; shared ones once, by the name of the first layer that has them."""
        return dict(self._params)

    @cached_property
    def shared(self) -> dict[str, tuple[Node, ...]]:
        """Of every layer whose parameters others have too: all that have them, itself first."""
        owners = dict.fromkeys(n.share for n in self.nodes if n.share is not None)
        return {o: tuple(n for n in self.nodes if n.owner == o) for o in owners}

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
        if self.others:
            raise GraphError(
                f"loss: got one loss for the outputs {', '.join(self.outputs)}, expected one for each (train.losses)."
            )
        shape = loss.target_shape(self.shapes(1)[self.output])[1:]
        target = Node(TARGET, Input(shape, "int64" if loss.labels else None))
        if self.heads:
            weights = [1.0, *(weight for _, weight in self.heads)]
            scaled = [replace(loss, factor=loss.factor * w / sum(weights)) for w in weights]
            own = Part(scaled[0], 0, 1, "")
            further = (Part(replace(one, metrics=()), j, 1) for j, one in enumerate(scaled[1:], 2))
            loss = Joint((own, *further), metrics=loss.metrics)
        last = Node(LOSS, loss, (self.output, TARGET, *(head for head, _ in self.heads)))
        return replace(self, nodes=(*self.nodes, target, last))

    def with_losses(self, losses: Mapping[str, tuple[Loss, str]]) -> Graph:
        """The same network followed by the sum of a loss for each output, on the target of the given name.

        Targets become new inputs ``target/NAME``; several outputs may have the same.
        """
        if set(losses) != set(self.outputs):
            raise GraphError(
                f"loss: got losses of {', '.join(losses)}, expected one for each output: {', '.join(self.outputs)}."
            )
        if self.heads:
            raise GraphError("loss: got heads and several outputs, expected either; give a head a loss of its own.")
        shapes, targets = self.shapes(1), dict[str, Node]()
        for output in self.outputs:
            loss, name = losses[output]
            shape, dtype = loss.target_shape(shapes[output])[1:], "int64" if loss.labels else None
            one = targets.setdefault(name, Node(f"{TARGET}/{name}", Input(shape, dtype)))
            if one.op != Input(shape, dtype):
                raise GraphError(
                    f"loss: {output} takes targets {name!r} of shape {shape}, but another output takes {one.op.shape}; name two."  # type: ignore[attr-defined]
                )
        for name in (LOSS, *(t.name for t in targets.values())):
            if name in self:
                raise GraphError(f"{name}: this node name is reserved for the loss; rename the layer.")
        at = {name: len(self.outputs) + i for i, name in enumerate(targets)}
        parts = tuple(Part(losses[o][0], i, at[losses[o][1]], o) for i, o in enumerate(self.outputs))
        last = Node(LOSS, Joint(parts), (*self.outputs, *(t.name for t in targets.values())))
        return replace(self, nodes=(*self.nodes, *targets.values(), last))

    # Tables, made once: a graph does not change, and looking at all of it for each lookup would take n² time.

    @cached_property
    def _hash(self) -> int:
        return hash((self.nodes, self.output, self.name, self.heads, self.others))

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
            own = node.op.params(self.input_shapes(node.name, 1))
            if node.share is not None:
                other = self[node.share]
                check_shared(node.name, own, other, other.op.params(self.input_shapes(other.name, 1)))
            else:
                out.update({f"{node.name}.{short}": param for short, param in own.items()})
        return out


def check_shared(name: str, own: Mapping[str, Param], other: Node, params: Mapping[str, Param]) -> None:
    """Raise GraphError unless a layer, which would have such parameters of its own, can have those of another."""
    if other.share is not None:
        raise GraphError(
            f"{name}: share: got {other.name!r}, which has the parameters of {other.share!r} itself; name {other.share!r}."
        )
    if not own:
        raise GraphError(f"{name}: share: got {other.name!r}, but this layer has no parameters; leave the field out.")
    ours, theirs = ({short: (p.shape, p.kind) for short, p in found.items()} for found in (own, params))
    if ours != theirs:
        here, there = (", ".join(f"{s} {list(p.shape)}" for s, p in found.items()) for found in (own, params))
        raise GraphError(
            f"{name}: share: {other.name!r} has {there or 'no parameters'}, but this layer needs {here}; layers that share parameters "
            "have those of the same names and shapes."
        )
