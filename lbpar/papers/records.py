"""A network's layers with weights as the papers' formulas need them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from lbpar.errors import Unsupported
from lbpar.graph.graph import Graph


@dataclass(frozen=True)
class LayerRecord:
    """A layer with weights. Shapes are (height, width, channels) of one sample; (1, 1, features) when fully connected.

    ``kernel`` is (k_h, k_w); ``weights`` counts parameters without biases, as the papers do.
    """

    name: str
    kind: Literal["conv", "fc"]
    in_shape: tuple[int, int, int]
    out_shape: tuple[int, int, int]
    kernel: tuple[int, int]
    weights: int

    @property
    def inputs(self) -> int:
        """Input activations of one sample, d_{i-1}."""
        return prod(self.in_shape)

    @property
    def outputs(self) -> int:
        """Output activations of one sample, d_i."""
        return prod(self.out_shape)


def layer_records(graph: Graph) -> tuple[LayerRecord, ...]:
    """Records of all convolutions and linear layers, for one sample.

    Raises
    ------
    Unsupported
        A layer with three spatial dimensions: the formulas know two.
    """
    shapes = graph.shapes(1)
    out = []
    for node in graph.ops:
        if not node.op.weighted:
            continue
        xs = graph.input_shapes(node.name, 1)
        weights = node.op.params(xs)["weight"].size
        x, y = xs[0][1:], shapes[node.name][1:]
        if len(x) == 1:
            out.append(LayerRecord(node.name, "fc", (1, 1, x[0]), (1, 1, y[0]), (1, 1), weights))
        elif len(x) == 3:
            kernel = node.op.kernel  # type: ignore[attr-defined]
            out.append(LayerRecord(node.name, "conv", x, y, kernel, weights))  # type: ignore[arg-type]
        else:
            raise Unsupported(
                f"{node.name}: the formulas of Gholami et al. know layers with two spatial dimensions; this one has {len(x) - 1} "
                f"({prod(x):,} inputs). Leave --cost out to plan this network."
            )
    return tuple(out)
