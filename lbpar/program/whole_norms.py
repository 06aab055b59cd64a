"""Norms whose statistics no other rank adds to, for engines that find these and what is made by them in one go.

    norm_statistics + norm_apply, norm_relu_forward or norm_add_relu_forward      norm_forward
    sample_norm_sums + sample_norm_moments + sample_norm_apply                    sample_norm_forward

Plans, prices and predictions know them as several kernels: which engine runs a program is no part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from lbpar.program.steps import Compute, Free, Program

FOLLOWS = {
    "norm_apply": ("norm_statistics",),
    "norm_relu_forward": ("norm_statistics",),
    "norm_add_relu_forward": ("norm_statistics",),
    "sample_norm_apply": ("sample_norm_sums", "sample_norm_moments"),
}
"""What makes something by statistics, and the kernels before it that find them."""


def whole_norms(program: Program) -> Program:
    """A program of as many steps that computes the same.

    What is dropped and made a second time is left as it is: it should get the same bits both times.
    """
    steps, others = list(program.steps), list[int]()
    made = Counter(s.reads[1] for s in steps if isinstance(s, Compute) and s.kernel.name in FOLLOWS)
    for i, step in enumerate(steps):
        if isinstance(step, Compute) and step.kernel.name in FOLLOWS and made[step.reads[1]] == 1:
            places = others[-len(FOLLOWS[step.kernel.name]) :]
            finds = [s for s in (steps[at] for at in places) if isinstance(s, Compute)]
            if tuple(s.kernel.name for s in finds) == FOLLOWS[step.kernel.name] and _belong(finds, step):
                for at in places:
                    steps[at] = Free(())
                steps[i] = _joined(finds, step)
        if not isinstance(step, Free):
            others.append(i)
    return replace(program, steps=tuple(steps))


def _belong(finds: Sequence[Compute], makes: Compute) -> bool:
    """Whether a step reads what was just found of what it reads."""
    handed_on = all(a.writes[0] == b.reads[0] for a, b in pairwise(finds))
    return handed_on and makes.reads[:2] == (finds[0].reads[0], finds[-1].writes[-1])


def _joined(finds: Sequence[Compute], makes: Compute) -> Compute:
    first, last, kernel = finds[0], finds[-1], makes.kernel
    name = kernel.name
    attrs = dict(a for step in (*finds, makes) for a in step.kernel.attrs)
    attrs |= {"relu": name.endswith("relu_forward"), "added": "_add_" in name}
    kernel = replace(
        kernel,
        name="sample_norm_forward" if name.startswith("sample") else "norm_forward",
        reads=(*first.kernel.reads, *kernel.reads[2:]),
        writes=(*last.kernel.writes, *kernel.writes),
        attrs=tuple(attrs.items()),
        flops=sum(step.kernel.flops for step in (*finds, makes)),
    )
    return replace(makes, kernel=kernel, reads=(*first.reads, *makes.reads[2:]), writes=(*last.writes, *makes.writes))
