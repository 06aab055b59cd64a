"""Compute while a halo is under way: a convolution falls into the interior, which needs no ghosts, and the rims.

    start halo x -> x'                 start halo x -> x'
    wait x'                            conv_forward_interior x, w -> y
    conv_forward x', w -> y            wait x'
                                       conv_forward_rims x', w, y -> y

Both write parts of one array. Ranks whose block has no interior compute all of it in the second step.
"""

from __future__ import annotations

from dataclasses import replace

from lbpar.layout.interior import interior_share
from lbpar.program.steps import Compute, Program, Start, Step

KERNELS = frozenset(
    {
        "conv_forward",
        "conv_relu_forward",
        "conv_backward_data",
        "conv_transpose_forward",
        "conv_transpose_backward_data",
    }
)
"""Kernels that engines can compute in parts; they read through the window what comes first among their operands."""


def split_rims(program: Program) -> Program:
    """Split convolutions that wait for a halo; call it before steps are ordered. The same on all ranks."""
    halos = {s.dst: s for s in program.moves if s.move.kind == "halo"}
    steps: list[Step] = []
    for step in program.steps:
        # Who else reads the same ghosts comes behind, when they are there.
        start = halos.pop(step.reads[0], None) if isinstance(step, Compute) else None
        if isinstance(step, Compute) and start is not None and step.kernel.name in KERNELS:
            steps += _parts(step, start) if interior_share(start.move) else [step]
        else:
            steps.append(step)
    return replace(program, steps=tuple(steps))


def _parts(step: Compute, start: Start) -> list[Step]:
    kernel, attrs = step.kernel, (*step.kernel.attrs, ("halo", start.move))
    inner = replace(kernel, name=f"{kernel.name}_interior", attrs=attrs)
    rims = replace(kernel, name=f"{kernel.name}_rims", attrs=attrs, reads=(*kernel.reads, *kernel.writes))
    return [
        replace(step, kernel=inner, reads=(start.src, *step.reads[1:])),
        replace(step, kernel=rims, reads=(*step.reads, *step.writes)),
    ]
