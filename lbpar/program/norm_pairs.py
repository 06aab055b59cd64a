"""Batch norms whose statistics no other rank adds to, for engines that find these and what is made by them in one go.

    norm_statistics + norm_apply, norm_relu_forward or norm_add_relu_forward      norm_forward

Plans, prices and predictions know them as two kernels: which engine runs a program is no part of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from lbpar.program.steps import Compute, Free, Program, Step

FINDS = "norm_statistics"
MAKES = ("norm_apply", "norm_relu_forward", "norm_add_relu_forward")


def pair_norms(program: Program) -> Program:
    """A program of as many steps that computes the same.

    What is dropped and made a second time is left as it is: it should get the same bits both times.
    """
    steps = list(program.steps)
    made = Counter(s.reads[1] for s in steps if isinstance(s, Compute) and s.kernel.name in MAKES)
    finds: tuple[int, Compute] | None = None
    for i, step in enumerate(steps):
        if isinstance(step, Compute) and step.kernel.name == FINDS:
            finds = i, step
        elif finds is not None and not _frees_others(step, finds[1]):
            if isinstance(step, Compute) and step.kernel.name in MAKES and made[step.reads[1]] == 1:
                at, first = finds
                if step.reads[:2] == (first.reads[0], first.writes[1]):
                    steps[at], steps[i] = Free(()), _joined(first, step)
            finds = None
    return replace(program, steps=tuple(steps))


def _frees_others(step: Step, finds: Compute) -> bool:
    return isinstance(step, Free) and not set(step.buffers) & set(finds.writes)


def _joined(finds: Compute, makes: Compute) -> Compute:
    kernel = replace(
        makes.kernel,
        name="norm_forward",
        reads=(*finds.kernel.reads, *makes.kernel.reads[2:]),
        writes=(*finds.kernel.writes, *makes.kernel.writes),
        attrs=(
            *finds.kernel.attrs,
            ("relu", makes.kernel.name != "norm_apply"),
            ("added", makes.kernel.name == MAKES[2]),
        ),
        flops=finds.kernel.flops + makes.kernel.flops,
    )
    reads = (*finds.reads, *makes.reads[2:])
    return replace(makes, kernel=kernel, reads=reads, writes=(*finds.writes, *makes.writes))
