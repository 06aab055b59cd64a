"""What a plan does, layer by layer, as rows of a table."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from lbpar.layout.exchange import volume
from lbpar.plan.words import grid_words
from lbpar.program.steps import Program, Start


def itemsize(program: Program, step: Start, dtype: np.dtype) -> int:
    """Bytes per element of what a move carries."""
    kind = program.buffers[step.src].dtype
    return np.dtype(kind).itemsize if kind not in (None, "opaque") else dtype.itemsize


def sent_bytes(program: Program, step: Start, rank: int, dtype: np.dtype) -> int:
    """Bytes that a rank sends in a move."""
    return volume(step.move, rank).elements * itemsize(program, step, dtype)


def program_rows(program: Program, rank: int, dtype: np.dtype) -> list[dict[str, Any]]:
    """One row per layer: name, op, grid, collectives with their group sizes, bytes that ``rank`` sends per step."""
    rows = []
    for node in program.graph.ops:
        kinds: Counter[str] = Counter()
        total = 0
        for step in program.moves:
            if step.node == node.name and step.move.kind != "slice":
                kinds[f"{step.move.kind}({program.plan.grid.ways(step.move.axes)})"] += 1
                total += sent_bytes(program, step, rank, dtype)
        names = ", ".join(f"{n}× {k}" if n > 1 else k for k, n in kinds.items())
        rows.append(
            {
                "layer": node.name,
                "op": node.op.kind,
                "grid": grid_words(program.plan[node.name], program.plan.grid),
                "collectives": names,
                "bytes/step": total,
            }
        )
    return rows
