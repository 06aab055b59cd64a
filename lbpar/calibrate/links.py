"""Measure the links between the ranks of a job by carrying out moves as training does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, zip_longest
from math import inf, prod
from random import Random
from time import perf_counter
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from lbpar.calibrate.spread import spread, unsure
from lbpar.calibrate.trust import MOVE_UNSURE, doubt
from lbpar.calibrate.work import Work
from lbpar.config.machine_file import LevelConfig, LinkConfig, MachineFile, MeasuredMove
from lbpar.cost.machine import Machine, measured_as
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
#: Rounds of all moves, at least and at most; fewer than the least where these would take this many times as long as they may.
LEAST_ROUNDS, MOST_ROUNDS, LATE = 5, 25, 2.0
#: Rounds at once of the moves whose medians are not sure yet, and the rounds that a move has at most.
MORE_ROUNDS, MOST_REPEATS = 5, 200
#: Sizes of each link that the first rounds time in any case, and then moves between two looks at the clock.
SIZES, LOOK = 2, 8
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
    seconds, spread, unsure : float
        Median of the repetitions, by what part of it half of them lie around it, and its standard error, as a part of it.
    repeats : int
        Repetitions.
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
    unsure: float
    repeats: int
    terms: tuple[float, float, float]
    fitted: float = 0.0


def measure_links(
    engine: Engine, transport: Transport, hosts: Sequence[str], crowded: bool, base: MachineFile, budget: float
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
    crowded : bool
        Ranks share cores.
    base : MachineFile
        Its speed of copies and its latency form are those that prices will be computed with.
    budget : float
        Seconds to spend, about. All moves take turns, `LEAST_ROUNDS` times if that does not take `LATE` times as long. As long again may
        be spent on those whose medians are not sure yet. A first round that takes `LATE` times as long ends early: moves that it has not
        come to are left out, and of the others little is sure.
    """
    grid = transport.grid
    size = node_size(hosts)
    inside = tuple(a for a in grid.axes if grid.strides[a] * grid.sizes[a] <= size)
    if grid.ways(inside) != size:  # nodes are not whole numbers of axes: all links count as one kind
        inside, size = grid.axes, grid.size
    outside = tuple(a for a in grid.axes if a not in inside)
    groups = [(name, axes) for name, axes in (("node", inside), ("network", outside)) if grid.ways(axes) > 1]
    moves = [(name, move) for name, axes in groups for move in _moves(grid, axes)]
    seconds = _seconds([move for _, move in moves], engine, transport, crowded, budget)
    timed = [
        Timed(name, _kind(m), grid.ways(m.axes), busiest(m).elements * 4, *times, _terms(m, base))
        for (name, m), times in zip(moves, seconds, strict=True)
        if times is not None
    ]
    groups = [(name, axes) for name, axes in groups if any(t.level == name for t in timed)]
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
    return measured_as(move.kind)  # type: ignore[return-value]


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
            link = LinkConfig(
                kind=kind,
                ways=ways,
                alpha=line.alpha,
                bandwidth=line.bandwidth,
                beyond=line.beyond,
                knee=line.knee if line.beyond else 0.0,
                residual=round(float(residual), 4),
                spread=round(float(np.mean([t.spread for t in of_link])), 4),
                unsure=round(float(np.mean([t.unsure for t in of_link])), 4),
            )
            links.append(link.model_copy(update={"doubt": doubt(link, LEAST)}))
    source = (
        f"measured between {ranks} ranks: every move in turn, with work in between; medians of the mean of ranks (of the last where they share cores), "
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
    moves: Sequence[Move], engine: Engine, transport: Transport, crowded: bool, budget: float
) -> list[tuple[float, float, float, int] | None]:
    """What each move takes, the spread of that, how unsure it is, and repetitions; None of a move that was never timed. Collective over all ranks.

    Moves take turns in another order each time. Between two of them there is work, which makes the ranks arrive apart and leaves other
    things in their caches, as in a program; and a small move of the same kind before, because a step has many of a kind. Of each repetition
    the mean of the ranks counts, for a step too takes all the time that its ranks wait for each other; but where they share cores, which
    prices of kernels count already, that of the rank that came last and waited for nobody.
    """
    transfers = Transfers(engine, transport)
    # Copies lie where the engine's own arrays lie, which may be other memory than the host's.
    arrays = [engine.copy(engine.from_host(np.zeros(m.src.local_shape(transport.rank), np.float32))) for m in moves]
    work, links = Work(engine), dict[tuple[str, Axes], list[int]]()
    for i, m in enumerate(moves):
        links.setdefault((m.kind, m.axes), []).append(i)
    grid = transport.grid
    # The least and a middle size of each link first: a round may have to end early.
    mixed = [[of[0], *of[len(of) // 2 :], *of[1 : len(of) // 2]] for of in links.values()]
    few_first = [i for turn in zip_longest(*mixed) for i in turn if i is not None]

    def carry_out(i: int) -> None:
        transfers.start(moves[i], arrays[i], moves[i].kind == "allreduce", "measure")()  # gradients are summed in place
        engine.synchronize()
        transfers.forget()  # or its results would stay, and each time new memory be touched

    def once(i: int) -> float:
        carry_out(links[moves[i].kind, moves[i].axes][0])
        work()
        engine.synchronize()
        start = perf_counter()
        carry_out(i)
        return perf_counter() - start

    order = Random(1)
    groups = {m.axes: {grid.group(m.axes, rank) for rank in range(grid.size)} for m in moves}
    found: list[list[float]] = [[] for _ in moves]  # of each move, by repetition

    def rounds(n: int, chosen: Sequence[int], until: float = inf) -> float:
        """Let some moves take turns; the seconds that all of it took by the clock of rank 0."""
        mine, began = [], perf_counter()
        for _ in range(n):
            for turn, i in enumerate(chosen if until < inf else order.sample(chosen, len(chosen))):
                look = until < inf and turn >= SIZES * len(links) and turn % LOOK == 0
                if look and transport.bcast(perf_counter() - began) > until:
                    break
                mine.append((i, once(i)))
        for ranks in zip(*transport.allgather_obj(mine), strict=True):
            move, times = moves[ranks[0][0]], [seconds for _, seconds in ranks]
            # In a chain of neighbours no rank is the last of all.
            chain = move.kind == "halo" and grid.ways(move.axes) > 2
            of_group = np.median if chain else np.min if crowded else np.mean
            found[ranks[0][0]].append(float(np.mean([of_group([times[r] for r in of]) for of in groups[move.axes]])))
        return transport.bcast(perf_counter() - began)

    everything = range(len(moves))
    # Makes communicators, and counts only where there is no time for another.
    if rounds(1, few_first, LATE * budget) < LATE * budget:
        first, found = found, [[] for _ in moves]
        taken = rounds(1, few_first, LATE * budget)
        may = budget / taken
        least = min(LEAST_ROUNDS, int(LATE * may))
        rounds(min(MOST_ROUNDS, max(least, int(may))) - 1, everything)
        found = [times or one for times, one in zip(found, first, strict=True)]
        left, each = budget, taken / len(moves)
        while left > 0 and len(found[0]) > 2:
            doubtful = [i for of in links.values() if np.mean([unsure(found[i]) for i in of]) > MOVE_UNSURE for i in of]
            doubtful = [i for i in doubtful if len(found[i]) < MOST_REPEATS]
            if not doubtful or MORE_ROUNDS * len(doubtful) * each > left:
                break  # all ranks alike: they have the same times
            left -= rounds(MORE_ROUNDS, doubtful)
    return [(float(np.median(t)), spread(t), unsure(t), len(t)) if t else None for t in found]
