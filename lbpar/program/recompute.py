"""Activations that are dropped after the forward pass and computed again where the backward pass needs them (activation checkpointing).

    forward     conv x, w -> y     norm_relu y -> z     conv z, v -> u              conv x, w -> y     norm_relu y -> z     conv z, v -> u
    backward    ... du, z -> dv, dz      ... dz, y, z -> dy                         norm_relu y -> z@again      ... du, z@again -> dv, dz      ...

The forward steps that make an output of a layer in ``Plan.recompute``, its moves between ranks included, stand once more in the backward part and
write arrays of their own, each in front of the first step that reads it or that computes another from it. Everything else is kept: outputs
of other layers, and what kernels make besides outputs, so that statistics are summed over ranks once. What the steps cost and how long arrays
live follows from the steps, as always. [Chen et al. 2016]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lbpar.program.steps import Buffer, Compute, Program, Start, Step, Wait, reads, renamed, writes

#: A connection that skips more layers than so many is long. What is computed again for its early reader alone is not held until the backward pass
#: comes by itself, if that is as far, but computed once more then.
LONG = 8
#: What the name of an array that is computed again has behind that of the first.
AGAIN = "@again"


def is_again(buffer: str) -> bool:
    """Whether an array is computed again."""
    return AGAIN in buffer


def recompute(program: Program) -> Program:
    """Emit the steps once more that make what ``plan.recompute`` drops; call it on fused steps, before they are ordered."""
    if not program.plan.recompute or not any(getattr(s, "phase", None) == "backward" for s in program.steps):
        return program
    return _Recomputation(program).run()


class _Recomputation:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.layers = _inside_stages(program)
        self.forward = [s for s in program.steps if getattr(s, "phase", None) == "forward"]
        self.maker = {b: i for i, s in enumerate(self.forward) for b in writes(s)}
        self.start = {s.dst: s for s in self.forward if isinstance(s, Start)}
        later = (s for s in program.steps if getattr(s, "phase", None) != "forward")
        self.held = {b for s in later for b in reads(s)} | set(program.results.values())
        self.dropped = self._dropped()
        self.place = {n.name: i for i, n in enumerate(program.graph.ops)}
        self.names: dict[str, str] = {}  # of what was computed again
        self.buffers: dict[str, Buffer] = dict(program.buffers)

    def run(self) -> Program:
        out: list[Step] = []
        for at, step in enumerate(self.program.steps):
            if getattr(step, "phase", None) != "backward" or not any(b in self.dropped for b in reads(step)):
                out.append(step)
                continue
            missing = [self.forward[i] for i in self._missing(reads(step))]
            for s in missing:
                out += self._again(s)
            out.append(renamed(step, self.names))
            self._let_go(missing, at)
        return replace(self.program, steps=tuple(out), buffers=self.buffers)

    def _dropped(self) -> set[str]:
        """Arrays that are not kept: all that the kernel of a layer's output writes, and its copies in other layouts."""
        out: set[str] = set()
        for step in self.forward:
            made = [b for b in writes(step) if layer_of(b) in self.layers]
            if not made or set(writes(step)) & set(self.program.results.values()):
                continue
            if isinstance(step, Wait):  # what another stage has sent stays
                move = self.start[step.dst].move
                made = made if move.src.at == move.dst.at else []
            out |= set(writes(step)) if made else set()
        return out

    def _missing(self, wanted: tuple[str, ...]) -> list[int]:
        """Numbers of the forward steps to do again, in order, until these arrays are there."""
        open_, found = list(wanted), set[int]()
        while open_:
            b = open_.pop()
            if b in self.names or not self._made_again(b) or self.maker[b] in found:
                continue
            i = self.maker[b]
            found.add(i)
            open_ += self._sources(self.forward[i])
        return sorted(found)

    def _made_again(self, b: str) -> bool:
        """Whether to compute an array again: it was dropped, or is a copy in another layout of what is there."""
        if b in self.dropped:
            return True
        if b in self.held or b not in self.start:
            return False
        start = self.start[b]
        return start.move.src.at == start.move.dst.at and (start.src in self.held or start.src in self.dropped)

    def _let_go(self, made: Sequence[Step], at: int) -> None:
        """Forget what was made in front of a step for long connections alone."""
        keepers: dict[str, list[str | None]] = {}  # array -> layers of those of its readers that stay
        for step in reversed(made):
            layer = step.node if isinstance(step, Compute) else None
            stays = False
            for b in writes(step):
                near = any(self._distance(layer, k) <= LONG for k in keepers.get(b, ()))
                if near or not self._is_far(b, at):
                    stays = True
                else:
                    self.names.pop(b)
            for b in self._sources(step) if stays else ():
                keepers.setdefault(b, []).append(layer)

    def _distance(self, first: str | None, last: str | None) -> int:
        """Layers between two; none where one of them only moves."""
        return self.place[last] - self.place[first] if first is not None and last is not None else 0

    def _is_far(self, b: str, at: int) -> bool:
        """Whether no step of the next `LONG` layers of the backward pass reads an array."""
        layers: set[str] = set()
        for step in self.program.steps[at:]:
            if b in reads(step):
                return len(layers) > LONG
            layers |= {step.node} if isinstance(step, Compute) else set()
        return True

    def _sources(self, step: Step) -> tuple[str, ...]:
        return (self.start[step.dst].src,) if isinstance(step, Wait) else reads(step)

    def _again(self, step: Step) -> list[Step]:
        names = {b: self._fresh(b) for b in writes(step)}
        if isinstance(step, Wait):
            start = replace(self.start[step.dst], dst=names[step.dst], phase="backward")
            out = [renamed(start, self.names), Wait(start.dst, "backward")]
        else:
            assert isinstance(step, Compute)
            new = replace(step, writes=tuple(names.values()), phase="backward")
            out = [renamed(new, self.names)]
        self.names |= names
        return out

    def _fresh(self, buffer: str) -> str:
        base, _, copy = buffer.partition("@")
        name = first = f"{base}{AGAIN}{copy}"
        while name in self.buffers:
            name = f"{first}.{len(self.buffers)}"
        self.buffers[name] = self.program.buffers[buffer]
        return name


def layer_of(buffer: str) -> str | None:
    """The layer of whose output a buffer is a copy."""
    layer, _, value = buffer.partition("@")[0].rpartition(":")
    return layer if value == "y" else None


def _inside_stages(program: Program) -> frozenset[str]:
    """Layers of ``plan.recompute`` whose readers are all in their stage: a stage computes again what it alone needs."""
    pipeline = program.plan.pipeline
    if pipeline is None:
        return frozenset(program.plan.recompute)
    of = pipeline.stages
    needed = ((s.node, b) for s in program.steps if isinstance(s, (Compute, Start)) for b in reads(s))
    crossing = {x for node, b in needed if (x := layer_of(b)) is not None and of.get(node) != of.get(x)}
    return frozenset(program.plan.recompute) - crossing
