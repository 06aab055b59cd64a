"""Choose for a whole network over which processes its norms merge their training statistics."""

from __future__ import annotations

from dataclasses import replace

from lbpar.config.layers import NormStats
from lbpar.errors import ConfigError
from lbpar.graph.graph import Graph, Node
from lbpar.graph.ops.norm import Norm


def norms(graph: Graph) -> tuple[Node, ...]:
    """The batch norms of a network, in its order."""
    return tuple(n for n in graph.ops if isinstance(n.op, Norm))


def with_norm_stats(graph: Graph, stats: NormStats | None) -> Graph:
    """The same network with the given statistics in every norm.

    Weights and running statistics keep their names and shapes, so checkpoints fit either network.

    Parameters
    ----------
    graph : Graph
        With or without its loss.
    stats : {"global", "sample", "local"} or None
        See `lbpar.graph.ops.norm.Norm`; None leaves every norm as it is.

    Raises
    ------
    ConfigError
        Statistics were chosen for a network without norms.
    """
    if stats is None:
        return graph
    if not norms(graph):
        raise ConfigError(f"parallel.norm: got {stats!r}, but {graph.name} has no norm; leave the field out.")
    nodes = (replace(n, op=replace(n.op, stats=stats)) if isinstance(n.op, Norm) else n for n in graph.nodes)
    return replace(graph, nodes=tuple(nodes))
