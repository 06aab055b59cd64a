"""Memory of one rank, by liveness over the steps of a program.

The rank is the one with the largest blocks. Every array lives from the step that makes it to its `Free`; what a
collective packs and receives lives from its start to its wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lbpar.cost.kernel_time import item_bytes
from lbpar.cost.price import SLOTS, local_bytes
from lbpar.cost.traffic import traffic
from lbpar.program.steps import Accumulate, Free, Program, Start, StartMany, Step, Sum, Wait, writes


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    Parameters
    ----------
    weights : int
        Parameters and running statistics.
    optimizer : int
        State of the optimizer.
    gradients, activations, ghosts, buffers : int
        Alive when the sum of all is largest: gradients of parameters; values and their gradients; the part of them
        held twice because of ghosts; what collectives pack and receive.
    peak : int
        The largest sum.
    where : str
        The step at which it is reached.
    largest : mapping
        The largest arrays alive then, by name.
    """

    weights: int
    optimizer: int
    gradients: int
    activations: int
    ghosts: int
    buffers: int
    peak: int
    where: str
    largest: Mapping[str, int]

    def as_dict(self) -> dict[str, int | str]:
        """Plain numbers for reports."""
        names = ("weights", "gradients", "optimizer", "activations", "ghosts", "buffers", "peak")
        return {n: getattr(self, n) for n in names} | {"where": self.where}


def _place(step: Step) -> str:
    """What a step that is no kernel does, in words."""
    if isinstance(step, (Wait, Sum)):
        return f"{'the arrival' if isinstance(step, Wait) else 'the sum'} of {step.dst}"
    return f"the gradient of {step.param}" if isinstance(step, Accumulate) else "the update"


def memory(program: Program, dtype: str = "float32", optimizer: str = "momentum") -> Memory:
    """Peak memory of one rank.

    Parameters
    ----------
    program : Program
        As lowered, with its frees.
    dtype : str
        The network's type.
    optimizer : str
        A key of `lbpar.cost.price.SLOTS`.
    """
    sizes = {name: local_bytes(program, name, dtype) for name in program.buffers}
    weights = sum(sizes[p] for p in program.params)
    grads = {s for step in program.steps for s in getattr(step, "grads", ())}
    trained = [p for step in program.steps for p in getattr(step, "params", ())]
    state = SLOTS[optimizer] * sum(sizes[p] for p in trained)
    alive: dict[str, int] = {name: sizes[name] for name in program.feeds}
    busy: dict[str, int] = {}  # collectives under way
    best: tuple[int, str, dict[str, int], int] | None = None
    now, moving = sum(alive.values()), 0

    def look(where: str) -> None:
        nonlocal best
        if best is None or now + moving > best[0]:
            best = (now + moving, where, dict(alive), moving)

    for step in program.steps:
        if isinstance(step, Start):
            if step.move.kind != "slice":
                item = item_bytes(program.buffers[step.src].dtype, dtype)
                sent = traffic(step.move).busiest.elements * item
                buffer = sent if step.move.kind != "allreduce" else 0 if step.donate else sizes[step.src]
                busy[step.dst] = buffer
                moving += buffer
            look(f"{step.move.kind} into {step.dst}")
            continue
        if isinstance(step, StartMany):
            for (
                start
            ) in step.starts:  # gradients were written where they are sent from: the message takes over their memory
                busy[start.dst] = sizes[start.src]
                moving += sizes[start.src]
            continue
        if isinstance(step, Free):
            for name in step.buffers:
                now -= alive.pop(name, 0)
            continue
        for name in writes(step):
            if name not in alive and name not in program.params:
                alive[name] = sizes[name]
                now += sizes[name]
        label = getattr(step, "kernel", None)
        look(f"{getattr(step, 'node', '')} {label.name}" if label else _place(step))
        if isinstance(step, Wait):
            moving -= busy.pop(step.dst, 0)
    assert best is not None
    peak, where, held, buffers = best
    gradients = sum(v for k, v in held.items() if k in grads or ":grad" in k)
    ghosts = sum(v for k, v in held.items() if program.buffers[k].layout.has_ghosts)
    rest = peak - buffers - gradients - ghosts
    top = dict(sorted({**held, **{p: sizes[p] for p in program.params}}.items(), key=lambda kv: -kv[1])[:5])
    return Memory(weights, state, gradients, rest, ghosts, buffers, peak + weights + state, where, top)
