"""Measure the links between the ranks of a job by carrying out moves as training does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lbpar.calibrate.kernel_speeds import each
from lbpar.config.machine_file import LevelConfig, MachineFile
from lbpar.cost.machine import Machine
from lbpar.cost.moves import move_price
from lbpar.engine.base import Engine
from lbpar.layout.grid import Axes, Grid
from lbpar.layout.layout import Dim, Layout
from lbpar.layout.transition import Move, transition
from lbpar.runtime.transfers import Transfers
from lbpar.transport.base import Transport

#: Rows of 64 elements of the arrays moved: the start of a message counts, or its bytes do.
ROWS = (1, 1 << 8, 1 << 14, 1 << 17)
#: Seconds to spend on one move, about, and tries to divide them into.
BUDGET, TRIES = 0.03, 3
#: Elements that the work between two moves goes through.
WORK = 1 << 21


def measure_links(engine: Engine, transport: Transport, hosts: Sequence[str], base: MachineFile) -> MachineFile:
    """``base`` with links as measured between these ranks. Collective over all ranks.

    Parameters
    ----------
    engine : Engine
        Packs and unpacks.
    transport : Transport
        More than one rank.
    hosts : sequence of str
        Name of each rank's node.
    base : MachineFile
        Its speed of copies and its latency form are those that prices will be computed with.
    """
    grid = transport.grid
    size = node_size(hosts)
    inside = tuple(a for a in grid.axes if grid.strides[a] * grid.sizes[a] <= size)
    if grid.ways(inside) != size:  # nodes are not whole numbers of axes: all links count as one kind
        inside, size = grid.axes, grid.size
    outside = tuple(a for a in grid.axes if a not in inside)
    groups = [("node", inside), ("network", outside)]
    levels = tuple(
        _level(name, axes, engine, transport, base, size if axes == inside and outside else None)
        for name, axes in groups
        if grid.ways(axes) > 1
    )
    return base.model_copy(update={"levels": levels})


def node_size(hosts: Sequence[str]) -> int:
    """Ranks per node where consecutive ranks fill nodes of equal size; 1 where they do not."""
    size = next((i for i, h in enumerate(hosts) if h != hosts[0]), len(hosts))
    filled = len(hosts) % size == 0 and all(
        hosts[i] == hosts[i - i % size] and (i < size or hosts[i] != hosts[i - size]) for i in range(len(hosts))
    )
    return size if filled else 1


def _level(
    name: str, axes: Axes, engine: Engine, transport: Transport, base: MachineFile, size: int | None
) -> LevelConfig:
    """Alpha and bandwidth that explain, in relative terms, the times of all moves best."""
    rows, times = [], []
    for move in _moves(transport.grid, axes):
        times.append(_seconds(move, engine, transport))
        rows.append(_terms(move, base))
    t = np.array(times)
    a = np.array(rows)
    rest = np.maximum(t - a[:, 2], 0.1 * t)  # less what packing takes
    alpha, beta = _fit(a[:, :2] / t[:, None], rest / t)
    source = f"measured just now: allreduce, allgather and all-to-all over {transport.grid.ways(axes)} ranks"
    return LevelConfig(name=name, size=size, alpha=alpha, bandwidth=1.0 / beta, source=source)


def _moves(grid: Grid, axes: Axes) -> Iterator[Move]:
    for n in ROWS:
        whole = Layout(grid, (Dim.whole(n), Dim.whole(64)))
        rows = Layout(grid, (Dim(n, (n,), (axes,)), Dim.whole(64)))
        columns = Layout(grid, (Dim.whole(n), Dim(64, (64,), (axes,))))
        yield from transition(Layout(grid, whole.dims, axes), whole)
        if 1 < n < ROWS[-1]:
            yield from transition(rows, whole)
            yield from transition(rows, columns)


def _terms(move: Move, base: MachineFile) -> tuple[float, float, float]:
    """Coefficients of alpha and of 1/bandwidth in a move's price, and what is left of it without both."""

    def price(alpha: float, bandwidth: float) -> float:
        level = LevelConfig(name="x", alpha=alpha, bandwidth=bandwidth, source="x")
        return move_price(move, 4, Machine(base.model_copy(update={"levels": (level,)})))[0]

    never = 1e21  # the most that a machine file takes
    rest = price(0.0, never)
    return price(1.0, never) - rest, price(0.0, 1.0) - rest, rest


def _fit(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Least squares with both unknowns positive."""
    alpha, beta = np.linalg.lstsq(a, b, rcond=None)[0]
    least = (1e-8, 1e-13)
    if alpha < least[0]:
        alpha, beta = least[0], float(a[:, 1] @ b / (a[:, 1] @ a[:, 1]))
    elif beta < least[1]:
        alpha, beta = float(a[:, 0] @ b / (a[:, 0] @ a[:, 0])), least[1]
    return float(alpha), max(float(beta), least[1])


def _seconds(move: Move, engine: Engine, transport: Transport) -> float:
    """What a move between two stretches of work adds to them. Collective over all ranks.

    Work makes the ranks arrive apart and finds other things in their caches, as in a program. The least of a few tries, on the rank
    whose least is most.
    """
    transfers = Transfers(engine, transport)
    array = engine.from_host(np.ones(move.src.local_shape(transport.rank), np.float32))
    block = engine.from_host(np.ones(WORK, np.float32))

    def work() -> None:
        engine.relu_forward(block)

    def both() -> None:
        engine.relu_forward(block)
        transfers.start(move, array, False, "measure")()

    transport.barrier()
    both()
    first = max(transport.allgather_obj(each(engine, both, 1)))
    count = int(min(30, max(3, BUDGET / first / TRIES)))
    spent = []
    for _ in range(TRIES):
        transport.barrier()
        alone = each(engine, work, count)
        transport.barrier()
        spent.append(each(engine, both, count) - alone)
    return max(transport.allgather_obj(max(min(spent), 1e-7)))
