"""Measure the links between the ranks of a job by carrying out moves as training does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from time import perf_counter
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from lbpar.calibrate.spread import spread
from lbpar.config.machine_file import LevelConfig, LinkConfig, MachineFile, MeasuredMove
from lbpar.cost.machine import Machine
from lbpar.cost.moves import busiest, move_price
from lbpar.engine.base import Engine
from lbpar.graph.loops import Window
from lbpar.layout.grid import Axes, Grid
from lbpar.layout.layout import Dim, Layout
from lbpar.layout.transition import Move, transition
from lbpar.runtime.transfers import Transfers
from lbpar.transport.base import Transport

#: Rows of 64 elements of the arrays moved: the start of a message counts, or its bytes do.
ROWS = (1, 1 << 6, 1 << 9, 1 << 11, 1 << 13, 1 << 15)
#: Rows of the largest array, which is only summed: gradients of a whole network are.
MOST_ROWS = 1 << 17
#: Rounds of all moves, at least, however long they take, and at most.
LEAST_ROUNDS, MOST_ROUNDS = 5, 25
#: Elements that the work between two moves goes through.
WORK = 1 << 19
#: What a bent line must be of a straight one's error to be taken.
BETTER = 0.8
#: Least alpha and seconds per byte: what lies below was not seen.
LEAST = (1e-8, 1e-13)
MOVES: tuple[MeasuredMove, ...] = get_args(MeasuredMove)
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Timed:
    """One move, timed.

    Parameters
    ----------
    level, kind, ways
        Of its links.
    bytes : int
        Sent by the busiest rank.
    seconds, spread : float
        Median of the repetitions, and by what part of it half of them lie around it.
    terms : tuple of float
        Coefficients of alpha and of 1/bandwidth in its price, and what is left of it without both.
    fitted : float
        Seconds by the line through all sizes.
    """

    level: str
    kind: MeasuredMove
    ways: int
    bytes: int
    seconds: float
    spread: float
    terms: tuple[float, float, float]
    fitted: float = 0.0


def measure_links(
    engine: Engine, transport: Transport, hosts: Sequence[str], base: MachineFile, budget: float
) -> tuple[tuple[LevelConfig, ...], list[Timed]]:
    """Links as measured between these ranks, and what they were fitted to. Collective over all ranks.

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
    budget : float
        Seconds to spend, about. All moves take turns, at least `LEAST_ROUNDS` times.
    """
    grid = transport.grid
    size = node_size(hosts)
    inside = tuple(a for a in grid.axes if grid.strides[a] * grid.sizes[a] <= size)
    if grid.ways(inside) != size:  # nodes are not whole numbers of axes: all links count as one kind
        inside, size = grid.axes, grid.size
    outside = tuple(a for a in grid.axes if a not in inside)
    groups = [(name, axes) for name, axes in (("node", inside), ("network", outside)) if grid.ways(axes) > 1]
    moves = [(name, move) for name, axes in groups for move in _moves(grid, axes)]
    seconds = _seconds([move for _, move in moves], engine, transport, budget)
    timed = [
        Timed(name, _kind(m), grid.ways(m.axes), busiest(m).elements * 4, *times, _terms(m, base))
        for (name, m), times in zip(moves, seconds, strict=True)
    ]
    found = [_level(name, [t for t in timed if t.level == name], transport.size) for name, _ in groups]
    if outside and inside:
        found[0] = found[0][0].model_copy(update={"size": size}), found[0][1]
    return tuple(level for level, _ in found), [t for _, fitted in found for t in fitted]


def node_size(hosts: Sequence[str]) -> int:
    """Ranks per node where consecutive ranks fill nodes of equal size; 1 where they do not."""
    size = next((i for i, h in enumerate(hosts) if h != hosts[0]), len(hosts))
    filled = len(hosts) % size == 0 and all(
        hosts[i] == hosts[i - i % size] and (i < size or hosts[i] != hosts[i - size]) for i in range(len(hosts))
    )
    return size if filled else 1


def _kind(move: Move) -> MeasuredMove:
    return "p2p" if move.kind in ("halo", "accumulate") else move.kind  # type: ignore[return-value]


def _level(name: str, timed: Sequence[Timed], ranks: int) -> tuple[LevelConfig, list[Timed]]:
    """Links of a level: of every move and size of group, and of all together for what is not listed."""
    overall = fit(timed)
    links, fitted = [], []
    for kind in MOVES:
        for ways in sorted({t.ways for t in timed if t.kind == kind}):
            of_link = [t for t in timed if (t.kind, t.ways) == (kind, ways)]
            sizes = sorted(t.bytes for t in of_link)
            line = fit(of_link, () if kind == "allreduce" else sizes[2:-1])
            lines = [line.seconds(t) for t in of_link]
            fitted += [replace(t, fitted=s) for t, s in zip(of_link, lines, strict=True)]
            residual = np.mean([abs(s / t.seconds - 1) for t, s in zip(of_link, lines, strict=True)])
            links.append(
                LinkConfig(
                    kind=kind,
                    ways=ways,
                    alpha=line.alpha,
                    bandwidth=line.bandwidth,
                    beyond=line.beyond,
                    knee=line.knee if line.beyond else 0.0,
                    residual=round(float(residual), 4),
                    spread=round(float(np.mean([t.spread for t in of_link])), 4),
                )
            )
    source = (
        f"measured between {ranks} ranks: every move in turn, with work in between; medians of what it took the rank that came last, "
        f"{min(t.bytes for t in timed)} B to {max(t.bytes for t in timed)} B; the line of least absolute relative residuals"
    )
    return LevelConfig(
        name=name, alpha=overall.alpha, bandwidth=overall.bandwidth, source=source, moves=tuple(links)
    ), fitted


def _moves(grid: Grid, axes: Axes) -> Iterator[Move]:
    """Moves over the first axes of a level, and over all of them."""
    for group in (axes[: i + 1] for i in range(len(axes)) if grid.ways(axes[: i + 1]) > 1):
        for n in (*ROWS, MOST_ROWS):
            whole = Layout(grid, (Dim.whole(n), Dim.whole(64)))
            yield from transition(Layout(grid, whole.dims, group), whole)
            if n == MOST_ROWS:
                continue
            n *= grid.ways(group)
            rows = Layout(grid, (Dim(n, (n,), (group,)), Dim.whole(64)))
            columns = Layout(grid, (Dim.whole(n), Dim(64, (64,), (group,))))
            yield from transition(rows, Layout(grid, (Dim.whole(n), Dim.whole(64))))
            yield from transition(Layout(grid, (Dim.whole(n), Dim.whole(64)), group), rows)
            yield from transition(rows, columns)
            # Blocks of eight rows, of which the outer ones go to the neighbours.
            few, long = Dim(8 * grid.ways(group), (8 * grid.ways(group),), (group,)), Dim.whole(8 * n)
            yield from transition(
                Layout(grid, (few, long)), Layout(grid, (replace(few, window=Window(3, pad=1)), long))
            )


def _terms(move: Move, base: MachineFile) -> tuple[float, float, float]:
    """Coefficients of alpha and of 1/bandwidth in a move's price, and what is left of it without both."""

    def price(alpha: float, bandwidth: float) -> float:
        link = LinkConfig(kind=_kind(move), ways=move.src.grid.ways(move.axes), alpha=alpha, bandwidth=bandwidth)
        level = LevelConfig(name="x", alpha=alpha, bandwidth=bandwidth, source="x", moves=(link,))
        return move_price(move, 4, Machine(base.model_copy(update={"levels": (level,)})))[0]

    never = 1e21  # the most that a machine file takes
    rest = price(0.0, never)
    return price(1.0, never) - rest, price(0.0, 1.0) - rest, rest


@dataclass(frozen=True)
class Line:
    """Seconds of a move by its size; ``error`` is the sum of absolute relative residuals."""

    alpha: float
    bandwidth: float
    beyond: float | None = None
    knee: float = 0.0
    error: float = 0.0

    def seconds(self, t: Timed) -> float:
        """What a move takes by it."""
        more = max(0.0, t.bytes - self.knee) * (1 / self.beyond - 1 / self.bandwidth) if self.beyond else 0.0
        return self.alpha * t.terms[0] + t.terms[1] / self.bandwidth + t.terms[2] + more


def fit(timed: Sequence[Timed], knees: Sequence[int] = ()) -> Line:
    """The line that has the least sum of absolute relative residuals, all unknowns at least `LEAST`.

    With ``knees``, bytes beyond one of them may take longer. One best line goes through as many points as there are unknowns that are
    not at their least value, so all of these are tried.
    """
    t = np.array([x.seconds for x in timed])
    rest = np.maximum(t - [x.terms[2] for x in timed], 0.1 * t)  # less what packing takes
    found: list[Line] = []
    for knee in (None, *knees):
        columns, least = [[x.terms[0] for x in timed], [x.terms[1] for x in timed]], list(LEAST)
        if knee is not None:
            columns.append([float(max(0, x.bytes - knee)) for x in timed])
            least.append(0.0)
        a = np.array(columns).T / t[:, None]
        lines = _candidates(a, rest / t, np.array(least))
        errors = np.abs(lines @ a.T - rest / t).sum(1)
        alpha, beta, *more = lines[errors.argmin()].tolist()
        beyond = 1 / (beta + more[0]) if more and more[0] > 0 else None
        found.append(Line(alpha, 1 / beta, beyond, float(knee or 0), float(errors.min())))
    best = min(found, key=lambda line: line.error)
    return best if best.error < BETTER * found[0].error else found[0]


def _candidates(a: Floats, b: Floats, least: Floats) -> Floats:
    """Solutions of as many equations as there are unknowns, some of which are at their least value; none is below it."""
    found = [np.linalg.lstsq(a, b, rcond=None)[0]]
    unknowns = range(a.shape[1])
    for free in (f for n in range(1, len(unknowns) + 1) for f in combinations(unknowns, n)):
        fixed = [u for u in unknowns if u not in free]
        for points in combinations(range(len(b)), len(free)):
            matrix = a[np.ix_(points, free)]
            if abs(np.linalg.det(matrix)) > 1e-12 * prod(np.abs(matrix).max(1)):
                line = least.copy()
                line[list(free)] = np.linalg.solve(matrix, b[list(points)] - a[np.ix_(points, fixed)] @ least[fixed])
                found.append(line)
    return np.maximum(np.array(found), least)


def _seconds(
    moves: Sequence[Move], engine: Engine, transport: Transport, budget: float
) -> Iterator[tuple[float, float]]:
    """What each move takes, and the spread of that. Collective over all ranks.

    Between two moves there is work, which makes the ranks arrive apart and finds other things in their caches, as in a program. Of each
    repetition the time counts of the rank that took least: it came last, and waited for nobody.
    """
    transfers = Transfers(engine, transport)
    # Copies lie where the engine's own arrays lie, which may be other memory than the host's.
    arrays = [engine.copy(engine.from_host(np.zeros(m.src.local_shape(transport.rank), np.float32))) for m in moves]
    block = engine.copy(engine.from_host(np.ones(WORK, np.float32)))

    def once(i: int) -> float:
        engine.relu_forward(block)
        engine.synchronize()
        start = perf_counter()
        transfers.start(moves[i], arrays[i], moves[i].kind == "allreduce", "measure")()  # gradients are summed in place
        engine.synchronize()
        taken = perf_counter() - start
        transfers.forget()  # or its results would stay, and each time new memory be touched
        return taken

    def round_() -> list[float]:
        return [once(i) for i in range(len(moves))]

    round_()  # makes communicators
    began, taken = perf_counter(), [round_()]
    more = transport.bcast(int(budget / (perf_counter() - began)))
    taken += [round_() for _ in range(min(MOST_ROUNDS, max(LEAST_ROUNDS, more)) - 1)]
    ranks = np.array(transport.allgather_obj(taken))  # by rank, round and move
    grid = transport.grid
    for i, move in enumerate(moves):
        groups = sorted({grid.group(move.axes, rank) for rank in range(grid.size)})
        # In a chain of neighbours no rank is the last of all.
        of_group = np.median if move.kind == "halo" and len(groups[0]) > 2 else np.min
        times = np.mean([of_group(ranks[list(group), :, i], axis=0) for group in groups], axis=0)
        yield float(np.median(times)), spread(times)
