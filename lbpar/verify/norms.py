"""What batch norms mean for a comparison with one rank."""

from __future__ import annotations

from collections.abc import Iterable

from lbpar.graph.graph import Graph
from lbpar.graph.norm_stats import norms
from lbpar.program.plan import Plan


def kept_apart(graph: Graph, plans: Iterable[Plan], batch: int) -> tuple[str, ...]:
    """Norms that under some plan normalise with the statistics of a part of what one rank normalises with.

    Those are the ones with ``stats: sample`` or ``local`` whose plan splits a loop over which these stay separate.
    """
    plans = tuple(plans)
    out = []
    for node in norms(graph):
        apart = node.op.varying(graph.input_shapes(node.name, batch))  # type: ignore[attr-defined]
        if any(plan.ways(node.name).get(loop, 1) > 1 for plan in plans for loop in apart):
            out.append(node.name)
    return tuple(out)
