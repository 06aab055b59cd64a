"""Read an ONNX file: its nodes with their attributes, its constants, its one input and output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.config.paths import as_path
from lbpar.errors import ConfigError, GraphError
from lbpar.text import nearest

Array = NDArray[Any]
MOST_CONSTANT = 2**31
NEWEST_OPSET = 28  # What its attributes mean is known here.
OLDEST_OPSET = 9  # Before it, batch normalisation and upsampling meant something else.


@dataclass(frozen=True)
class OnnxNode:
    """One node of the file; ``kind`` is its op type, with the domain in front if it is not ONNX's own."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    proto: Any

    def completed(self, opset: int) -> OnnxNode:
        """The node with ONNX's own defaults for the attributes that it leaves out; None for those without a default.

        Raises
        ------
        GraphError
            An attribute that ONNX does not know up to ``NEWEST_OPSET``: it may change what the node computes.
        """
        known = _defaults(self.kind, opset)
        for name in self.attributes:
            if name not in known:
                hint = nearest(name, list(known))
                raise GraphError(f"its attribute '{name}' is unknown here, {hint}expected only {', '.join(known)}.")
        return replace(self, attributes=known | dict(self.attributes))

    def __str__(self) -> str:
        return f"node '{self.name}' ({self.kind})"


@dataclass(frozen=True)
class OnnxFile:
    """What the importer needs of a file.

    Attributes
    ----------
    path : Path
    nodes : tuple of OnnxNode
        Those that the output needs, in topological order; those that need no samples come first.
    tensors : dict of str to TensorProto
        Initializers.
    input, output : str
    input_shape : tuple of int or None
        In the file's order, with the samples; None where the file leaves it open.
    opset : int
        Of ONNX's own ops.
    opsets : dict of str to int
        By domain.
    """

    path: Path
    nodes: tuple[OnnxNode, ...]
    tensors: Mapping[str, Any]
    input: str
    input_shape: tuple[int | None, ...]
    output: str
    opset: int
    opsets: Mapping[str, int]


def read_onnx(path: str | Path) -> OnnxFile:
    """Read a file, with its external data if it has any.

    Raises
    ------
    ConfigError
        The package `onnx` is missing.
    GraphError
        No such file, not an ONNX file, too old an opset, or not one input and one output.
    """
    path = as_path(path)
    model = _load(path)
    graph = model.graph
    opsets = {o.domain if o.domain != "ai.onnx" else "": o.version for o in model.opset_import}
    opset = opsets.get("", 0)
    if opset < OLDEST_OPSET:
        raise GraphError(
            f"{path}: got opset {opset}, expected {OLDEST_OPSET} or newer; export again, or convert the file with "
            "onnx.version_converter."
        )
    tensors = {t.name: t for t in graph.initializer}
    inputs = [i for i in graph.input if i.name not in tensors]
    if graph.sparse_initializer:
        raise GraphError(f"{path}: got sparse initializers, expected dense ones.")
    if len(inputs) != 1 or len(graph.output) != 1:
        raise GraphError(
            f"{path}: got the inputs {_names(inputs)} and the outputs {_names(graph.output)}, expected one of each; "
            "export the network with its weights (as initializers) and with a single output."
        )
    nodes = tuple(_node(p, i) for i, p in enumerate(graph.node))
    output = graph.output[0].name
    shape = inputs[0].type.tensor_type.shape.dim
    sizes = tuple(d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else None for d in shape)
    nodes = _in_order(nodes, inputs[0].name, output)
    return OnnxFile(path, nodes, tensors, inputs[0].name, sizes, output, opset, opsets)


def tensor_array(tensor: Any) -> Array:
    """The array of an initializer; 16-bit floats become float32."""
    from onnx import TensorProto, numpy_helper

    try:
        array = np.asarray(numpy_helper.to_array(tensor))
    except Exception as error:
        raise GraphError(
            f"the constant '{tensor.name}' of shape {list(tensor.dims)} cannot be read: {error}."
        ) from error
    if array.shape != tuple(tensor.dims):
        raise GraphError(f"the constant '{tensor.name}' has data of shape {array.shape}, but says {list(tensor.dims)}.")
    return array.astype(np.float32) if tensor.data_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16) else array


def evaluate(node: OnnxNode, arrays: Sequence[Array | None], opsets: Mapping[str, int]) -> list[Array]:
    """What a node computes from constants, by ONNX's own reference."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    given = {n: a for n, a in zip(node.inputs, arrays, strict=True) if n and a is not None}
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in given.items()
    ]
    names = [o for o in node.outputs if o]
    graph = helper.make_graph([node.proto], "constant", inputs, [helper.make_empty_tensor_value_info(o) for o in names])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(d, v) for d, v in opsets.items()])
    if node.kind in _GROWING or sum(a.size for a in given.values()) > 1000:
        _check_growth(model, given)
    try:
        return [np.asarray(a) for a in ReferenceEvaluator(model).run(names, given)]
    except Exception as error:
        raise GraphError(f"its value could not be computed: {type(error).__name__}: {error}.") from error


#: Ops whose result can be larger than all that they read together.
_GROWING = ("ConstantOfShape", "EyeLike", "Expand", "OneHot", "Pad", "Range", "Resize", "Tile", "Upsample")


def _check_growth(model: Any, given: Mapping[str, Array]) -> None:
    """Refuse a constant that a few numbers blow up to more than any weight has, before it is made."""
    from onnx import numpy_helper, shape_inference

    small = (numpy_helper.from_array(a, name) for name, a in given.items() if a.size <= 1000)
    model.graph.initializer.extend(small)  # for shapes follow from values
    try:
        outputs = shape_inference.infer_shapes(model, data_prop=True).graph.output
    except Exception:  # noqa: BLE001  the library raises many kinds
        return  # what is wrong shows when it is computed
    finally:
        del model.graph.initializer[:]
    for value in outputs:
        sizes = [d.dim_value for d in value.type.tensor_type.shape.dim]
        if prod(sizes) > MOST_CONSTANT:
            raise GraphError(f"its result '{value.name}' would have shape {sizes}, more than {MOST_CONSTANT} elements.")


def is_onnx_op(kind: str) -> bool:
    """Whether ONNX has an op of this name."""
    from onnx import defs

    return bool(defs.has(kind))


def _load(path: Path) -> Any:
    try:
        import onnx
    except ImportError:
        raise ConfigError(
            f"{path}: reading ONNX files needs the package onnx, which is not installed; "
            "install it with: pip install 'lbpar[onnx]'."
        ) from None
    try:
        model = onnx.load(path)
        if model.functions:
            from onnx import inliner

            model = inliner.inline_local_functions(model)
    except FileNotFoundError as error:
        raise GraphError(f"{path}: {error.strerror or error}; check the path.") from None
    except Exception as error:
        raise GraphError(f"{path}: not a readable ONNX file ({type(error).__name__}: {error}).") from error
    if not model.graph.output:
        raise GraphError(f"{path}: the file holds no network; expected an ONNX model with one input and one output.")
    return model


def _value(attribute: Any) -> Any:
    from onnx import helper

    value = helper.get_attribute_value(attribute) if attribute.type else None
    return value.decode() if isinstance(value, bytes) else value


@cache
def _defaults(kind: str, opset: int) -> dict[str, Any]:
    """The attributes that an op type has in any version of today, with the defaults of one."""
    from onnx import defs

    known: dict[str, Any] = {}
    for version in (*range(OLDEST_OPSET - 2, NEWEST_OPSET + 1), min(opset, NEWEST_OPSET)):
        with suppress(defs.SchemaError):  # the op is younger
            attributes = defs.get_schema(kind, version).attributes
            known |= {name: _value(a.default_value) for name, a in attributes.items()}
    return known


def _node(proto: Any, at: int) -> OnnxNode:
    kind = proto.op_type if proto.domain in ("", "ai.onnx") else f"{proto.domain}.{proto.op_type}"
    attributes = {a.name: _value(a) for a in proto.attribute}
    return OnnxNode(proto.name or f"#{at}", kind, tuple(proto.input), tuple(proto.output), attributes, proto)


def _in_order(nodes: Sequence[OnnxNode], input: str, output: str) -> tuple[OnnxNode, ...]:
    """What the output needs, first of all what needs no samples: so a bias is known even where its constant comes late."""
    wanted, kept, fed = {output}, [], {input}
    for node in reversed(nodes):
        if wanted.intersection(node.outputs):
            kept.append(node)
            wanted.update(node.inputs)
    kept.reverse()
    for node in kept:
        if fed.intersection(node.inputs):
            fed.update(node.outputs)
    return tuple(sorted(kept, key=lambda n: not fed.isdisjoint(n.outputs)))


def _names(values: Any) -> str:
    return "[" + ", ".join(v.name for v in values) + "]"
