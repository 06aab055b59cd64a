"""The networks that the papers measure, as lbpar's own graphs: where a paper departs from the usual form, so does its network here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from lbpar.errors import ConfigError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph, Node
from lbpar.models.registry import build_model
from lbpar.solver.search import EdgeTable, Solution, minimise


def alexnet(
    filters: tuple[int, ...] = (96, 256, 384, 384, 256),
    *,
    groups: int = 1,
    classes: int = 1000,
    size: int = 227,
    pad: int = 0,
    ceil: bool = False,
) -> Graph:
    """AlexNet, of which every paper has another form.

    Parameters
    ----------
    filters : of the five convolutions.
    groups : of the second, fourth and fifth convolution: 2 in the original.
    classes : outputs.
    size : height and width of the images.
    pad : of the first convolution.
    ceil : round the sizes of pooled maps up.
    """
    g = GraphBuilder((size, size, 3), "alexnet")
    x = g.input
    for i, (f, kernel) in enumerate(zip(filters, (11, 5, 3, 3, 3), strict=True), 1):
        stride, around = (4, pad) if i == 1 else (1, kernel // 2)
        towers = groups if i in (2, 4, 5) else 1
        x = g.relu(g.conv(x, f, kernel, stride, around, groups=towers, name=f"conv{i}"))
        if i in (1, 2, 5):
            x = g.max_pool(x, 3, 2, ceil_mode=ceil, name=f"pool{i}")
    return _classified(g, x, classes)


def vgg16() -> Graph:
    """VGG-16 with its layers called conv<block>_<number>, pool<block>, fc6 to fc8."""
    g = GraphBuilder((224, 224, 3), "vgg16")
    x = g.input
    for block, (repeats, filters) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), 1):
        for i in range(1, repeats + 1):
            x = g.relu(g.conv(x, filters, 3, pad=1, name=f"conv{block}_{i}"))
        x = g.max_pool(x, 2, name=f"pool{block}")
    return _classified(g, x, 1000)


def _classified(g: GraphBuilder, x: str, classes: int) -> Graph:
    x = g.flatten(x)
    for name in ("fc6", "fc7"):
        x = g.relu(g.linear(x, 4096, name=name))
    return g.build(g.linear(x, classes, name="fc8"))


def inception_v3() -> Graph:
    """Inception-v3 whose last blocks join the halves of a factored convolution before they join their branches."""
    graph = build_model("inception_v3")
    nodes: list[Node] = []
    for node in graph.nodes:
        if len(node.inputs) == 6:
            single, a, b, c, d, pooled = node.inputs
            halves = [Node(f"{name}.concat", node.op, pair) for name, pair in ((a, (a, b)), (c, (c, d)))]
            nodes += halves
            node = replace(node, inputs=(single, *(h.name for h in halves), pooled))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def named(paper: str, networks: Mapping[str, Callable[[], Graph]], name: str) -> Graph:
    """A network of a paper's table; the error lists the others."""
    if name not in networks:
        raise ConfigError(f"{paper}: got model {name!r}; expected one of {', '.join(sorted(networks))}")
    return networks[name]()


def kept(graph: Graph, left_out: Collection[str]) -> Iterator[tuple[Node, list[str]]]:
    """The ops of a network without the kinds that a paper's model leaves out, each with the nodes that it then reads."""
    stands_for: dict[str, str] = {}
    for node in graph.nodes:
        inputs = [stands_for[i] for i in node.inputs]
        stands_for[node.name] = inputs[0] if node.op.kind in left_out else node.name
        if inputs and node.op.kind not in left_out:
            yield node, inputs


L = TypeVar("L")
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Costs:
    """What a search minimises: a vector (k,) for every layer and a matrix (k_u, k_v) for every edge, equal ones as one object."""

    nodes: dict[str, Floats]
    edges: Mapping[tuple[str, str], Floats | EdgeTable]

    def total(self, choice: Mapping[str, int]) -> float:
        """The sum for one configuration number per layer."""
        total = sum(float(cost[choice[n]]) for n, cost in self.nodes.items())
        for (a, b), cost in self.edges.items():
            i, j = choice[a], choice[b]
            total += float(cost.table[cost.rows[i], cost.columns[j]] if isinstance(cost, EdgeTable) else cost[i, j])
        return total

    def minimum(self) -> Solution:
        """The choice with the least total."""
        return minimise(self.nodes, self.edges)


@dataclass
class Layers(Generic[L]):
    """A network as a paper's model sees it: layers by name, in order, and edges (producer, consumer, number of the consumer's input)."""

    layers: dict[str, L] = field(default_factory=dict)
    edges: list[tuple[str, str, int]] = field(default_factory=list)

    def add(self, name: str, layer: L, inputs: Sequence[str]) -> None:
        """Append a layer; what it reads besides layers is the network's input."""
        self.edges += [(x, name, i) for i, x in enumerate(inputs) if x in self.layers]
        self.layers[name] = layer
