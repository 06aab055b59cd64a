"""Which activations to compute again where a number of segments is given."""

from __future__ import annotations

from math import prod

from lbpar.config.parallel import Recompute
from lbpar.graph.graph import Graph


def segments(graph: Graph, count: int) -> tuple[str, ...]:
    """Layers whose outputs are computed again, where all layers are cut into so many segments with outputs of equal size.

    Kept are outputs that another segment reads, and all of the last segment, whose backward pass comes at once. With L equal layers in N segments
    N + L / N arrays are held at a time, fewest where N is the square root of L [Chen et al. 2016].
    """
    shapes, layers = graph.shapes(1), [n.name for n in graph.ops if n is not graph.loss]
    sizes = [prod(shapes[name]) for name in layers]
    total, before, of = sum(sizes), 0, dict[str, int]()
    for name, size in zip(layers, sizes, strict=True):
        of[name] = min(count - 1, before * count // max(1, total))
        before += size
    kept = {x for n in graph.nodes for x in n.inputs if of.get(x) != of.get(n.name)}
    return tuple(name for name in layers if name not in kept and of[name] < count - 1)


def recomputed(asked: Recompute | None, graph: Graph) -> tuple[str, ...] | None:
    """The layers that a run file names itself or by a number of segments; None where it leaves them to the planner."""
    if asked is None or isinstance(asked, str):
        return None
    return segments(graph, asked) if isinstance(asked, int) else asked
