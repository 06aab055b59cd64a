"""Networks from ONNX files, exported from PyTorch and others: the graph and the initial weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lbpar.errors import GraphError
from lbpar.graph.graph import Graph
from lbpar.models import onnx_windows  # noqa: F401  registers its ops
from lbpar.models.onnx_file import Array, OnnxFile, OnnxNode, evaluate, is_onnx_op, read_onnx
from lbpar.models.onnx_ops import INSTEAD
from lbpar.models.onnx_state import HANDLERS, Import, first_dims, has_input, note
from lbpar.models.torch_names import feature_orders, from_torch
from lbpar.text import nearest

_NEVER_CONSTANT = (
    *("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"),
    *("If", "Loop", "Scan"),
)


def import_onnx(path: str | Path, input: Sequence[int] | None = None) -> tuple[Graph, dict[str, Array]]:
    """Read a network and its weights from an ONNX file.

    Parameters
    ----------
    path : str or Path
        The file, opset 9 or newer; external data lies beside it.
    input : sequence of int, optional
        Shape of one sample, channels last, where the file leaves it open.

    Returns
    -------
    graph : Graph
        Named after the file. Nodes have the names of the PyTorch modules where the file tells them.
    weights : dict of str to numpy.ndarray
        A C-contiguous array for each of ``graph.params()``, in our memory order: float32 or float64 as in the file
        (16-bit floats become float32), running statistics float64.

    Raises
    ------
    GraphError
        No such file, or a node that cannot be imported; the message names the file, the node, its op type, what is
        supported and what to use instead.
    ConfigError
        The package `onnx` is missing.

    Notes
    -----
    The batch of the file is ignored. A batch normalisation's ``momentum`` m becomes ``1 - m``. Matrices after a flatten
    have their columns permuted from channels-first to channels-last features. A Softmax at the end is dropped with a
    warning: the loss contains it. Layers whose weights are all the same constants of the file share them; where only
    some are, or a flatten permutes them, they become separate ones, with a warning.
    """
    file = read_onnx(path)
    sample, dims = _input(file, input)
    state = Import(file, sample, dims)
    for node in file.nodes:
        try:
            _visit(state, node)
        except GraphError as error:
            raise GraphError(f"{file.path}: {node}: {error}") from error.__cause__
    if file.output not in state.values:
        raise GraphError(f"{file.path}: the output '{file.output}' is not computed from the input '{file.input}'.")
    output = state.values[file.output]
    if output.pad is not None:
        raise GraphError(f"{file.path}: the network ends in a Pad, expected a layer after it.")
    graph = state.builder.build(output.name)
    try:
        if feature_orders(graph, state.flattened)[output.name] is not None:
            note(f"{file.path}: the output's features are in channels-last order, unlike the file's")
        return graph, from_torch(graph, {name: state.weights[name] for name in graph.params()}, (), state.flattened)
    except GraphError as error:
        raise GraphError(f"{file.path}: {error}") from None


def _visit(state: Import, node: OnnxNode) -> None:
    if not state.absorbed.isdisjoint(node.outputs):
        return
    if all(state.is_constant(i) for i in node.inputs if i) and node.kind not in _NEVER_CONSTANT:
        given = [state.array(i) if has_input(node, j) else None for j, i in enumerate(node.inputs)]
        names = [o for o in node.outputs if o]
        for name, array in zip(names, evaluate(node, given, state.file.opsets), strict=True):
            state.set_constant(name, array)
            if node.kind not in ("Constant", "Identity"):
                state.computed.add(name)
        return
    if node.kind not in HANDLERS:
        # The nearest name is what a misspelt op meant, but not what another op of ONNX does.
        near = "" if is_onnx_op(node.kind) else nearest(node.kind, list(HANDLERS)).rstrip()
        hint = f"use {INSTEAD[node.kind]}" if node.kind in INSTEAD else near or "change the network"
        raise GraphError(
            f"this op cannot be imported; supported are {', '.join(sorted(HANDLERS))}. Instead, {hint}, "
            'or write it as a Python function (model: {python: "file.py:function"}).'
        )
    for extra in node.outputs[1:]:
        if extra and (state.readers(extra) or extra == state.file.output):
            raise GraphError(f"its output '{extra}' is read, expected only the first output to be used.")
    missing = [i for i in node.inputs if i and i not in state.values and not state.is_constant(i)]
    if missing:
        raise GraphError(f"it reads '{missing[0]}', which no earlier node gives.")
    value = HANDLERS[node.kind](state, node.completed(state.file.opset))
    if value is not None:
        state.values[node.outputs[0]] = value


def _input(file: OnnxFile, given: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of a sample, channels last, and how the file's dimensions map to ours."""
    rank = len(file.input_shape)
    if not 2 <= rank <= 5:
        raise GraphError(
            f"{file.path}: the input '{file.input}' has {rank} dimensions, expected (N, C), (N, C, H, W) or (N, C, D, H, W)."
        )
    dims = first_dims(rank)
    readers = [n for n in file.nodes if file.input in n.inputs]
    to_first = [0, rank - 1, *range(1, rank - 1)]
    if rank > 2 and readers and all(n.kind == "Transpose" and n.attributes.get("perm") == to_first for n in readers):
        dims = tuple(range(rank))  # the file's samples are channels last, as ours
    sample: list[int | None] = [None] * (rank - 1)
    for theirs, ours in enumerate(dims):
        if ours:
            sample[ours - 1] = file.input_shape[theirs]
    if given is not None:
        if len(given) != len(sample) or any(s not in (None, g) for s, g in zip(sample, given, strict=True)):
            raise GraphError(
                f"{file.path}: input: got the sample shape {list(given)}, but the file says {_text(sample)} (channels last); "
                "give `input` only where the file leaves it open, or export for this shape."
            )
        sample = [int(g) for g in given]
    if None in sample:
        raise GraphError(
            f"{file.path}: the shape of a sample is {_text(sample)} (channels last), expected numbers; give `input`, "
            "as in model: {onnx: net.onnx, input: [224, 224, 3]}, or export with fixed sizes."
        )
    return tuple(e for e in sample if e is not None), dims


def _text(sample: Sequence[int | None]) -> str:
    return "[" + ", ".join("?" if e is None else str(e) for e in sample) + "]"
