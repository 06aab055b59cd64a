"""Measure an engine's kernels by executing the steps of small programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, pairwise, takewhile
from math import inf, prod
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from lbpar.calibrate.nobody import Nobody
from lbpar.calibrate.spread import spread
from lbpar.calibrate.work import Work
from lbpar.config.machine_file import ComputeConfig, RateConfig
from lbpar.cost.kernel_time import flops, local_extents, matrix_shape, plain_name, rows_and_channels, taps, touched
from lbpar.cost.price import owner
from lbpar.engine.base import Engine
from lbpar.graph.loops import Kernel
from lbpar.program.steps import Compute, Free, Program
from lbpar.runtime.executor import Executor
from lbpar.runtime.optim.rules import SGD
from lbpar.transport.single import SingleTransport

#: Bytes of operands up to which it is a kernel's start that takes time.
TINY = 1 << 12
#: Bytes of parameters of the networks that take turns, about. The more take turns, the longer is the time over which a kernel's
#: median is taken: how fast a core is differs by tens of percents from one second to the next.
ROOM = 1 << 30
#: Seconds for each network after which they are run no more: a slow engine's times scatter little.
ENOUGH = 0.4
#: Part of a limited time after which no further network is made ready: each is then run once more at least.
READY = 0.4
#: Seconds that a kernel takes at least; a device does nothing at all for some, which only look at an array otherwise.
LEAST = 1e-9
#: Parameters of a small network.
FEW = 32
#: Elements of an array that no cache holds, and of a layer's.
STREAM, LAYER = 1 << 23, 1 << 18
#: How many times as many on a device, whose caches hold up to 126 MB (B200), and which moves 10 MB while it starts a kernel.
ON_DEVICE = 32


@dataclass(frozen=True)
class Sample:
    """Seconds of one kernel on a block: the median of some runs, and by what part of it half of them lie around it."""

    kernel: Kernel
    local: dict[str, int]
    seconds: float
    spread: float


def measure_compute(
    engine: Engine, dtype: str, programs: Iterable[Program], rounds: int, limit: float = inf, every: bool = True
) -> tuple[ComputeConfig, float]:
    """Rates of all kernels, the speed of a copy, and the time that starting a kernel takes; and the mean spread of all that.

    Parameters
    ----------
    engine : Engine
        As training uses it.
    dtype : str
        Type under which the rates are filed.
    programs : iterable of Program
        What to run; see `lbpar.calibrate.samples`.
    rounds : int
        Runs of each program; every kernel's median counts.
    limit : float, seconds
        After which no program is run again, about.
    every : bool
        All programs run once, whatever the limit. Else those count that are ready in time.
    """
    halves, began = engine.activations.itemsize == 2, perf_counter()
    samples = list(run_samples(engine, programs, rounds, limit, every))
    by_name: dict[str, list[Sample]] = defaultdict(list)
    for s in samples:
        by_name[s.kernel.name].append(s)
    tiny = {
        name: [s.seconds for s in of if touched(s.kernel, s.local, dtype, halves) <= TINY]
        for name, of in by_name.items()
    }
    starts = {name: median(seconds) for name, seconds in tiny.items() if seconds}
    overhead = median(starts.values()) if starts else 0.0
    rates = _merged(
        _rate(s, starts.get(s.kernel.name, overhead), dtype, halves)
        for of in by_name.values()
        for s in [s for s in of if touched(s.kernel, s.local, dtype, halves) > TINY] or of
    )
    rounds = rounds if perf_counter() - began < limit else 1
    starts["slice"], speeds = part_speeds(engine, rounds)
    starts["update"], speeds["update"] = update_speed(engine, rounds)
    found = ComputeConfig(
        peak={dtype: max((r.rate for r in rates if r.k > 1), default=1.0)},
        efficiency=1.0,
        memory_bandwidth=copy_speed(engine, rounds),
        overhead=overhead,
        starts=starts,
        table=rates,
        speeds=speeds,
        half_arrays=halves,
        volume_copies=engine.volume_copies,
        source=f"measured: kernels of engine {engine.name}, medians of {rounds} runs at most, in which networks take turns; "
        f"starts on arrays of at most {TINY} B",
    )
    return found, float(np.mean([s.spread for s in samples]))


def _merged(rates: Iterable[RateConfig]) -> tuple[RateConfig, ...]:
    """Each shape of a kernel once."""
    found: dict[Any, list[RateConfig]] = defaultdict(list)
    for r in rates:
        found[r.kernel, r.m, r.n, r.k, r.taps].append(r)
    return tuple(of[0].model_copy(update={"rate": median(r.rate for r in of)}) for of in found.values())


def _rate(s: Sample, start: float, dtype: str, halves: bool) -> RateConfig:
    shape = matrix_shape(s.kernel, s.local)
    work = float(flops(s.kernel, s.local) if shape else touched(s.kernel, s.local, dtype, halves))
    m, n, k = (max(1, int(v)) for v in shape or (*rows_and_channels(s.local), 1))
    rate = max(1.0, work / max(s.seconds - start, s.seconds / 4, LEAST))
    name, window = (plain_name(s.kernel.name), taps(s.kernel)) if shape else (s.kernel.name, 1)
    return RateConfig(kernel=name, m=m, n=n, k=k, taps=window, dtype=dtype, rate=rate)


def run_samples(
    engine: Engine, programs: Iterable[Program], rounds: int, limit: float = inf, every: bool = True
) -> Iterator[Sample]:
    """The seconds of every kernel of some programs, over up to ``rounds`` runs after one that warms up; see `measure_compute`."""
    rest, work, start = iter(programs), Work(engine), perf_counter()
    while turns := list(_in_room(rest, engine, inf if every else start + READY * limit)):
        began = perf_counter()
        for r in range(rounds):
            if r > 2 and perf_counter() - began > ENOUGH * len(turns):
                break
            for run in turns:
                if r and perf_counter() - start > limit:
                    break
                work()
                run.once()
        for run in turns:
            yield from run.samples()


def _in_room(programs: Iterator[Program], engine: Engine, until: float) -> Iterator[_Run]:
    room = ROOM
    if perf_counter() > until:
        return
    for program in programs:
        yield _Run(program, engine)
        if perf_counter() > until:
            return
        room -= sum(4 * prod(layout.local_shape(0)) for layout in program.params.values())
        if room < 0:
            return


class _Run:
    """A program made ready to be run and timed step by step."""

    def __init__(self, program: Program, engine: Engine) -> None:
        self.program, self.engine = program, engine
        grid = program.plan.grid
        transport = SingleTransport() if grid.size == 1 else Nobody(grid)
        self.executor = Executor(program, engine, transport, flat_state(program, engine), whole=False)
        self.feeds = drawn_feeds(program, engine)
        self.taken: list[list[float]] = []
        self.once()
        self.taken.clear()

    def once(self) -> None:
        """Run and time all steps."""
        execute, mark = self.executor.execute, self.engine.mark
        self.executor.begin(self.feeds)
        marks = [mark()]
        for i in range(len(self.program.steps)):
            execute(i)
            marks.append(mark())
        self.taken.append([self.engine.elapsed(*pair) for pair in pairwise(marks)])

    def samples(self) -> Iterator[Sample]:
        """What was found, kernel by kernel. Freeing counts as the kernel that it follows."""
        steps, times = self.program.steps, np.array(self.taken).T
        for i, step in enumerate(steps):
            if isinstance(step, Compute):
                op_grid = self.program.plan[owner(step, self.program)]
                local = local_extents(step.kernel, self.program.plan.grid, op_grid)
                if all(local.values()):
                    freed = sum(1 for _ in takewhile(lambda s: isinstance(s, Free), steps[i + 1 :]))
                    taken = times[i : i + 1 + freed].sum(0).tolist()
                    yield Sample(step.kernel, local, median(taken), spread(taken))


def copy_speed(engine: Engine, rounds: int) -> float:
    """Bytes per second, read and written, of a copy that no cache holds."""
    block, target = (engine.zeros(_sizes(engine)[:1], np.float32) for _ in range(2))
    return 2.0 * block.nbytes / _median(engine, lambda: engine.copy(block, out=target), rounds)


def part_speeds(engine: Engine, rounds: int) -> tuple[float, dict[str, float]]:
    """Seconds that a copy of a part of an array starts in; bytes per second, read and written, of copies of parts of a layer's array: of
    ``rows``, which lie together, and of ``columns``, a part of each row. Layers take turns, so that none is in a cache that it would not be
    in during a step."""
    stream, layer = _sizes(engine)
    rows, every = layer // 32, slice(None)
    turns = cycle([engine.zeros((rows, 32), np.float32) for _ in range(max(1, stream // layer))])

    def seconds(index: tuple[slice, slice]) -> float:
        return _median(engine, lambda: engine.pack(next(turns), index), 3 * rounds)

    start, half, parts = (seconds(i) for i in ((slice(1), every), (slice(rows // 2), every), (every, slice(16))))
    size = 4.0 * layer  # half of it is read, and written
    return start, {name: size / max(t - start, t / 4, LEAST) for name, t in (("rows", half), ("columns", parts))}


def update_speed(engine: Engine, rounds: int) -> tuple[float, float]:
    """Of SGD's step with momentum: seconds per parameter, and bytes per second, read and written, of three arrays read and two written."""

    def seconds(size: int, count: int) -> float:
        names = [f"w{i}" for i in range(count)]
        params, grads = ({n: engine.from_host(np.full(size, 1e-3, np.float32)) for n in names} for _ in range(2))
        rule = SGD(1e-3, momentum=0.9)
        rule.engine = engine
        return _median(engine, lambda: rule.step(params, grads), rounds)

    start, (_, layer) = seconds(1, FEW) / FEW, _sizes(engine)
    return start, 5.0 * 4 * FEW * layer / max(seconds(layer, FEW) - FEW * start, 1e-9)


def _sizes(engine: Engine) -> tuple[int, int]:
    """Elements of an array that no cache holds, and of a layer's; of a device with little memory, of a sixteenth of that at most."""
    room = (engine.capacity or inf) // (16 * 4 * STREAM)
    times = 1 if engine.host else int(max(1, min(ON_DEVICE, room)))
    return STREAM * times, LAYER * times


def _median(engine: Engine, call: Callable[[], object], rounds: int) -> float:
    """Median of the seconds of a call, over ``rounds`` after one that warms up."""
    work = Work(engine)

    def once() -> float:
        work()
        start = engine.mark()
        call()
        return engine.elapsed(start, engine.mark())

    once()
    return median(once() for _ in range(rounds))


def flat_state(program: Program, engine: Engine, rank: int = 0) -> dict[str, Any]:
    """A rank's parameters, all of one value: drawing millions would take longer than what is measured."""
    params = program.graph.params()
    types = {name: np.float64 if params[name].kind == "statistic" else engine.dtype for name in program.params}
    values = {name: np.full(layout.local_shape(rank), 0.01, types[name]) for name, layout in program.params.items()}
    return {name: engine.from_host(a) for name, a in values.items()}


def drawn_feeds(program: Program, engine: Engine, rank: int = 0) -> dict[str, Any]:
    """A rank's blocks of random samples, all of the first class."""
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for name in program.feeds:
        info = program.buffers[name]
        shape = info.layout.local_shape(rank)
        labels = info.dtype == "int64"
        feeds[name] = np.zeros(shape, np.int64) if labels else rng.standard_normal(shape).astype(engine.dtype)
    return feeds
