"""Measure an engine's kernels by executing the steps of small programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from lbpar.config.machine_file import ComputeConfig, RateConfig
from lbpar.cost.kernel_time import flops, local_extents, matrix_shape, plain_name, taps, touched
from lbpar.engine.base import Engine
from lbpar.graph.graph import Graph
from lbpar.graph.loops import Kernel
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.steps import Compute, Program
from lbpar.runtime.executor import Executor
from lbpar.runtime.optim.rules import SGD
from lbpar.transport.single import SingleTransport

#: Bytes of operands from which on a kernel's speed is that of its memory, and up to which it is its start that takes time.
LARGE, TINY = 1 << 17, 1 << 12
#: Seconds after which a network is run no more: a slow engine's times scatter little.
ENOUGH = 0.2
#: Elements of an array that no cache holds.
STREAM = 1 << 23


@dataclass(frozen=True)
class Sample:
    """Seconds of one kernel, all of whose loops have their full extents."""

    kernel: Kernel
    seconds: float


def measure_compute(engine: Engine, dtype: str, graphs: Iterable[tuple[Graph, int]], repeats: int) -> ComputeConfig:
    """Rates of matrix products, speeds of all other kernels, of a copy, and the time that starting a kernel takes.

    Parameters
    ----------
    engine : Engine
        As training uses it.
    dtype : str
        Type under which the rates are filed.
    graphs : iterable of (Graph, int)
        Networks with a loss, and the batch of each.
    repeats : int
        Runs of each network; every kernel's least time counts.
    """
    samples = [s for graph, batch in graphs for s in run_samples(engine, graph, batch, repeats)]
    small = [s.seconds for s in samples if touched(s.kernel, _local(s.kernel), dtype) <= TINY]
    overhead = median(small) if small else 0.0
    rates: list[RateConfig] = []
    moved: dict[str, float] = {}
    spent: dict[str, float] = {}
    for s in samples:
        name, local = s.kernel.name, _local(s.kernel)
        shape = matrix_shape(s.kernel, local)
        net = max(s.seconds - overhead, s.seconds / 4)
        if shape is not None:
            m, n, k = (max(1, int(v)) for v in shape)
            rate = float(flops(s.kernel, local)) / net
            rates.append(
                RateConfig(kernel=plain_name(name), m=m, n=n, k=k, taps=taps(s.kernel), dtype=dtype, rate=rate)
            )
        elif (size := float(touched(s.kernel, local, dtype))) >= LARGE:
            moved[name], spent[name] = moved.get(name, 0.0) + size, spent.get(name, 0.0) + net
    return ComputeConfig(
        peak={dtype: max(r.rate for r in rates)},
        efficiency=1.0,
        memory_bandwidth=copy_speed(engine, repeats),
        overhead=overhead,
        table=tuple(rates),
        speeds={name: size / spent[name] for name, size in moved.items()} | {"update": update_speed(engine, repeats)},
        source=f"measured just now: kernels of engine {engine.name}",
    )


def run_samples(engine: Engine, graph: Graph, batch: int, repeats: int) -> list[Sample]:
    """The least seconds of every kernel of one training step, over up to ``repeats`` runs after one that warms up."""
    program = lower(graph, Plan(Grid(), {}), batch, input_grad=True)
    executor = Executor(program, engine, SingleTransport(), _state(program, graph, engine))
    feeds = _feeds(program, engine)
    best = [float("inf")] * len(program.steps)
    began, mark = perf_counter(), engine.mark
    for run in range(1 + repeats):
        if run > 1 and perf_counter() - began > ENOUGH:
            break
        executor.begin(feeds)
        marks = [mark()]
        for i in range(len(program.steps)):
            executor.execute(i)
            marks.append(mark())
        if run:
            best = [min(b, engine.elapsed(*pair)) for b, pair in zip(best, pairwise(marks), strict=True)]
    return [Sample(s.kernel, best[i]) for i, s in enumerate(program.steps) if isinstance(s, Compute)]


def copy_speed(engine: Engine, repeats: int) -> float:
    """Bytes per second, read and written, of a copy that no cache holds."""
    block, target = (engine.zeros((STREAM,), np.float32) for _ in range(2))
    return 2.0 * block.nbytes / _least(engine, lambda: engine.copy(block, out=target), repeats)


def update_speed(engine: Engine, repeats: int) -> float:
    """Bytes per second, read and written, of SGD's step with momentum: three arrays read, two written."""
    params, grads = ({"w": engine.from_host(np.full(STREAM, 1e-3, np.float32))} for _ in range(2))
    rule = SGD(1e-3, momentum=0.9)
    rule.engine = engine
    return 5.0 * params["w"].nbytes / _least(engine, lambda: rule.step(params, grads), repeats)


def each(engine: Engine, call: Callable[[], object], count: int = 1) -> float:
    """Seconds of one of ``count`` calls."""
    start = engine.mark()
    for _ in range(count):
        call()
    return engine.elapsed(start, engine.mark()) / count


def _least(engine: Engine, call: Callable[[], object], repeats: int) -> float:
    """Least seconds of a call, over ``repeats`` after one that warms up."""
    call()
    return min(each(engine, call) for _ in range(repeats))


def _state(program: Program, graph: Graph, engine: Engine) -> dict[str, Any]:
    """Parameters of one value: drawing millions would take longer than what is measured."""
    params = graph.params()
    types = {name: np.float64 if params[name].kind == "statistic" else engine.dtype for name in program.params}
    values = {name: np.full(layout.local_shape(0), 0.01, types[name]) for name, layout in program.params.items()}
    return {name: engine.from_host(a) for name, a in values.items()}


def _feeds(program: Program, engine: Engine) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for name in program.feeds:
        info = program.buffers[name]
        shape = info.layout.local_shape(0)
        labels = info.dtype == "int64"
        feeds[name] = np.zeros(shape, np.int64) if labels else rng.standard_normal(shape).astype(engine.dtype)
    return feeds


def _local(kernel: Kernel) -> dict[str, int]:
    return local_extents(kernel, Grid(), {})
