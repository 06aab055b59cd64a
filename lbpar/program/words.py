"""Plans and what programs send, in words and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lbpar.layout.exchange import volume
from lbpar.layout.grid import Axes, Grid
from lbpar.program.plan import Plan
from lbpar.program.steps import Accumulate, Compute, Program, Start, Step, Sum, writes

WORDS = {"N": "samples", "C": "channels", "F": "filters", "D": "depth", "H": "height", "W": "width", "G": "groups"}


def layer_words(plan: Plan, node: str, op_grid: Mapping[str, Axes] | None = None) -> str:
    """A layer's op grid (or another one for it) in words, with its stage if there are several."""
    places = len(plan.places)
    words = grid_words(plan[node] if op_grid is None else op_grid, plan.grid, places)
    return f"stage {plan.pipeline.stages[node]}: {words}" if plan.pipeline is not None and places > 1 else words


def grid_words(op_grid: Mapping[str, Axes], grid: Grid, places: int = 1) -> str:
    """An op grid in words: ``samples 8 × height 2``; axes left idle, but for those of so many places of stages, are said to repeat the work."""
    ways = {loop: grid.ways(axes) for loop, axes in op_grid.items() if axes}
    text = " × ".join(f"{WORDS[loop]} {n}" for loop, n in sorted(ways.items(), key=_order)) or "not split"
    used = grid.ways(tuple(a for axes in op_grid.values() for a in axes))
    copies = grid.size // places // used
    return text if copies == 1 else f"{text}, {copies} copies"


def _order(item: tuple[str, int]) -> int:
    return list("NDHWGFC").index(item[0])


def micro_batch(step: Step) -> int | None:
    """The micro-batch of which a step computes something; None where it is of all."""
    match step:
        case Compute() | Sum():
            name = writes(step)[0]
        case Accumulate():
            name = step.grad
        case _:
            return None
    number = name.rpartition("#")[2]
    return int(number) if "#" in name and number.isdigit() else None


def tally(names: Iterable[str]) -> str:
    """``2× allreduce(4), halo(2)``: each name once, in order of appearance."""
    return ", ".join(f"{n}× {k}" if n > 1 else k for k, n in Counter(names).items())


def itemsize(program: Program, step: Start, dtype: np.dtype, activations: np.dtype | None = None) -> int:
    """Bytes per element of what a move carries: ``dtype`` of parameters and their gradients, and of ``activations`` unless given."""
    kind, name = program.buffers[step.src].dtype, step.src
    if kind not in (None, "opaque"):
        return np.dtype(kind).itemsize
    return (dtype if activations is None or of_parameters(name) else activations).itemsize


def of_parameters(buffer: str) -> bool:
    """Whether a buffer holds parameters or their gradients, which have another type than activations where that is a half type."""
    name = buffer.partition("@")[0].partition("#")[0]  # less its copy, and its micro-batch
    return ":" not in name or name.endswith(":grad")


def sent_bytes(program: Program, step: Start, rank: int, dtype: np.dtype, activations: np.dtype | None = None) -> int:
    """Bytes that a rank sends in a move; types as for `itemsize`."""
    return volume(step.move, rank).elements * itemsize(program, step, dtype, activations)


def program_rows(
    program: Program, rank: int, dtype: np.dtype, activations: np.dtype | None = None
) -> list[dict[str, Any]]:
    """One row per layer: name, op, grid, collectives with their group sizes, bytes that ``rank`` sends per step; types as for `itemsize`."""
    rows = []
    for node in program.graph.ops:
        moves = [s for s in program.moves if s.node == node.name and s.move.kind != "slice"]
        rows.append(
            {
                "layer": node.name,
                "op": node.op.kind,
                "grid": layer_words(program.plan, node.name),
                "collectives": tally(f"{s.move.kind}({program.plan.grid.ways(s.move.axes)})" for s in moves),
                "bytes/step": sum(sent_bytes(program, s, rank, dtype, activations) for s in moves),
            }
        )
    return rows
