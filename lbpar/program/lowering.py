"""Lower (graph, plan) to a program: derive every layout from the loop declarations, and every communication from `transition`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lbpar.graph.graph import Graph, Node
from lbpar.graph.loops import Kernel, Shape
from lbpar.graph.op import Input, Op
from lbpar.graph.ops.losses import Loss
from lbpar.layout.grid import Axes, Grid
from lbpar.layout.layout import Dim, Layout
from lbpar.layout.transition import Move, accumulate, transition
from lbpar.program.fuse import fuse
from lbpar.program.order import finish
from lbpar.program.pipeline import Gradients, pipelined
from lbpar.program.plan import Plan
from lbpar.program.recompute import recompute
from lbpar.program.rims import split_rims
from lbpar.program.steps import Accumulate, Buffer, Compute, Phase, Program, Start, Step, Sum, Update, Wait


def lower(
    graph: Graph,
    plan: Plan,
    batch: int,
    *,
    training: bool = True,
    input_grad: bool = False,
    keep: bool = False,
    overlap: bool = True,
    gradients: Gradients = "reduce",
    fused: bool = True,
    bucket_bytes: int = 0,
    rims: bool = False,
) -> Program:
    """Make the program of one step.

    Parameters
    ----------
    graph : Graph
        The network; with a loss for training.
    plan : Plan
        Checked against the graph; raises PlanError.
    batch : int
        Global number of samples; may be smaller than the number of sample blocks.
    training : bool
        Forward, backward and update; otherwise the forward pass with running statistics and no dropout.
    input_grad : bool
        Also compute the gradient of the network's input.
    keep : bool
        Keep every array to the end (to compare them), instead of freeing each after its last use.
    overlap : bool
        Start communication as early and wait for it as late as the data allow.
    gradients : {"reduce", "accumulate", "last"}
        For gradient accumulation over micro-batches: "accumulate" keeps every rank's own part and updates nothing, "last"
        adds the parts kept, sums them over the ranks once, and updates. "reduce" is a step of one micro-batch.
    fused : bool
        Fuse neighbouring kernels (`lbpar.program.fuse`).
    bucket_bytes : int
        Merge gradient allreduces over the same axes until so many bytes (of float32) are together; 0 merges none.
    rims : bool
        Compute the interior of convolutions while their halos are under way (`lbpar.program.rims`).
    """
    plan.check(graph, batch)

    def part(samples: int, gradients: Gradients, alone: bool = True) -> Program:
        program = Lowering(graph, plan, samples, training, gradients).run(input_grad, alone)
        program = recompute(fuse(program) if fused else program)
        return split_rims(program) if rims else program

    if plan.pipeline is not None and training and graph.loss is not None:
        program = pipelined(graph, plan, batch, gradients, part)
    else:
        program = part(batch, gradients)
    return finish(program, keep=keep, overlap=overlap, bucket_bytes=bucket_bytes)


@dataclass
class Copy:
    """One place where a value is held."""

    layout: Layout
    buffer: str


class Lowering:
    """Lowers (graph, plan) step by step; ``nodes`` are those to lower (all by default)."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        batch: int,
        training: bool = True,
        gradients: Gradients = "reduce",
        nodes: Sequence[Node] | None = None,
    ) -> None:
        self.graph, self.plan, self.batch, self.training, self.gradients = graph, plan, batch, training, gradients
        self.grid = plan.grid
        self.steps: list[Step] = []
        self.buffers: dict[str, Buffer] = {}
        self.feeds: dict[str, str] = {}
        self.params: dict[str, Layout] = {}
        self.results: dict[str, str] = {}
        self.copies: dict[str, list[Copy]] = {}  # value -> where it is held, the most reduced first
        self.grads: dict[str, str] = {}  # parameter -> buffer of its complete gradient
        self.uses: dict[str, list[Copy]] = {}  # shared parameter -> the gradients that layers have returned so far
        self.near: dict[str, list[str]] = {}  # shared parameter -> buffers of parts of its gradient, where it is
        self.far: dict[str, list[Copy]] = {}  # the same in stages that do not have it
        nodes = graph.ops if nodes is None else nodes
        self.xs: dict[str, tuple[Shape, ...]] = {n.name: graph.input_shapes(n.name, batch) for n in nodes}
        self.param_names = {n.name: _param_names(n.op, self.xs[n.name]) for n in nodes}
        self.phase: Phase = "forward"
        self.alone = True

    # Values and their copies.

    def value(self, node: Node, short: str) -> str:
        """Global name of a value that a kernel of ``node`` calls ``short``."""
        if short[0] == "x" and short[1:].isdigit():
            return f"{node.inputs[int(short[1:])]}:y"
        if short in self.param_names[node.name]:
            return f"{node.owner}.{short}"
        if short[0] == "d" and short[1:] in self.param_names[node.name]:
            return f"{node.owner}.{short[1:]}:grad"
        return f"{node.name}:{short}"

    def buffer(self, name: str, layout: Layout, dtype: str | None) -> str:
        unique, k = name, 1
        while unique in self.buffers:
            unique, k = f"{name}@{k}", k + 1
        self.buffers[unique] = Buffer(layout, dtype)
        return unique

    def materialise(self, value: str, layout: Layout, dtype: str | None = None) -> str:
        """A new buffer in which a value is held first."""
        name = self.buffer(value, layout, dtype)
        self.copies[value] = [Copy(layout, name)]
        return name

    def fetch(self, value: str, layout: Layout, node: Node, dtype: str | None = None) -> str:
        """The buffer that holds ``value`` in ``layout``, after whatever communication that takes."""
        held = self.copies.setdefault(value, [])
        for copy in held:
            if copy.layout == layout:
                return copy.buffer
        source = value.removesuffix(":y")
        if self.is_fed(source):
            name = self.buffer(value, layout, dtype)  # the reader delivers every layout, ghosts included
            self.feeds[name] = source
            held.append(Copy(layout, name))
            return name
        usable = [c for c in held if not c.layout.has_ghosts or c is held[0]]
        if any(c.layout.at == layout.at for c in usable):  # what has come to a stage need not come again
            usable = [c for c in usable if c.layout.at == layout.at]
        start, moves = min(((c, self.moves(c.layout, layout)) for c in usable), key=lambda option: _dearness(option[1]))
        name = start.buffer
        for move in moves:
            name = self.move(move, name, node)
            copy = Copy(move.dst, name)
            if move.kind in ("allreduce", "reduce_scatter"):
                held.insert(0, copy)  # whoever comes next starts from the summed value
            else:
                held.append(copy)
        return name

    def is_fed(self, value: str) -> bool:
        """Whether a value comes from outside in any layout."""
        return value in self.graph and isinstance(self.graph[value].op, Input)

    def moves(self, src: Layout, dst: Layout) -> tuple[Move, ...]:
        return transition(src, dst)

    def accumulated(self, ghosted: Layout) -> tuple[Move, ...]:
        return accumulate(ghosted)

    def move(self, move: Move, src: str, node: Node) -> str:
        base = src.split("@")[0]
        dst = self.buffer(base, move.dst, self.buffers[src].dtype)
        self.steps += [Start(move, src, dst, node.name, self.phase), Wait(dst, self.phase)]
        return dst

    # Kernels.

    def kernel(self, node: Node, kernel: Kernel, like: Node | None = None) -> dict[str, str]:
        """Emit one kernel and what it needs, on the grid of its node or of another; returns the buffers it writes, by short name."""
        here, there = self.layouts(like or node, kernel)
        read = [
            self.fetch(self.value(node, o.value), layout, node, o.dtype)
            for o, layout in zip(kernel.reads, here, strict=True)
        ]
        written = {}
        for o, layout in zip(kernel.writes, there, strict=True):
            value = self.value(node, o.value)
            in_place = value in self.params and value in self.copies
            written[o.value] = self.copies[value][0].buffer if in_place else self.materialise(value, layout, o.dtype)
            self.copies[value] = self.copies[value][:1]  # others have what was there before
        self.compute(Compute(node.name, kernel, tuple(read), tuple(written.values()), self.phase))
        return written

    def compute(self, step: Compute) -> None:
        self.steps.append(step)

    def layouts(self, node: Node, kernel: Kernel) -> tuple[Sequence[Layout], Sequence[Layout]]:
        """Layouts of what a kernel reads and of what it writes."""
        return _layouts(kernel, self.grid, tuple(self.plan[node.name].items()), self.plan.at(node.name))

    # Phases.

    def run(self, input_grad: bool = False, alone: bool = True) -> Program:
        """Lower all; ``alone``: it is no micro-batch, whose loss is added to others before the ranks learn it."""
        self.alone = alone
        self.forward()
        if self.training and self.graph.loss is not None:
            self.backward(input_grad)
            self.update()
        return self.program()

    def forward(self) -> None:
        for node in self.graph.ops:
            self.node_forward(node)
            if self.training and node.owner in self.graph.shared:  # the next layer with these begins from them
                self.node_update(node)
        if not self.alone:
            return
        for name in self.graph.outputs[
            : 1 if self.training else None
        ]:  # the others are asked for where there is no loss
            value, node = f"{name}:y", self.graph[name]
            if value in self.copies:
                home = self.copies[value][0].layout.complete
            else:  # the output is an input that no op reads
                home = Layout.replicated(self.grid, self.graph.shapes(self.batch)[name])
            self.results[self.graph.result(name)] = self.fetch(value, home, node)

    def node_forward(self, node: Node) -> None:
        xs = self.xs[node.name]
        kernels = forward_kernels(node.op, xs, self.training)
        for k in (*kernels, *_update(node.op, xs)):
            for o, layout in zip(k.reads, self.layouts(node, k)[0], strict=True):
                name = f"{node.owner}.{o.value}"
                if o.value in self.param_names[node.name] and name not in self.params:
                    self.params[name] = layout
                    self.materialise(name, self.params[name], o.dtype)
        for k in kernels:
            self.kernel(node, k)
        if isinstance(node.op, Loss):  # every rank knows them
            for short, result in node.op.results.items():
                value = f"{node.name}:{short}"
                if value in self.copies:
                    copy = self.copies[value][0]
                    layout = replace(copy.layout.complete, at=None) if self.alone else copy.layout
                    self.results[result] = self.fetch(value, layout, node, "float64")

    def backward(self, input_grad: bool) -> None:
        self.phase = "backward"
        parts: dict[str, list[Copy]] = {}
        wanted = wanted_gradients(self.graph, input_grad)
        for node in reversed(self.graph.ops):
            # Else there is nothing to train below it, or nothing that the loss reads.
            if wanted[node.name] and (node is self.graph.loss or node.name in parts):
                if node is not self.graph.loss:
                    self.gather_dy(node, parts.pop(node.name))
                self.node_backward(node, wanted[node.name], parts)
            if node.name in self.graph.shared:
                self.gather_shared(node)
        for node in self.graph.inputs:
            if node.name in parts:
                self.gather_dy(node, parts.pop(node.name))

    def node_backward(self, node: Node, wanted: frozenset[str], parts: dict[str, list[Copy]]) -> None:
        for k in backward_kernels(node.op, self.xs[node.name], wanted):
            for short, buffer in self.kernel(node, k).items():
                self._deliver(node, k, short, buffer, parts)

    def _deliver(self, node: Node, kernel: Kernel, short: str, buffer: str, parts: dict[str, list[Copy]]) -> None:
        """Send a written gradient on: to its producer's list, or to the sum over the ranks that share the parameter."""
        layout = self.buffers[buffer].layout
        if short.startswith("dx") and short[2:].isdigit():
            if kernel.push:
                for move in self.accumulated(layout):
                    buffer, layout = self.move(move, buffer, node), move.dst
            parts.setdefault(node.inputs[int(short[2:])], []).append(Copy(layout, buffer))
        elif short[1:] in self.param_names[node.name]:
            name = f"{node.owner}.{short[1:]}"
            if node.owner in self.graph.shared:
                self.uses.setdefault(name, []).append(Copy(layout, buffer))
                return
            if self.gradients != "reduce":
                self.steps.append(Accumulate(name, buffer, self.gradients == "last"))
            if self.gradients == "accumulate":
                return
            self.grads[name] = self.fetch(f"{name}:grad", self.params[name], node)

    def gather_shared(self, node: Node) -> None:
        """Add the gradients that layers with the parameters of ``node`` have returned: those of one layout before anything moves.

        What is in another stage comes at the end, once for all micro-batches.
        """
        for name in [n for n in self.uses if n.rpartition(".")[0] == node.name]:
            groups: dict[Layout, list[str]] = {}
            for part in self.uses.pop(name):
                groups.setdefault(part.layout, []).append(part.buffer)
            sums = []
            for i, (layout, buffers) in enumerate(groups.items()):
                sums.append(Copy(layout, self._sum(f"{name}:grad", buffers, layout)))
                if self.gradients != "reduce":
                    kept = f"{name}@{i}" if i else name
                    self.steps.append(Accumulate(kept, sums[-1].buffer, self.gradients == "last"))
            if self.gradients == "accumulate":
                continue
            home = self.params[name]
            self.far[name] = [c for c in sums if c.layout.at != home.at]
            self.near[name] = [self._home(name, c, node) for c in sums if c.layout.at == home.at]

    def _home(self, name: str, part: Copy, node: Node) -> str:
        """Bring a part of a shared parameter's gradient to where the parameter is."""
        self.copies[f"{name}:grad"] = [part]
        return self.fetch(f"{name}:grad", self.params[name], node)

    def gather_dy(self, node: Node, parts: Sequence[Copy]) -> None:
        """Add the gradients that a node's readers return, those still partial before they are summed over ranks."""
        value = f"{node.name}:dy"
        groups: dict[Layout, list[str]] = {}
        for p in parts:
            groups.setdefault(p.layout, []).append(p.buffer)
        home = next(iter(groups)).plain.complete if isinstance(node.op, Input) else self.grad_layout(node)
        arrived = []
        for layout, buffers in groups.items():
            name = self._sum(value, buffers, layout)
            for move in self.moves(layout, home):
                name = self.move(move, name, node)
            arrived.append(name)
        self.copies[value] = [Copy(home, self._sum(value, arrived, home))]

    def grad_layout(self, node: Node) -> Layout:
        """Where a node wants its dy: the layout in which it wrote y, complete."""
        for k in forward_kernels(node.op, self.xs[node.name], self.training):
            for o, layout in zip(k.writes, self.layouts(node, k)[1], strict=True):
                if o.value == "y":
                    return layout.complete
        raise AssertionError(f"{node.name} writes no y")

    def _sum(self, value: str, buffers: Sequence[str], layout: Layout) -> str:
        if len(buffers) == 1:
            return buffers[0]
        dst = self.buffer(value, layout, None)
        self.steps.append(Sum(tuple(buffers), dst, self.phase))
        return dst

    def node_update(self, node: Node) -> None:
        """Update running statistics, where the layer that they are named after has them."""
        for k in _update(node.op, self.xs[node.name]):
            self.kernel(node, k, self.graph[node.owner])

    def update(self) -> None:
        self.phase = "update"
        for node in self.graph.ops:
            if node.owner not in self.graph.shared:
                self.node_update(node)
        if self.gradients == "accumulate":
            return
        for name, near in self.near.items():
            come = [self._home(name, part, self.graph[name.rpartition(".")[0]]) for part in self.far[name]]
            self.grads[name] = self._sum(f"{name}:grad", [*near, *come], self.params[name])
            self.copies[f"{name}:grad"] = [Copy(self.params[name], self.grads[name])]
        names = tuple(n for n in self.params if n in self.grads)
        self.steps.append(Update(names, tuple(self.grads[n] for n in names)))

    def program(self) -> Program:
        return Program(
            self.graph,
            self.plan,
            self.batch,
            tuple(self.steps),
            self.buffers,
            self.feeds,
            self.params,
            self.results,
            {value: held[0].buffer for value, held in self.copies.items()},
        )


# Networks repeat their blocks, and plans their grids: what follows from an op and its shapes alone is made once.


@lru_cache(maxsize=1 << 12)
def _param_names(op: Op, xs: tuple[Shape, ...]) -> frozenset[str]:
    return frozenset(op.params(xs))


@lru_cache(maxsize=1 << 12)
def forward_kernels(op: Op, xs: tuple[Shape, ...], training: bool) -> tuple[Kernel, ...]:
    """`Op.forward`."""
    return op.forward(xs, training)


@lru_cache(maxsize=1 << 12)
def backward_kernels(op: Op, xs: tuple[Shape, ...], wanted: frozenset[str]) -> tuple[Kernel, ...]:
    """`Op.backward`."""
    return op.backward(xs, wanted)


@lru_cache(maxsize=1 << 12)
def _update(op: Op, xs: tuple[Shape, ...]) -> tuple[Kernel, ...]:
    return op.update(xs)


@lru_cache(maxsize=1 << 14)
def _layouts(
    kernel: Kernel, grid: Grid, op_grid: tuple[tuple[str, Axes], ...], at: Dim | None
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    ways = dict(op_grid)
    reads = tuple(Layout.of(o, kernel, grid, ways, at=at) for o in kernel.reads)
    return reads, tuple(Layout.of(o, kernel, grid, ways, written=True, at=at) for o in kernel.writes)


def wanted_gradients(graph: Graph, input_grad: bool = False) -> dict[str, frozenset[str]]:
    """Gradients that each node's backward pass makes: of its inputs (``dx0``), and ``dweight`` for all its parameters."""
    owners = {name.rpartition(".")[0] for name, p in graph.params().items() if p.kind != "statistic"}
    trained = {n.name for n in graph.ops if n.owner in owners}
    needs = {n.name for n in graph.inputs if input_grad} - {n.name for n in graph.targets}
    out: dict[str, frozenset[str]] = {}
    for node in graph.ops:
        wanted = {f"dx{i}" for i, x in enumerate(node.inputs) if x in needs and i not in node.op.no_grad}
        out[node.name] = frozenset(wanted | ({"dweight"} if node.name in trained else set()))
        if node.name in trained or needs & set(node.inputs):
            needs.add(node.name)
    return out


def _dearness(moves: Sequence[Move]) -> int:
    return sum(m.kind != "slice" for m in moves)
