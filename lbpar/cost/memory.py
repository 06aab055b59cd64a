"""Memory of one rank, by liveness over the steps of a program.

The rank is the one with the largest blocks, of the stage that needs most. Every array lives from the step that makes it to its `Free`; what a
collective packs and receives lives from its start to its wait. The batch itself stays to the end, and further ones are read ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lbpar.cost.kernel_time import HALF_TYPES, taps
from lbpar.cost.moves import move_volumes
from lbpar.cost.price import SLOTS, item_of, local_bytes
from lbpar.cost.traffic import longest
from lbpar.pieces import SMALL, Pieces, piece_size
from lbpar.program.steps import (
    Accumulate,
    Compute,
    Free,
    Program,
    Start,
    StartMany,
    Step,
    Sum,
    Wait,
    takes_part,
    writes,
)

PREFETCH = 2
"""Batches read ahead: the default of ``data.prefetch``."""

LIBRARIES = 56 << 20
"""Bytes of compiled kernels, threads, the allocator's and Python's own objects, over what is there after the imports (measured: 40 to
56 MiB with the oneDNN engine)."""

MESSAGES = 4 << 20
"""Bytes that an MPI library takes for messages under way (Open MPI on one node)."""

SCRATCH = 56 << 20
"""Most bytes in which the oneDNN engine arranges operands of bfloat16 for its kernels, and widens those that these get wrong: up to three times
a layer's (measured)."""

VOLUMES = 1 << 28
"""Most bytes in which it copies the input of a volume's convolution, in float32, for the weight gradient, without AVX-512 (measured; with it, it
needs less): it computes larger ones slab by slab."""

Held = tuple[str, int]
"""An array, and the mini-batch that it belongs to."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    Parameters
    ----------
    weights : int
        Parameters and running statistics; with delayed gradients also the older parameters that mini-batches under way have used.
    optimizer : int
        State of the optimizer.
    gradients, activations, ghosts, buffers : int
        Alive when the sum of all is largest: gradients of parameters; values and their gradients; the part of them
        held twice because of ghosts; what collectives pack and receive.
    reading : int
        Batches read ahead, the one that is being read, and its values as they are stored.
    overhead : int
        Free pieces between arrays in the engine's arena, operands converted to a lower type, workspace, libraries.
    peak : int
        The largest sum.
    arrays : int
        The part of it that the engine's arrays take, free pieces between them included: all but ``reading`` and libraries.
    where : str
        The step at which it is reached.
    alive : mapping
        All arrays alive then, and the parameters, by name; the largest first.
    """

    weights: int
    optimizer: int
    gradients: int
    activations: int
    ghosts: int
    buffers: int
    reading: int
    overhead: int
    peak: int
    arrays: int
    where: str
    alive: Mapping[str, int]

    @property
    def largest(self) -> dict[str, int]:
        """The largest arrays at the peak."""
        return dict(list(self.alive.items())[:5])

    def as_dict(self) -> dict[str, int | str]:
        """Plain numbers for reports."""
        names = ("weights", "gradients", "optimizer", "activations", "ghosts", "buffers", "reading", "overhead", "peak")
        return {n: getattr(self, n) for n in names} | {"where": self.where}


def _place(step: Step) -> str:
    """What a step that is no kernel does, in words."""
    if isinstance(step, (Wait, Sum)):
        return f"{'the arrival' if isinstance(step, Wait) else 'the sum'} of {step.dst}"
    return f"the gradient of {step.param}" if isinstance(step, Accumulate) else "the update"


class _Arena:
    """The engine's arena, as it would grow: arrays by name."""

    def __init__(self) -> None:
        self._pieces = Pieces(1 << 62)
        self._taken: dict[Held, tuple[int, int]] = {}

    @property
    def used(self) -> int:
        return self._pieces.used

    def take(self, name: Held, nbytes: int) -> None:
        if nbytes >= SMALL:
            size = piece_size(nbytes)
            start = self._pieces.take(size)
            assert start is not None
            self._taken[name] = start, size

    def give(self, name: Held) -> None:
        if name in self._taken:
            self._pieces.give(*self._taken.pop(name))


def _converted(program: Program, dtype: str, halves: bool, copies: bool, workspace: int) -> int:
    """Bytes of what products convert: where activations are held in the type in which they multiply, the weights of one product, or a
    gradient of weights before it is widened; and, unless a ``workspace`` is given, the scratch memory of the oneDNN engine."""
    products = [s for s in program.steps if isinstance(s, Compute) and s.kernel.product is not None]
    if dtype in HALF_TYPES and halves:
        weights = max((local_bytes(program, p, dtype, halves) // 2 for p in program.params), default=0)
        read = (sum(local_bytes(program, b, dtype, halves) for b in s.reads) for s in products)
        return weights + (0 if workspace else min(3 * max(read, default=0), SCRATCH))
    if workspace or not copies:
        return 0
    volumes = [s for s in products if s.kernel.product == "backward_weights" and "D" in dict(s.kernel.loops)]
    return max((_arranged(program, s, dtype) for s in volumes), default=0)


def _arranged(program: Program, step: Compute, dtype: str) -> int:
    """Bytes in which the oneDNN engine arranges the input of a volume's convolution for the weight gradient: a copy of it, and one slice
    for each tap."""
    x = program.buffers[step.reads[0]].layout
    samples, depth = (longest(d, x.grid) for d in x.dims[:2])
    one = local_bytes(program, step.reads[0], dtype, False) // max(1, samples)
    return min(one, VOLUMES) + taps(step.kernel) * one // max(1, depth)


def memory(
    program: Program,
    dtype: str = "float32",
    optimizer: str = "momentum",
    prefetch: int = PREFETCH,
    halves: bool = True,
    copies: bool = True,
    workspace: int = 0,
) -> Memory:
    """Peak memory of one rank, of the stage that needs most.

    Parameters
    ----------
    program : Program
        As lowered, with its frees.
    dtype : str
        The network's type.
    optimizer : str
        A key of `lbpar.cost.price.SLOTS`.
    prefetch : int
        Batches read ahead (``data.prefetch``).
    halves, copies : bool
        Activations of half types take two bytes; weight gradients of volumes are computed from a copy of the input
        (``half_arrays`` and ``volume_copies`` of a machine).
    workspace : int
        Most bytes that a product takes beside its operands.
    """
    return max(memory_of_stages(program, dtype, optimizer, prefetch, halves, copies, workspace), key=lambda m: m.peak)


def memory_of_stages(
    program: Program,
    dtype: str = "float32",
    optimizer: str = "momentum",
    prefetch: int = PREFETCH,
    halves: bool = True,
    copies: bool = True,
    workspace: int = 0,
) -> list[Memory]:
    """`memory` of a rank at each place of stages; of one place, where there are none."""
    return [
        memory_of_rank(program, rank, dtype, optimizer, prefetch, halves, copies, workspace)
        for rank in program.plan.places
    ]


def memory_of_rank(
    program: Program,
    rank: int,
    dtype: str = "float32",
    optimizer: str = "momentum",
    prefetch: int = PREFETCH,
    halves: bool = True,
    copies: bool = True,
    workspace: int = 0,
) -> Memory:
    """`memory` of the largest blocks at a rank's place."""
    held_here = program.here(rank)
    sizes = {name: local_bytes(program, name, dtype, halves) if here else 0 for name, here in held_here.items()}
    grads = {s for step in program.steps for s in getattr(step, "grads", ())}
    trained = [p for step in program.steps for p in getattr(step, "params", ())]
    older = program.plan.age(rank)
    weights = sum(sizes[p] for p in program.params) + older * sum(sizes[p] for p in trained)
    state = SLOTS[optimizer] * sum(sizes[p] for p in trained)
    batch, many = sum(sizes[name] for name in program.feeds), len(program.rounds)
    alive: dict[Held, int] = {}
    busy: dict[Held, int] = {}  # collectives under way
    best: tuple[int, str, int] = (-1, "", 0)
    held: dict[Held, int] | None = None  # what is alive at the best
    now, moving = 0, 0
    arena = _Arena()
    busiest = move_volumes(program.plan.grid).busiest(s.move for s in program.steps if isinstance(s, Start))

    def look(where: str) -> None:
        nonlocal best, held
        if now + moving > best[0]:
            best, held = (now + moving, where, moving), None

    def keep() -> None:
        """Before anything goes."""
        nonlocal held
        if held is None:
            held = dict(alive)

    for of, i in program.in_rounds(
        2 * many - 1
    ):  # mini-batch; as many as it takes until one leaves for each that enters
        step = program.steps[i]
        if i == 0:
            alive |= {(name, of): sizes[name] for name in program.feeds}
            now += batch
        if i == len(program.steps) - 1 and many > 1:
            keep()
            now -= sum(alive.pop((name, of), 0) for name in program.feeds)
        if not takes_part(step, program, rank):
            continue
        if isinstance(step, Start):
            if not (held_here[step.src] or held_here[step.dst]):
                continue
            if step.move.kind != "slice":
                item = item_of(program, step.src, dtype, halves)
                sent = busiest[step.move].elements * item
                buffer = sent if step.move.kind != "allreduce" else 0 if step.donate else sizes[step.src]
                busy[(step.dst, of)] = buffer
                moving += buffer
                arena.take((f"{step.dst}:move", of), buffer)
            look(f"{step.move.kind} into {step.dst}")
            if not held_here[step.dst]:  # sent to another stage, which takes it soon
                moving -= busy.pop((step.dst, of), 0)
                arena.give((f"{step.dst}:move", of))
            continue
        if isinstance(step, StartMany):
            for (
                start
            ) in step.starts:  # gradients were written where they are sent from: the message takes over their memory
                busy[(start.dst, of)] = sizes[start.src]
                moving += sizes[start.src]
                arena.take((f"{start.dst}:move", of), sizes[start.src])
            continue
        if isinstance(step, Free):
            keep()
            for name in step.buffers:
                if name not in program.feeds:  # held in case the loss is not finite
                    now -= alive.pop((name, of), 0)
                    arena.give((name, of))
            continue
        for name in writes(step):
            if (name, of) not in alive and name not in program.params:
                alive[name, of] = sizes[name]
                now += sizes[name]
                arena.take((name, of), sizes[name])
        if isinstance(step, Accumulate):  # what micro-batches before the last one leave
            kept = f"{step.param}:grad sum", of
            if step.last:
                now -= alive.pop(kept, 0)
            elif kept not in alive:
                alive[kept] = sizes[step.grad]
                now += sizes[step.grad]
        label = getattr(step, "kernel", None)
        look(f"{getattr(step, 'node', '')} {label.name}" if label else _place(step))
        if isinstance(step, Wait):
            keep()
            moving -= busy.pop((step.dst, of), 0)
            arena.give((f"{step.dst}:move", of))
    keep()
    assert held is not None
    peak, where, buffers = best
    gradients = sum(v for (k, _), v in held.items() if k in grads or ":grad" in k)
    ghosts = sum(v for (k, _), v in held.items() if k in program.buffers and program.buffers[k].layout.has_ghosts)
    rest = peak - buffers - gradients - ghosts
    everything = {p: sizes[p] for p in program.params}
    for (name, _), size in held.items():
        everything[name] = everything.get(name, 0) + size
    everything = dict(sorted(everything.items(), key=lambda kv: -kv[1]))
    samples = {n.name for n in program.graph.samples}
    raw = sum(sizes[name] for name, source in program.feeds.items() if source in samples) // 2  # mostly stored narrower
    reading = (prefetch + 1) * batch + raw
    spread = program.plan.grid.size > 1
    between = max(0, arena.used + batch - peak)
    between += _converted(program, dtype, halves, copies, workspace) + workspace
    arrays, overhead = weights + state + peak + between, between + LIBRARIES + spread * MESSAGES
    total = peak + weights + state + reading + overhead
    return Memory(weights, state, gradients, rest, ghosts, buffers, reading, overhead, total, arrays, where, everything)
