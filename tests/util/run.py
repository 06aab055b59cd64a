"""Run a graph under a plan on virtual ranks and compare every value with another run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.graph.graph import Graph
from lbpar.graph.ops.norm import Norm
from lbpar.graph.ops.sample_norm import SampleNorm
from lbpar.layout.grid import Grid
from lbpar.layout.layout import Layout
from lbpar.layout.runs import Box, indices
from lbpar.program.lowering import lower
from lbpar.program.plan import SCHEDULES, Pipeline, Plan
from lbpar.program.steps import Buffer, Program
from lbpar.runtime.executor import Executor, run_lockstep
from lbpar.runtime.initial import initial_state
from lbpar.transport.virtual import VirtualWorld

Arrays = Mapping[str, np.ndarray]


def place(box: Box) -> tuple[np.ndarray, ...]:
    """Index of a box in the global array."""
    return np.ix_(*(indices(runs) for runs in box)) if box else ()


def cut(box: Box, array: np.ndarray) -> np.ndarray:
    """The part of a global array that a box holds."""
    return np.ascontiguousarray(array[place(box)]).reshape([sum(hi - lo for lo, hi in runs) for runs in box])


def join(layout: Layout, blocks: Sequence[np.ndarray]) -> np.ndarray:
    """The global array of the blocks of all ranks: partial values are combined, replicas must be equal."""
    out: np.ndarray | None = None
    for corner in {
        tuple(c if a in layout.partial else 0 for a, c in enumerate(_coords(layout, r))) for r in _all(layout)
    }:
        part = np.full(layout.shape, np.nan)
        for r in _all(layout):
            coords = _coords(layout, r)
            if any(coords[a] != corner[a] for a in layout.partial):
                continue
            if not layout.holds(r):
                assert not blocks[r].size
                continue
            where, block = place(layout.box(r)), blocks[r]
            assert block.shape == layout.local_shape(r), (layout, r, block.shape)
            seen = part[where].reshape(block.shape)
            known = ~np.isnan(seen)
            np.testing.assert_allclose(block[known], seen[known], rtol=1e-12, err_msg=f"replicas differ: {layout}")
            part[where] = block.reshape(part[where].shape)
        out = part if out is None else out + part if layout.reduce == "sum" else np.maximum(out, part)
    assert out is not None
    return out


def _all(layout: Layout) -> range:
    return range(layout.grid.size)


def _coords(layout: Layout, rank: int) -> tuple[int, ...]:
    return layout.grid.coords(rank)


@dataclass
class Run:
    """What a program left behind on all its ranks."""

    program: Program
    executors: list[Executor]
    results: list[dict[str, Any]]
    world: VirtualWorld
    varying: frozenset[str]

    def value(self, name: str) -> np.ndarray:
        """Global array of a value."""
        return self.array(self.program.values[name])

    def array(self, buffer: str) -> np.ndarray:
        """Global array of a buffer that was kept."""
        return join(self.program.buffers[buffer].layout, [e._array(buffer) for e in self.executors])

    def state(self, name: str) -> np.ndarray:
        """Global array of a parameter or running statistic after the run."""
        return join(self.program.params[name], [e.state[name] for e in self.executors])

    def comparable(self) -> dict[str, str]:
        """Values that do not depend on the grid, and the buffers that hold them."""
        out = {}
        for each, buffer in self.program.values.items():
            name = each.partition("#")[0]  # of any micro-batch
            info = self.program.buffers[buffer]
            # How a norm's sums come apart in leading bits and rest depends on the blocks; its moments do not.
            sums = name.endswith(":sums") and isinstance(self.program.graph[name[:-5]].op, Norm | SampleNorm)
            if info.dtype != "opaque" and not info.layout.has_ghosts and name not in self.varying and not sums:
                out[each] = buffer
        return out


def run(
    graph: Graph,
    plan: Plan,
    batch: int,
    feeds: Arrays,
    *,
    steps: int = 1,
    seed: int = 1,
    rate: float = 0.0,
    state: Arrays | None = None,
    dtype: Any = np.float64,
    engine: Any = None,
    held: list[int] | None = None,
    **options: Any,
) -> Run:
    """Lower, run on virtual ranks in lockstep (every buffer watched between start and wait), and leave nothing pending.

    Parameters
    ----------
    feeds : mapping
        Global arrays by input node.
    steps : int
        Runs of the program, with plain gradient descent of the given ``rate`` after each.
    state : mapping, optional
        Global initial parameters that replace the drawn ones.
    held : list, optional
        Gets the bytes that rank 0 holds beside its parameters, after each of its steps.
    options
        Of ``lower``; by default everything is kept, and the input's gradient wanted.
    """
    options = {"keep": True, "input_grad": options.get("training", True), **options}
    program = lower(graph, plan, batch, **options)
    world = VirtualWorld(plan.grid)
    executors = []
    for r in range(plan.grid.size):
        own = initial_state(graph.params(), program.params, r, seed, np.dtype(dtype))
        for name, array in (state or {}).items():
            own[name] = cut(program.params[name].box(r), array).astype(own[name].dtype)
        e = Executor(program, engine or NumpyEngine(dtype), world.transport(r), own)
        e.micro_batch.seed = seed
        e.on_update = descent(rate)
        if held is not None and r == 0:
            _watch(e, held)
        executors.append(e)
    results: list[dict[str, Any]] = []
    for step in range(steps):
        for e in executors:
            e.micro_batch.number = step
        results = run_lockstep(executors, [local_feeds(program, r, feeds, dtype) for r in range(plan.grid.size)])
        world.check_idle()
    return Run(program, executors, results, world, frozenset(_varying(graph, batch)))


def _watch(executor: Executor, held: list[int]) -> None:
    execute, program, begin = executor.execute, executor.program, executor.begin
    fed: list[int] = []

    def begun(feeds: Arrays) -> None:  # they stay to the end: whoever gave them has them
        fed.append(sum(a.nbytes for a in feeds.values()))
        begin(feeds)

    def watched(index: int) -> None:
        execute(index)
        own = {
            id(a): a.nbytes for b, a in executor.arrays.items() if b not in program.params and b not in program.feeds
        }
        held.append(fed[-1] + sum(own.values()))

    executor.begin = begun  # type: ignore[method-assign]

    executor.execute = watched  # type: ignore[method-assign]


def descent(rate: float) -> Callable[[Arrays, Arrays], None]:
    """Gradient descent in place."""

    def update(params: Arrays, grads: Arrays) -> None:
        for name, p in params.items():
            p -= rate * grads[name]

    return update


def local_feeds(program: Program, rank: int, feeds: Arrays, dtype: Any = np.float64) -> dict[str, np.ndarray]:
    """One rank's blocks of the global inputs."""
    out = {}
    for buffer, source in program.feeds.items():
        info = program.buffers[buffer]
        part = feeds[source][info.first : info.first + info.layout.shape[0]]
        block = cut(info.layout.box(rank), part)
        out[buffer] = block if block.dtype.kind in "iu" else block.astype(dtype)
    return out


def _varying(graph: Graph, batch: int) -> set[str]:
    """Statistics that differ from group to group on purpose."""
    out = set()
    for node in graph.ops:
        xs = graph.input_shapes(node.name, batch)
        for k in (*node.op.forward(xs, True), *node.op.backward(xs, frozenset({"dx0", "dweight"}))):
            out |= {f"{node.name}:{o.value}" for o in (*k.reads, *k.writes) if o.varying}
    return out


def difference(got: np.ndarray, want: np.ndarray, scale: float = 0.0) -> float:
    """Largest difference, relative to the largest element."""
    assert got.shape == want.shape
    if not want.size:
        return 0.0
    d = np.abs(got - want).max()
    return float("inf") if np.isnan(d) else float(d / max(np.abs(want).max(), scale, 1e-12))


def assert_same(got: Run, want: Run, tolerance: float = 1e-10) -> None:
    """Every value that both runs hold, and the state that they leave, is the same up to rounding.

    Which class ranks first is compared only where rounding cannot decide it.
    """
    reference, seen = want.comparable(), 0
    tied = _tied(want)
    if tied:
        reference = {n: b for n, b in reference.items() if n.partition("#")[0] not in ("loss:rank", "loss:hits")}
    # A gradient that cancels to zero is judged beside the largest gradient, a value beside the largest value.
    scale = {
        gradient: max(
            (np.abs(want.array(b)).max(initial=0) for n, b in reference.items() if _is_gradient(n) == gradient)
        )
        for gradient in {_is_gradient(n) for n in reference}
    }
    for name, buffer in got.comparable().items():
        if name in reference:
            d = difference(got.array(buffer), want.array(reference[name]), 1e-2 * scale[_is_gradient(name)])
            assert d <= tolerance, f"{name} differs by {d:.2e} under {describe(got.program.plan)}"
            seen += 1
    assert seen >= len(got.program.graph.ops), "hardly anything was compared"
    for name in got.program.params:
        d = difference(got.state(name), want.state(name))
        assert d <= tolerance, f"{name} after the step differs by {d:.2e} under {describe(got.program.plan)}"
    for key in ("loss", "hits"):
        if key in want.results[0] and not (tied and key == "hits"):
            for r in got.results:
                np.testing.assert_allclose(r[key], want.results[0][key], rtol=1e-10, atol=1e-12, err_msg=key)


def _is_gradient(value: str) -> bool:
    kind = value.partition("#")[0].rpartition(":")[2]
    return kind in ("grad", "dsums") or (kind[0] == "d" and (kind == "dy" or kind[1] == "x"))


def _tied(run: Run) -> bool:
    """Whether some position's best classes are equal up to rounding, its target among them or not."""
    if not any(v.startswith("loss:rank") for v in run.program.values):
        return False
    output = f"{run.program.graph.output}:y"
    x = [np.sort(run.value(v), axis=-1) for v in run.program.values if v.partition("#")[0] == output]
    return any((np.diff(y, axis=-1) < 1e-9 * np.abs(y).max(initial=1e-30)).any() for y in x)


def describe(plan: Plan) -> str:
    """A plan on one line, for messages."""
    return f"grid {plan.grid}: {dict(plan.ops)} {plan.pipeline or ''}"


def serial(graph: Graph, batch: int, feeds: Arrays, **options: Any) -> Run:
    """The same on one rank."""
    return run(graph, Plan(Grid(), {}), batch, feeds, **options)


def random_state(graph: Graph, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Parameters and running statistics that are nowhere zero or one by construction; variances are positive.

    Weights keep values of order one, so that no softmax saturates.
    """
    return {
        k: rng.random(p.shape) + 0.5 if k.endswith("var") else rng.standard_normal(p.shape) / np.sqrt(p.fan_in)
        for k, p in graph.params().items()
    }


def samples(graph: Graph, batch: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random inputs and targets. Labels are classes of the output, a third of them those that the loss ignores; binary targets lie in [0, 1]."""
    out: dict[str, np.ndarray] = {}
    of = {target: (output, loss) for output, (target, loss) in (graph.compared if graph.loss else {}).items()}
    for node in graph.inputs:
        shape = graph.shapes(batch)[node.name]
        if getattr(node.op, "dtype", None) == "int64":
            output, loss = of[node.name]
            out[node.name] = rng.integers(0, graph.shapes(batch)[output][-1], shape)
            ignore = getattr(loss, "ignore_index", None)
            if ignore is not None:  # some positions, never all
                out[node.name].flat[1::3] = ignore
        elif node in graph.targets:
            out[node.name] = rng.random(shape)
        else:
            out[node.name] = rng.standard_normal(shape)
    return out


def random_pipeline(graph: Graph, places: int, axis: int, rng: np.random.Generator, micros: int) -> Pipeline:
    """Random stages along an axis, in the order of layers, and a random schedule."""
    schedule = SCHEDULES[rng.integers(len(SCHEDULES))]
    count, n = places * int(rng.integers(1, 3) if schedule == "interleaved" else 1), len(graph.ops)
    count = count if count <= n else places
    firsts = np.sort(rng.permutation(n - 1)[: count - 1] + 1)
    stages = {node.name: int(np.searchsorted(firsts, i, side="right")) for i, node in enumerate(graph.ops)}
    return Pipeline((axis,), stages, schedule, micros)


def random_plan(
    graph: Graph, batch: int, grid: Grid, rng: np.random.Generator, idle: float = 0.15, pipeline: Pipeline | None = None
) -> Plan:
    """Each op gives each axis to a random loop, or leaves it idle; the order of axes on a loop is random as well."""
    ops = {}
    for node in graph.ops:
        loops = list(node.op.loops(graph.input_shapes(node.name, batch)))
        op_grid: dict[str, tuple[int, ...]] = {}
        for axis in rng.permutation(len(grid.sizes)):
            if rng.random() >= idle and (pipeline is None or axis not in pipeline.axes):
                loop = loops[rng.integers(len(loops))]
                op_grid[loop] = (*op_grid.get(loop, ()), int(axis))
        ops[node.name] = op_grid
    return Plan(grid, ops, pipeline)


def nbytes(info: Buffer, elements: int, dtype: Any = np.float64) -> int:
    """Bytes of some elements of a buffer."""
    return elements * np.dtype(info.dtype or dtype).itemsize
