"""What batch norms ask of a batch."""

from __future__ import annotations

from typing import cast

from lbpar.errors import ConfigError
from lbpar.graph.graph import Graph
from lbpar.graph.norm_stats import norms
from lbpar.graph.ops.norm import Norm
from lbpar.program.plan import Plan


def check_norms(graph: Graph, plan: Plan, samples: int, last: bool = False) -> None:
    """Refuse to train on a batch (``last``: the incomplete last one of an epoch) that leaves a norm one value per channel.

    Its variance would be 0: the norm would give its bias whatever comes in, and its running variance would fade away.
    """
    micros = min(plan.micro_batches, samples)
    for node in norms(graph):
        op, xs = cast(Norm, node.op), graph.input_shapes(node.name, samples // micros)
        if op.fewest(xs, plan.ways(node.name)) > 1:
            continue
        alone, where = op.fewest(xs, {}) == 1, "the last batch of an epoch" if last else "a batch"
        remedy = "Train with larger batches"
        if last:
            remedy = "Set data.drop_last: true, or choose a train.batch that leaves more over"
        elif not alone:
            remedy = f"Set parallel.norm: global, or split {node.name} over fewer processes"
        if micros > 1:
            where, remedy = (
                f"a part ({micros} micro-batches) of {where}",
                f"{remedy}, or set fewer parallel.micro_batches",
            )
        raise ConfigError(
            f"{node.name}: {where} of {samples} sample{'s' * (samples > 1)} gives {'it' if alone else 'some process'} one value per "
            f"channel to normalise, whose variance is 0; expected at least 2 values in training. {remedy}."
        )
