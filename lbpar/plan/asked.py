"""What a run file's ``parallel`` section asks of stages and layers, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lbpar.config.parallel import ParallelConfig
from lbpar.errors import PlanError
from lbpar.graph.graph import Graph
from lbpar.layout.grid import Axes, Grid
from lbpar.plan.assign import assign
from lbpar.program.plan import Plan
from lbpar.text import nearest

#: Micro-batches per stage where none are given: a fifth of the time or less is then idle.
MICRO_BATCHES = 4


def check_stages(parallel: ParallelConfig, batch: int, procs: int) -> tuple[int, int]:
    """Samples of a micro-batch, and places of stages; raises PlanError unless these fit the processes."""
    places = parallel.stages
    if procs % places:
        raise PlanError(
            f"parallel.stages: got {places}, which does not divide {procs} processes; take a multiple of {places}."
        )
    if parallel.interleave is not None and parallel.schedule != "interleaved":
        raise PlanError(
            f"parallel.interleave: got {parallel.interleave} with schedule {parallel.schedule}; only interleaved has several stages at a place."
        )
    if parallel.schedule == "delayed" and micro_batches(parallel) > 1:
        raise PlanError(
            f"parallel.micro_batches: got {parallel.micro_batches} with schedule delayed, in which whole batches follow each other; leave it out."
        )
    if parallel.micro_batches is not None and parallel.micro_batches > batch:
        raise PlanError(
            f"parallel.micro_batches: got {parallel.micro_batches} parts of {batch} samples, expected at most {batch}."
        )
    return -(-batch // min(batch, micro_batches(parallel))), places


def micro_batches(parallel: ParallelConfig) -> int:
    """Parts of a batch that a run file asks for."""
    apart = parallel.stages > 1 and parallel.schedule != "delayed"
    return parallel.micro_batches or (MICRO_BATCHES * parallel.stages if apart else 1)


def stages_each(parallel: ParallelConfig) -> int:
    """Stages at each place."""
    return (parallel.interleave or (2 if parallel.stages > 1 else 1)) if parallel.schedule == "interleaved" else 1


def check_layer(name: str, graph: Graph, where: str = "parallel.layers") -> None:
    """Raise PlanError, with the nearest name, if the graph has no op of this name."""
    names = [n.name for n in graph.ops]
    if name not in names:
        raise PlanError(
            f"{where}: {graph.name} has no layer {name!r}; {nearest(name, names)}its layers are {', '.join(names)}."
        )


def given_grids(
    layers: Mapping[str, Mapping[Any, int | Sequence[int]]], graph: Graph, batch: int, grid: Grid
) -> dict[str, dict[str, Axes]]:
    """The grids that a run file gives to single layers, checked."""
    out: dict[str, dict[str, Axes]] = {}
    for name, ways in layers.items():
        check_layer(name, graph)
        out[name] = assign(f"parallel.layers.{name}", ways, grid)
    Plan(grid, out).check(graph, batch)  # here, where loops of one way still show
    return out
