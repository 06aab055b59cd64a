"""Weights to and from PyTorch state dicts.

Names agree, orders do not: PyTorch stores convolution weights as (F, C, *K) and transposed ones as (C, F, *K), and
flattens channels first, where we keep channels last. So a weight that reads flattened features is permuted too; which
permutation follows from the graph. Your own networks work as well, if their nodes have the modules' names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.errors import GraphError
from lbpar.graph.graph import Graph, Node
from lbpar.graph.loops import Param, Shape
from lbpar.graph.ops.channels import ChannelShuffle, LocalResponseNorm, Softmax
from lbpar.graph.ops.norm import Norm
from lbpar.graph.ops.pointwise import Pointwise, PRelu
from lbpar.graph.ops.sample_norm import GroupNorm, LayerNorm
from lbpar.graph.ops.shape import Concat, Flatten
from lbpar.graph.ops.weighted import Linear
from lbpar.text import nearest

Array = NDArray[Any]
Orders = Mapping[str, Array | None]
"""Per node an ``order`` such that our feature j is feature ``order[j]`` of theirs; None where they agree."""
_COUNTER = "num_batches_tracked"


def from_torch(
    graph: Graph, state_dict: Mapping[str, Any], ignore: Sequence[str] = (), flattened: Orders | None = None
) -> dict[str, Array]:
    """Parameters and running statistics of a graph from a PyTorch state dict.

    Parameters
    ----------
    graph : Graph
        The network; its nodes are named as the modules.
    state_dict : mapping of str to tensor or array
        What ``module.state_dict()`` returns, or the same as NumPy arrays.
    ignore : sequence of str
        Beginnings of names that the graph lacks and that are to be skipped, such as ``"AuxLogits."``.
    flattened : mapping of str to array or None, optional
        Order of the features of a flatten node: ours is theirs[order]. Default: channels first.

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
    skip, again = tuple(ignore), dict[str, str]()
    for owner, users in graph.shared.items():  # a module that has two names is listed under both
        names = [n.rpartition(".")[2] for n in params if n.rpartition(".")[0] == owner]
        again |= {f"{u.name}.{n}": f"{owner}.{n}" for u in users for n in names}
    for name, first in again.items():
        if name in state_dict and not np.array_equal(_array(state_dict[name]), _array(state_dict[first])):
            raise GraphError(f"state dict: '{name}' differs from '{first}', but these layers share their parameters.")
    known = {*params, *again}
    unknown = [n for n in state_dict if n not in known and not n.endswith(_COUNTER) and not n.startswith(skip)]
    if unknown:
        raise GraphError(
            f"state dict: got '{unknown[0]}'{_more(unknown)}, {nearest(unknown[0], list(params))}expected only "
            f"parameters of {graph.name}; list it in `ignore` if it is to be skipped."
        )
    out = {}
    for name, param, order in _params(graph, flattened):
        array, theirs = _array(state_dict[name]), _torch_shape(param.shape)
        if array.shape != theirs:
            raise GraphError(f"state dict: '{name}' has shape {array.shape}, expected {theirs}.")
        if array.ndim > 2:
            array = np.moveaxis(array, 1, -1)
        if order is not None:
            array = array[..., order]
        out[name] = np.array(array, dtype=np.float64 if param.kind == "statistic" else None, order="C")
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
    out = {}
    for name, param, order in _params(graph):
        if name not in params:
            raise GraphError(f"params: got no '{name}', expected an entry for every parameter of {graph.name}.")
        array = np.asarray(params[name])
        if array.shape != param.shape:
            raise GraphError(f"params: '{name}' has shape {array.shape}, expected {param.shape}.")
        if order is not None:
            array = array[..., np.argsort(order)]
        if array.ndim > 2:
            array = np.moveaxis(array, -1, 1)
        out[name] = np.array(array, order="C")
        if name.endswith(".running_var"):
            out[name.replace("running_var", _COUNTER)] = np.array(0, dtype=np.int64)
    return out


def feature_orders(graph: Graph, flattened: Orders | None = None) -> dict[str, Array | None]:
    """The order of every node's features, from those of its flatten nodes (default: channels first).

    Raises
    ------
    GraphError
        Features of different orders meet, or an op depends on the order.
    """
    shapes = graph.shapes(1)
    orders: dict[str, Array | None] = {}
    for node in graph.nodes:
        ours = [orders[i] for i in node.inputs]
        match node.op:
            case Flatten() if len(shapes[node.inputs[0]]) > 2:
                own = _channels_first(shapes[node.inputs[0]]) if flattened is None else flattened[node.name]
                orders[node.name] = own
            case Flatten() | Norm() | LayerNorm() | Softmax():
                orders[node.name] = ours[0]
            case Pointwise():
                if not all(_same(o, ours[0]) for o in ours[1:]):
                    raise GraphError(
                        f"{node.name}: its inputs are flattened from different shapes, so that their features are in different orders."
                    )
                orders[node.name] = ours[0]
            case Concat() if any(o is not None for o in ours):
                orders[node.name] = _joined(ours, [shapes[i][-1] for i in node.inputs])
            case LocalResponseNorm() | ChannelShuffle() | GroupNorm() if ours[0] is not None:
                raise GraphError(f"{node.name}: its input is flattened, expected the channels of an image.")
            case _:
                orders[node.name] = None
    return orders


def _channels_first(shape: Shape) -> Array | None:
    _, *spatial, c = shape
    if c == 1 or prod(spatial) == 1:
        return None
    return np.moveaxis(np.arange(c * prod(spatial)).reshape(c, *spatial), 0, -1).ravel()


def _joined(orders: Sequence[Array | None], widths: Sequence[int]) -> Array:
    starts = np.cumsum([0, *widths[:-1]])
    parts = zip(starts, orders, widths, strict=True)
    return np.concatenate([start + (np.arange(width) if order is None else order) for start, order, width in parts])


def _same(a: Array | None, b: Array | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def _params(graph: Graph, flattened: Orders | None = None) -> Iterator[tuple[str, Param, Array | None]]:
    """Every parameter, and the order of its last dimension if it goes over features."""
    orders = feature_orders(graph, flattened)
    for name, param in graph.params().items():
        node: Node = graph[name.rpartition(".")[0]]
        order, *others = (_order(n, name, orders) for n in graph.shared.get(node.name, (node,)))
        if not all(_same(o, order) for o in others):
            raise GraphError(
                f"{node.name}: it shares its parameters with a layer that reads flattened features in another order."
            )
        yield name, param, order


def _order(node: Node, name: str, orders: Orders) -> Array | None:
    """Of the last dimension of a node's parameter."""
    reads_features = (
        isinstance(node.op, Norm | LayerNorm)
        or (isinstance(node.op, Linear) and name.endswith(".weight"))
        or (isinstance(node.op, PRelu) and node.op.per_channel)
    )
    return orders[node.inputs[0]] if reads_features else None


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
