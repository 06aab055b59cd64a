"""What an import has built so far, and how each ONNX value relates to a node of ours.

ONNX tensors are channels first (N, C, H, W), ours channels last. A `Value` says for each ONNX dimension which of ours
it is, so transposes, squeezes and the like cost nothing: they only change that map.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, TypeVar

import numpy as np

from lbpar.errors import GraphError
from lbpar.graph.builder import GraphBuilder
from lbpar.models.onnx_file import Array, OnnxFile, OnnxNode, tensor_array

log = logging.getLogger(__name__)
H = TypeVar("H", bound="Callable[[Import, OnnxNode], Value | None]")

#: Stands for the number of samples in shape arithmetic where the file leaves it open: a prime that no layer has as size.
#: Activations: our op, its options by the names of ONNX' attributes, and whether it is never negative.
ACTIVATIONS: dict[str, tuple[str, dict[str, str], bool]] = {
    "Relu": ("relu", {}, True),
    "Sigmoid": ("sigmoid", {}, True),
    "Tanh": ("tanh", {}, False),
    "LeakyRelu": ("leaky_relu", {"alpha": "slope"}, False),
    "Elu": ("elu", {"alpha": "alpha"}, False),
    "Gelu": ("gelu", {"approximate": "approximate"}, False),
    "Softplus": ("softplus", {}, True),
    "HardSigmoid": ("hardsigmoid", {"alpha": "slope"}, True),
    "HardSwish": ("hardswish", {}, False),
}

OPEN_BATCH = 1_000_003
ONE = -1
#: Op type to what imports it.
HANDLERS: dict[str, Callable[[Import, OnnxNode], Value | None]] = {}
_RESERVED = ("input", "target", "loss")
#: Ops without a module of their own in PyTorch: the scope in their name is that of the module that calls them.
_FUNCTIONS = ("Add", "Sum", "Mul", "Concat", "Reshape", "Flatten", "ReduceMean", "ReduceMax", "Squeeze")


@dataclass(frozen=True, eq=False)
class Value:
    """An ONNX tensor.

    Attributes
    ----------
    name : str
        Our node.
    dims : tuple of int
        Per ONNX dimension, our dimension; ``ONE`` for an extra dimension of size one.
    pad : tuple of (int, int) or None
        A pending ``Pad`` per spatial dimension of ours, for the next window to take.
    pad_value : float
    """

    name: str
    dims: tuple[int, ...]
    pad: tuple[tuple[int, int], ...] | None = None
    pad_value: float = 0.0


class Import:
    """State of an import: values and constants by ONNX name, and the network so far.

    Parameters
    ----------
    file : OnnxFile
    sample : tuple of int
        Shape of one sample, channels last.
    dims : tuple of int
        How the file's input maps to ours (see `Value`).
    """

    def __init__(self, file: OnnxFile, sample: tuple[int, ...], dims: tuple[int, ...]) -> None:
        self.file = file
        self.builder = GraphBuilder(sample, name=file.path.stem)
        self.batch = file.input_shape[0] or OPEN_BATCH
        self.values: dict[str, Value] = {file.input: Value(self.builder.input, dims)}
        self.weights: dict[str, Array] = {}  # as in the file, channels first
        self.flattened: dict[str, Array | None] = {}  # our feature j is the file's feature order[j]
        self.nonnegative: set[str] = set()  # our nodes that are never below zero
        self.absorbed: set[str] = set()  # outputs of nodes that were taken together with an earlier one
        self.computed: set[str] = set()  # constants that are no weights of the file but were worked out
        self._constants: dict[str, Array] = {}
        self._used: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._taken = set(_RESERVED)
        self._readers: dict[str, list[OnnxNode]] = {}
        for node in file.nodes:
            for i in dict.fromkeys(node.inputs):
                self._readers.setdefault(i, []).append(node)

    # Constants.

    def is_constant(self, name: str) -> bool:
        """Whether an ONNX value is known now."""
        return name in self._constants or name in self.file.tensors

    def array(self, name: str) -> Array:
        """A known value."""
        if name not in self._constants:
            return tensor_array(self.file.tensors[name])  # not kept: weights may be large
        return self._constants[name]

    def set_constant(self, name: str, array: Array) -> None:
        """Make an ONNX value known."""
        self._constants[name] = array

    def constant(self, node: OnnxNode, i: int, what: str) -> Array:
        """Input i of a node, which must be constant."""
        found = self.optional(node, i, what)
        if found is None:
            raise GraphError(f"it has no {what}, expected them as input {i}.")
        return found

    def optional(self, node: OnnxNode, i: int, what: str) -> Array | None:
        """Input i of a node, which must be constant if it is given."""
        if not has_input(node, i):
            return None
        if not self.is_constant(node.inputs[i]):
            raise GraphError(
                f"its {what} ('{node.inputs[i]}') depend on the samples, expected a constant or an initializer."
            )
        return self.array(node.inputs[i])

    # Values.

    def made(self, x: Value, node: str, sign: bool | None = None) -> Value:
        """The value x with one of our nodes made from it; ``sign``: whether that is never negative (None: if x is not)."""
        if sign or (sign is None and x.name in self.nonnegative):
            self.nonnegative.add(node)
        return replace(x, name=node, pad=None)

    def value(self, node: OnnxNode, i: int = 0) -> Value:
        """Input i of a node, computed from the samples; a pending pad stays with it."""
        name = node.inputs[i]
        if name not in self.values:
            raise GraphError(f"its input '{name}' is a constant, expected something computed from the samples.")
        return self.values[name]

    def tensor(self, node: OnnxNode, i: int = 0) -> Value:
        """Input i of a node, without a pending pad."""
        found = self.value(node, i)
        if found.pad is not None:
            raise GraphError(
                f"its input '{node.inputs[i]}' comes from a Pad, which only Conv, MaxPool and AveragePool can take over."
            )
        return found

    def image(self, node: OnnxNode, i: int = 0, padded: bool = False) -> Value:
        """Input i of a node, which must be (N, C, spatial...)."""
        found = self.value(node, i) if padded else self.tensor(node, i)
        if len(self.shape(found)) < 3 or found.dims != first_dims(len(self.shape(found))):
            raise GraphError(
                f"its input has shape {self.describe(found)}, which comes from a flatten, a global pool or a transpose; "
                "expected channels first with spatial dimensions, straight from the layers before."
            )
        return found

    def features(self, node: OnnxNode, i: int = 0) -> Value:
        """Input i of a node, which must be (N, C)."""
        found = self.tensor(node, i)
        if len(self.shape(found)) != 2 or found.dims != (0, 1):
            raise GraphError(
                f"its input has shape {self.describe(found)}, expected (N, C): put a Flatten or a global pool before it."
            )
        return found

    def shape(self, value: Value) -> tuple[int, ...]:
        """Our shape, with a leading 1 for the samples."""
        return self.builder.shape(value.name)

    def spatial(self, value: Value) -> tuple[int, ...]:
        """Our spatial extents."""
        return self.shape(value)[1:-1]

    def onnx_shape(self, value: Value) -> tuple[int, ...]:
        """The file's shape; the samples are ``batch``."""
        ours = (self.batch, *self.shape(value)[1:])
        return tuple(1 if d == ONE else ours[d] for d in value.dims)

    def describe(self, value: Value) -> str:
        """The file's shape, for messages."""
        sizes = ("N" if d == 0 else str(e) for d, e in zip(value.dims, self.onnx_shape(value), strict=True))
        return f"({', '.join(sizes)})"

    def axis(self, value: Value, axis: int) -> int:
        """A possibly negative ONNX axis as a non-negative one."""
        rank = len(value.dims)
        if not -rank <= axis < rank:
            raise GraphError(f"its axis is {axis}, expected one of a tensor of shape {self.describe(value)}.")
        return axis % rank

    def is_channel(self, value: Value, axis: int) -> bool:
        """Whether an ONNX axis is the channels."""
        return value.dims[self.axis(value, axis)] == len(self.shape(value)) - 1

    def flat(self, value: Value, name: str | None = None) -> Value:
        """(N, features); how the file orders them is remembered."""
        ours = self.shape(value)
        if value.dims[0] != 0:
            raise GraphError(f"its input has shape {self.describe(value)}, expected the samples first.")
        if len(ours) == 2:
            return replace(value, dims=(0, 1))
        dims = [d for d in value.dims[1:] if d != ONE]
        theirs = np.arange(prod(ours)).reshape([ours[d] for d in dims])
        order = theirs.transpose([dims.index(d) for d in range(1, len(ours))]).ravel()
        same = bool((order == np.arange(order.size)).all())
        flat = self.made(value, self.builder.flatten(value.name, name=name))
        self.flattened[flat.name] = None if same else order
        return replace(flat, dims=(0, 1))

    def squeezed(self, x: Value, gone: set[int], name: str | None = None) -> Value:
        """Without some ONNX dimensions of size one."""
        sizes, rank = self.onnx_shape(x), len(self.shape(x))
        if any(sizes[i] != 1 or x.dims[i] == 0 for i in gone):
            raise GraphError(f"it squeezes the axes {sorted(gone)} of {self.describe(x)}, expected sizes of one.")
        if any(x.dims[i] != ONE for i in gone) and rank > 2:
            if any(x.dims[i] == rank - 1 for i in gone) or prod(self.spatial(x)) != 1:
                raise GraphError(
                    f"it squeezes {self.describe(x)}, expected all spatial sizes to be one: use a Flatten."
                )
            dims = tuple(d if d == 0 else 1 if d == rank - 1 else ONE for d in x.dims)
            x = replace(self.flat(x, name), dims=dims)
        if any(x.dims[i] == 1 for i in gone):
            raise GraphError(f"it squeezes the features of {self.describe(x)}, expected (N, C) to stay.")
        return replace(x, dims=tuple(d for i, d in enumerate(x.dims) if i not in gone))

    # The file.

    def readers(self, output: str) -> list[OnnxNode]:
        """Nodes that read an ONNX value."""
        return self._readers.get(output, [])

    def is_last(self, output: str) -> bool:
        """Whether a value is the network's output and nothing else."""
        readers = self.readers(output)
        if output == self.file.output:
            return not readers
        return len(readers) == 1 and readers[0].kind == "Identity" and self.is_last(readers[0].outputs[0])

    def name(self, node: OnnxNode, weight: str | None = None) -> str | None:
        """A free name for a node: that of the module that owns its weight, or from its scope; None: number it.

        ``weight`` is the ONNX name of its weight.
        """
        name = weight.removesuffix(".weight") if weight and weight.endswith(".weight") else _from_scope(node)
        name = re.sub(r"[^\w.\-]+", "_", name) if name else None
        if not name or name in self._taken or name in self.builder:
            return None
        self._taken.add(name)
        return name

    def keep_weights(self, node: str, arrays: Mapping[str, Array | None], sources: Sequence[str] = ()) -> None:
        """Remember the weights of our newest node by their short names.

        ``sources`` are the ONNX names of all of them, the main one first. A node that has those of an earlier one shares them, unless they are one
        number throughout: exporters join constants that are equal by chance.
        """
        source = sources[0] if sources else ""
        if source in self._used:
            other, theirs = self._used[source]
            if theirs == tuple(sources) and not any(o is not None for o in self.flattened.values()):
                main = self.array(source)
                with suppress(GraphError):  # they are read in another way
                    if main.size and (main != main.flat[0]).any():
                        self.builder.share(node, other)
                        return
            note(f"{self.file.path}: {other} and {node} share '{source}'; they start equal but are trained separately")
        elif source:
            self._used[source] = node, tuple(sources)
        self.weights |= {f"{node}.{name}": _floating(array) for name, array in arrays.items() if array is not None}

    def attribute_or_input(self, node: OnnxNode, attribute: Any, i: int, what: str) -> list[Any] | None:
        """What older opsets give as an attribute and newer ones as the constant input i: a flat list; None if neither does."""
        given = self.optional(node, i, what)
        if given is None and attribute is None:
            return None
        return list(np.ravel(attribute if given is None else given).tolist())

    def following(self, output: str, kind: str, filters: int, rank: int) -> tuple[Array, str] | None:
        """A node of some kind right after an output that joins it with one constant per channel: the constant, its output."""
        readers = self.readers(output)
        if output == self.file.output or len(readers) != 1 or readers[0].kind != kind:
            return None
        other = [i for i in readers[0].inputs if i != output]
        if len(other) != 1 or not self.is_constant(other[0]):
            return None
        array = self.array(other[0])
        shape = (1,) * (rank - array.ndim) + array.shape
        if len(shape) != rank or shape[1] not in (1, filters) or prod(shape) != shape[1]:
            return None
        return np.broadcast_to(array.reshape(-1), (filters,)), readers[0].outputs[0]

    def following_bias(self, node: OnnxNode, filters: int, rank: int) -> tuple[Array | None, tuple[str, ...]]:
        """An ``Add`` of one constant per channel right after a node: the constant, and the output that it stands for."""
        found = self.following(node.outputs[0], "Add", filters, rank)
        return (None, ()) if found is None else (found[0], found[1:])

    def following_affine(self, node: OnnxNode, channels: int, rank: int) -> tuple[Array, Array, tuple[str, ...]]:
        """All ``Mul`` and ``Add`` of constants per channel after a node: factor and offset together, and their outputs."""
        factor, offset = np.ones(channels, np.float32), np.zeros(channels, np.float32)
        outputs: tuple[str, ...] = ()
        while True:
            output = outputs[-1] if outputs else node.outputs[0]
            times = self.following(output, "Mul", channels, rank)
            plus = self.following(output, "Add", channels, rank)
            if times is not None:
                factor, offset, outputs = factor * times[0], offset * times[0], (*outputs, times[1])
            elif plus is not None:
                offset, outputs = offset + plus[0], (*outputs, plus[1])
            else:
                return factor, offset, outputs

    def absorbing(self, value: Value, *also: str) -> Value:
        """Let the outputs of later nodes, which were taken together with the one that made a value, stand for it too."""
        for output in also:
            self.values[output] = value
            self.absorbed.add(output)
        return value


def imports(*kinds: str) -> Callable[[H], H]:
    """Make a function import ONNX ops of these types; a decorator."""

    def register(handler: H) -> H:
        HANDLERS.update(dict.fromkeys(kinds, handler))
        return handler

    return register


@cache
def note(text: str) -> None:
    """Warn of something, once, although a run reads its file for the graph and again for the weights."""
    log.warning("%s", text)


def has_input(node: OnnxNode, i: int) -> bool:
    """Whether an optional input is given."""
    return i < len(node.inputs) and node.inputs[i] != ""


def first_dims(rank: int) -> tuple[int, ...]:
    """Channels first from channels last: (0, last, 1, 2, ...)."""
    return (0, rank - 1, *range(1, rank - 1))


def shortest(value: float) -> float:
    """The shortest number that is a file's float32: 0.1 and not 0.10000000149."""
    return float(np.format_float_positional(np.float32(value), unique=True))


def _floating(array: Array) -> Array:
    """In float32 or float64."""
    if array.dtype in (np.float32, np.float64):
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise GraphError(f"its weights are {array.dtype}, expected floating point; export the network unquantized.")
    return array.astype(np.float32)


def _from_scope(node: OnnxNode) -> str | None:
    """``/layer1/layer1.0/conv1/Conv`` is layer1.0.conv1; names that only number the kind say nothing."""
    parts = [p for p in node.name.split("/") if p]
    if not parts or node.name.startswith("#"):
        return None
    last = re.fullmatch(rf"(?:node_)?{re.escape(node.kind)}((?:_\d+)?)", parts[-1], re.IGNORECASE)
    if last is None and parts[-1].startswith("node_"):  # torch.export: node_conv2d_3
        return None
    if last is not None:
        parts.pop()
    out = ""
    for part in parts:
        out = part if not out or part.startswith(out + ".") else f"{out}.{part}"
    if out and last is not None and parts[-1].lower() == node.kind.lower():
        out += last[1]
    elif out and last is not None:
        out += f".{node.kind.lower()}{last[1]}" if node.kind in _FUNCTIONS else last[1]
    return out or None
