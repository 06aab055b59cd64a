"""Weights to and from PyTorch state dicts.

Names agree, orders do not: PyTorch stores convolution weights as (F, C, *K) and transposed ones as (C, F, *K), and
flattens channels first, where we keep channels last. So a weight that reads flattened features is permuted too; which
permutation follows from the graph. Networks of one's own work as well, if their nodes have the modules' names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.errors import GraphError
from lbpar.graph.graph import Graph, Node
from lbpar.graph.ops.norm import Norm
from lbpar.graph.ops.pointwise import Pointwise
from lbpar.graph.ops.shape import Concat, Flatten
from lbpar.graph.ops.weighted import Linear
from lbpar.text import nearest

Array = NDArray[Any]
_COUNTER = "num_batches_tracked"


def from_torch(graph: Graph, state_dict: Mapping[str, Any], ignore: Sequence[str] = ()) -> dict[str, Array]:
    """Parameters and running statistics of a graph from a PyTorch state dict.

    Parameters
    ----------
    graph : Graph
        The network; its nodes are named as the modules.
    state_dict : mapping of str to tensor or array
        What ``module.state_dict()`` returns, or the same as NumPy arrays.
    ignore : sequence of str
        Beginnings of names that the graph lacks and that are to be skipped, such as ``"AuxLogits."``.

    Returns
    -------
    dict of str to numpy.ndarray
        A C-contiguous copy for each of ``graph.params()``, in our memory order; weights keep their type, running
        statistics are float64.

    Raises
    ------
    GraphError
        A missing or unknown name, or a shape that does not fit.
    """
    params = graph.params()
    missing = [name for name in params if name not in state_dict]
    if missing:
        hint = nearest(missing[0], list(state_dict))
        raise GraphError(
            f"state dict: got no '{missing[0]}'{_more(missing)}, {hint}expected an entry for every parameter of "
            f"{graph.name}; name the nodes as the modules are."
        )
    skip = tuple(ignore)
    unknown = [n for n in state_dict if n not in params and not n.endswith(_COUNTER) and not n.startswith(skip)]
    if unknown:
        raise GraphError(
            f"state dict: got '{unknown[0]}'{_more(unknown)}, {nearest(unknown[0], list(params))}expected only "
            f"parameters of {graph.name}; list it in `ignore` if it is to be skipped."
        )
    orders = _feature_orders(graph)
    out = {}
    for name, param in params.items():
        node, array = _node(graph, name), _array(state_dict[name])
        theirs = _torch_shape(param.shape)
        if array.shape != theirs:
            raise GraphError(f"state dict: '{name}' has shape {array.shape}, expected {theirs}.")
        if array.ndim > 2:
            array = np.moveaxis(array, 1, -1)
        order = _order(orders, node, name)
        if order is not None:
            array = array[..., order]
        dtype = np.float64 if param.kind == "statistic" else array.dtype
        out[name] = np.array(array, dtype=dtype, order="C")
    return out


def to_torch(graph: Graph, params: Mapping[str, Array]) -> dict[str, Array]:
    """The state dict of the matching PyTorch module, as NumPy arrays.

    Parameters
    ----------
    graph : Graph
        The network.
    params : mapping of str to numpy.ndarray
        An entry for each of ``graph.params()``, in our memory order.

    Returns
    -------
    dict of str to numpy.ndarray
        C-contiguous copies in PyTorch's order; each norm also has ``num_batches_tracked`` (0). Load it with
        ``module.load_state_dict({k: torch.from_numpy(v) for k, v in ...})``.

    Raises
    ------
    GraphError
        A missing name, or a shape that does not fit.
    """
    orders = _feature_orders(graph)
    out = {}
    for name, param in graph.params().items():
        if name not in params:
            raise GraphError(f"params: got no '{name}', expected an entry for every parameter of {graph.name}.")
        node, array = _node(graph, name), np.asarray(params[name])
        if array.shape != param.shape:
            raise GraphError(f"params: '{name}' has shape {array.shape}, expected {param.shape}.")
        order = _order(orders, node, name)
        if order is not None:
            array = array[..., np.argsort(order)]
        if array.ndim > 2:
            array = np.moveaxis(array, -1, 1)
        out[name] = np.array(array, order="C")
        if name.endswith(".running_var"):
            out[f"{node.name}.{_COUNTER}"] = np.array(0, dtype=np.int64)
    return out


def _feature_orders(graph: Graph) -> dict[str, Array | None]:
    """Per node, ``order`` such that our feature j is PyTorch's feature ``order[j]``; None where they agree."""
    shapes = graph.shapes(1)
    orders: dict[str, Array | None] = {}
    for node in graph.nodes:
        ours = [orders[i] for i in node.inputs]
        order: Array | None = None
        if isinstance(node.op, Flatten):
            _, *spatial, c = shapes[node.inputs[0]]
            if not spatial:
                order = ours[0]
            elif c > 1 and prod(spatial) > 1:
                order = np.moveaxis(np.arange(c * prod(spatial)).reshape(c, *spatial), 0, -1).ravel()
        elif isinstance(node.op, Norm):
            order = ours[0]
        elif isinstance(node.op, Pointwise):
            if not all(_same(o, ours[0]) for o in ours[1:]):
                raise GraphError(f"{node.name}: its inputs are flattened from different shapes; no PyTorch order fits.")
            order = ours[0]
        elif isinstance(node.op, Concat) and any(o is not None for o in ours):
            widths = [shapes[i][-1] for i in node.inputs]
            parts, start = [], 0
            for o, width in zip(ours, widths, strict=True):
                parts.append(start + (np.arange(width) if o is None else o))
                start += width
            order = np.concatenate(parts)
        orders[node.name] = order
    return orders


def _order(orders: dict[str, Array | None], node: Node, name: str) -> Array | None:
    """Order of the last dimension of a parameter."""
    reads_features = isinstance(node.op, Norm) or (isinstance(node.op, Linear) and name == f"{node.name}.weight")
    return orders[node.inputs[0]] if reads_features else None


def _same(a: Array | None, b: Array | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def _node(graph: Graph, param: str) -> Node:
    return graph[param.rpartition(".")[0]]


def _torch_shape(shape: Sequence[int]) -> tuple[int, ...]:
    return (shape[0], shape[-1], *shape[1:-1]) if len(shape) > 2 else tuple(shape)


def _array(value: Any) -> Array:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        try:
            return np.asarray(value.numpy())
        except TypeError:  # bfloat16, which NumPy lacks
            return np.asarray(value.float().numpy())
    return np.asarray(value)


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
