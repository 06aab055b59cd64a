"""Cut an ordered network of nodes into stretches and choose every node's configuration, together.

    minimise  most * max over stretches of its cost  +  every * sum over stretches of their costs

A stretch costs what its nodes, the edges inside it and the values that it reads from earlier stretches cost. The method is a relaxation that
branch and bound closes. In the relaxation a stretch may choose, for itself, the configurations of the nodes outside that it reads; then stretches
are independent: each is a search of its own (`lbpar.solver.search`), and the best cuts follow by dynamic programming. Stretches are searched only
where cheap bounds leave them on the best path. If what stretches assumed of a node is not what its own stretch chose, the classes of that node's
configurations are split in two, and both halves are bounded again, best bound first. The answer is exact when the bounds meet.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import comb, prod

import numpy as np
from numpy.typing import NDArray

from lbpar.errors import PlanError
from lbpar.solver.cache import Cache
from lbpar.solver.exact import TooLarge, project
from lbpar.solver.factors import Floats, Ints
from lbpar.solver.search import EdgeTable, compile_problem, minimise

CLOSE = 1e-11  # relative difference that counts as equal
NODES = 120  # subproblems of the branch and bound
WINDOW = 8  # nodes, at least, of the pieces whose least cost bounds that of longer stretches
STRETCHES = 600  # stretches to search; others keep their cheap bounds
SEARCHED = 5_000  # nodes in these, together: what a search takes grows with its nodes

Path = tuple[float, float, list[int]]
"""The largest cost of a stretch, the sum of all, and where each begins."""


@dataclass(frozen=True, eq=False)
class Read:
    """How a node reads a value of an earlier stretch; costs by the configurations of the value's maker and of the reader.

    ``first``: where no node before it in its stretch reads the value; ``again``: where one does.
    """

    name: str
    first: EdgeTable
    again: EdgeTable


@dataclass(frozen=True, eq=False)
class Ordered:
    """A network whose nodes have an order.

    Parameters
    ----------
    costs : mapping
        Of every node a vector of costs, in the order in which stretches are cut.
    edges : mapping
        Tables of pairs of nodes that are in one stretch.
    reads : mapping
        Of nodes whose values others read, the readers of each value in order.
    fixed, each : mapping, optional
        Memory of every node's configurations: once, and for everything in flight.
    """

    costs: Mapping[str, Floats]
    edges: Mapping[tuple[str, str], EdgeTable]
    reads: Mapping[str, Sequence[Sequence[Read]]]
    fixed: Mapping[str, Floats] = field(default_factory=dict)
    each: Mapping[str, Floats] = field(default_factory=dict)

    @cached_property
    def cache(self) -> Cache:
        """What searches of stretches share."""
        return Cache()

    def space(self, parts: int) -> int:
        """Number of plans: cuts times configurations."""
        return comb(len(self.costs) - 1, parts - 1) * prod(c.size for c in self.costs.values())


@dataclass(frozen=True)
class Stretches:
    """The outcome.

    Attributes
    ----------
    starts : where each stretch begins, as numbers of nodes.
    choice : configuration of every node.
    costs : of every stretch.
    total, bound : the objective; nothing is less than ``bound``.
    searched : stretches that were searched.
    """

    starts: list[int]
    choice: dict[str, int]
    costs: list[float]
    total: float
    bound: float
    searched: int

    @property
    def gap(self) -> float:
        """Relative gap; 0 when exact."""
        return max(0.0, self.total - self.bound) / self.total if self.total - self.bound > CLOSE * self.total else 0.0


def cheapest_cuts(stretch: Sequence[Floats], most: float, every: float) -> Path | None:
    """The path of least ``most * max + every * sum``; None if there is none.

    Parameters
    ----------
    stretch : sequence of arrays, shape (n + 1, n + 1)
        For each stretch its cost from a node up to another; inf forbids.
    """

    def path(cap: float) -> Path | None:
        """That of the least sum, no stretch above ``cap``."""
        total, begins = np.full(len(stretch[0]), np.inf), []
        total[0] = 0.0
        for costs in stretch:
            sums = total[:, None] + np.where(costs <= cap, costs, np.inf)
            begins.append(sums.argmin(axis=0))
            total = sums[begins[-1], np.arange(len(total))]
        if not np.isfinite(total[-1]):
            return None
        starts, end, largest = [], len(total) - 1, -np.inf
        for costs, begin in zip(reversed(stretch), reversed(begins), strict=True):
            largest = max(largest, float(costs[begin[end], end]))
            end = int(begin[end])
            starts.append(end)
        return largest, float(total[-1]), starts[::-1]

    def value(p: Path) -> float:
        return most * p[0] + every * p[1]

    loose = path(np.inf)
    if loose is None:
        return None
    worst = np.full(len(stretch[0]), np.inf)
    worst[0] = -np.inf
    for costs in stretch:
        worst = np.maximum(worst[:, None], costs).min(axis=0)
    least = float(worst[-1])
    best = min((p for p in (path(least), loose) if p is not None), key=value)
    cap = (value(best) - every * loose[1]) / most if most else -np.inf
    while cap >= least:
        p = path(cap)
        if p is None or most * least + every * p[1] >= value(best):
            break  # smaller caps have larger sums only
        best = min(best, p, key=value)
        cap = np.nextafter(p[0], -np.inf)
    return best


def cut_and_choose(
    network: Ordered,
    parts: int,
    most: float,
    every: float,
    *,
    pinned: Mapping[str, int] | None = None,
    limits: Sequence[float] | None = None,
    flight: Sequence[int] | None = None,
    gap: float = 0.0,
    known: dict | None = None,
) -> Stretches:
    """Cut into so many stretches and choose configurations.

    Parameters
    ----------
    pinned : mapping, optional
        The stretch that some nodes must be in.
    limits : sequence of float, optional
        Most memory of each stretch.
    flight : sequence of int, optional
        Of each stretch how many times ``each`` is kept.
    gap : float
        Stop once the answer is proven within this relative gap; 0 asks for the optimum.
    known : dict, optional
        Searched stretches, which searches of one network without limits may share.

    Raises
    ------
    PlanError
        No cut gives the pinned nodes their stretches, or nothing fits in the limits.
    """
    return _Search(network, parts, most, every, pinned or {}, limits, flight, {} if known is None else known).run(gap)


@dataclass(frozen=True)
class _Found:
    """A searched stretch: nothing of it costs less than ``bound``; its choice, that of nodes outside included."""

    bound: float
    choice: dict[str, int]


Allowed = Mapping[str, frozenset[int]]
"""Of some nodes the classes that their configurations may have."""


@dataclass
class _Part:
    """A subproblem: what is allowed, lower bounds of stretches, which of them were searched, and what came of it."""

    allowed: Allowed
    costs: Floats
    searched: NDArray[np.bool_]
    bound: float = -np.inf
    split: tuple[str, frozenset[int]] | None = None


class _Search:
    def __init__(
        self,
        network: Ordered,
        parts: int,
        most: float,
        every: float,
        pinned: Mapping[str, int],
        limits: Sequence[float] | None,
        flight: Sequence[int] | None,
        known: dict,
    ) -> None:
        self.net, self.parts, self.most, self.every = network, parts, most, every
        self.limits, self.flight, self.known = limits, flight or [1] * parts, known
        self.names = list(network.costs)
        self.place = {n: i for i, n in enumerate(self.names)}
        self.classes = {u: self._classes(u) for u in network.reads}
        self.best: Stretches | None = None
        self.count, self.size = 0, 0
        n = len(self.names)
        wrong = [[pinned.get(m, s) != s for m in self.names] for s in range(parts)]
        sums = [np.concatenate([[0], np.cumsum(w)]) for w in wrong]
        self.possible = [(w[None, :] == w[:, None]) & np.triu(np.ones((n + 1, n + 1), bool), 1) for w in sums]

    def _classes(self, u: str) -> Ints:
        """Configurations of a node that are the same to all that read it from other stretches have one number."""
        maps = {id(t.rows): t.rows for value in self.net.reads[u] for r in value for t in (r.first, r.again)}
        return np.unique(np.stack(list(maps.values())), axis=1, return_inverse=True)[1].reshape(-1)

    def run(self, gap: float) -> Stretches:
        n, layers = len(self.names), self.parts if self.limits is not None else 1
        root = _Part({}, np.tile(self._cheap(), (layers, 1, 1)), np.zeros((layers, n + 1, n + 1), bool))
        self.relax(root)
        if not np.isfinite(root.bound):
            raise PlanError("search: no cut gives every stretch a node, the nodes their stretches, and all of it room")
        heap, number = [(root.bound, 0, root)], 0
        while heap and not self.closed(heap[0][0], gap) and number < NODES:
            part = heapq.heappop(heap)[2]
            if part.split is None:  # only an inexact search can leave a bound below the best here
                heapq.heappush(heap, (part.bound, 0, part))
                break
            u, cheap = part.split
            now = part.allowed.get(u, frozenset(self.classes[u].tolist()))
            for half in (now & cheap, now - cheap):
                number += 1
                touched = self._touched(u)
                child = _Part({**part.allowed, u: half}, part.costs.copy(), part.searched & ~touched)
                if half and self.relax(child) < np.inf and not self.closed(child.bound):
                    heapq.heappush(heap, (child.bound, number, child))
        if self.best is None:
            raise PlanError("search: no choice was found within the limits of memory")
        best = self.best
        bound = min(best.total, heap[0][0]) if heap else best.total
        return Stretches(best.starts, best.choice, best.costs, best.total, bound, self.count)

    def closed(self, bound: float, gap: float = 0.0) -> bool:
        return self.best is not None and bound >= self.best.total * (1 - max(gap, CLOSE))

    def _touched(self, u: str) -> NDArray[np.bool_]:
        """Stretches that have a node or read it from outside."""
        at, n = self.place[u], len(self.names)
        last = max(self.place[r.name] for value in self.net.reads[u] for r in value)
        begin, end = np.arange(n + 1)[:, None], np.arange(n + 1)[None, :]
        return ((begin <= at) & (end > at)) | ((begin > at) & (begin <= last))

    def _cheap(self) -> Floats:
        """Lower bounds of all stretches, from the least of every node and table."""
        n = len(self.names)
        least = np.concatenate([[0.0], np.cumsum([c.min() for c in self.net.costs.values()])])
        out = least[None, :] - least[:, None]
        for (u, v), e in self.net.edges.items():
            a, b = sorted((self.place[u], self.place[v]))
            out[: a + 1, b + 1 :] += e.table.min()
        inside = out.copy()
        for u, reader in ((u, value) for u, values in self.net.reads.items() for value in values):
            before = self.place[u]
            for r in reader:
                b = self.place[r.name]
                out[before + 1 : b + 1, b + 1 :] += r.first.table.min()
                out[self.place[u] + 1 : before + 1, b + 1 :] += r.again.table.min()
                before = b
        width = max(WINDOW, n // (2 * self.parts))
        joints = self._joints()
        out = np.maximum(out, self._from_joints(joints))
        if np.diff([-1, *joints, n - 1]).max() <= width:  # little is left to know
            return out
        gain = np.zeros_like(out)  # by which searched pieces of a stretch, side by side, cost more
        for end in range(1, n + 1):
            begin = max(0, end - width)
            if (
                end % max(1, width // 8) and end < n
            ):  # in long networks not every piece, which would take most of the time
                gain[:, end] = gain[:, end - 1]
                continue
            if (begin, end) not in self.known:
                costs = {m: self.net.costs[m] for m in self.names[begin:end]}
                self.known[begin, end] = self._minimise(list(costs), costs, {})
            piece = self.known[begin, end].bound - inside[begin, end]
            gain[:, end] = gain[:, end - 1]
            gain[: begin + 1, end] = np.maximum(gain[: begin + 1, end], gain[: begin + 1, begin] + piece)
        out += gain
        return out

    def _joints(self) -> list[int]:
        """Nodes that alone are read by what comes behind them."""
        last = list(range(len(self.names)))
        pairs = [*self.net.edges, *((u, r.name) for u, values in self.net.reads.items() for v in values for r in v)]
        for u, v in pairs:
            a, b = sorted((self.place[u], self.place[v]))
            last[a] = max(last[a], b)
        reach = np.maximum.accumulate([-1, *last[:-1]])  # how far what comes before a node is read
        return [i for i in range(len(last) - 1) if reach[i] <= i < last[i]]

    def _from_joints(self, joints: Sequence[int]) -> Floats:
        """What stretches that hold a joint cost, nodes outside chosen freely: exactly, since what is behind a joint knows only its configuration.

        A stretch is its first block up to a joint, whole blocks from joint to joint, and the beginning of a block.
        """
        if "joints" not in self.known:
            n = len(self.names)
            self.known["joints"] = np.zeros((n + 1, n + 1))
            with suppress(TooLarge):  # of a wide block, and of what lies behind it, only cheaper bounds are known
                self._span(joints, self.known["joints"])
        return self.known["joints"]

    def _span(self, joints: Sequence[int], out: Floats) -> None:
        n, before = len(self.names), -1
        begun = np.empty((0, 1))  # of every start so far the least cost up to the last joint, by its configuration
        for joint in (*joints, n - 1):
            if before >= 0:
                ends = np.arange(before + 1, joint + 2)
                tails = [self._project(before + 1, int(j), [before], before) for j in ends]
                out[: before + 1, ends] = (begun[:, :, None] + np.stack(tails, axis=1)[None]).min(axis=1)
                if joint in joints:
                    whole = self._project(before + 1, joint + 1, [before, joint], before)
                    begun = (begun[:, :, None] + whole[None]).min(axis=1)
            if joint in joints:
                heads = [self._project(i, joint + 1, [joint]) for i in range(before + 1, joint + 1)]
                begun = np.concatenate([begun, heads]) if before >= 0 else np.stack(heads)
            before = joint

    def _project(self, i: int, j: int, kept: Sequence[int], joint: int | None = None) -> Floats:
        """Least cost of the nodes from i up to j for the configurations of some of them. Of nodes outside, those that are read are chosen
        freely, or only a joint before them is there, which costs nothing itself."""
        inside = self.names[i:j]
        costs = {m: self.net.costs[m] for m in inside}
        tables: dict[tuple[str, str], EdgeTable] = {}
        outside = self._outside(i, j) if joint is None else [self.names[joint]]
        for u in outside:
            costs[u] = np.zeros(self.net.costs[u].size)
            if joint is None:
                tables |= {(u, v): t for v, t in self._tables(u, i, j).items()}
        within = set(inside) | (set() if joint is None else set(outside))
        tables |= {e: t for e, t in self.net.edges.items() if within.issuperset(e)}
        names, problem, cache = compile_problem(costs, tables, self.net.cache)
        return project(problem, [names.index(self.names[k]) for k in kept], cache)

    def relax(self, part: _Part) -> float:
        """Bound a subproblem, improve the best by what it finds, and say where it is to be split."""
        shared = self.limits is None
        while True:
            layers = [0 if shared else s for s in range(self.parts)]
            costs = [np.where(p, part.costs[k], np.inf) for p, k in zip(self.possible, layers, strict=True)]
            path = cheapest_cuts(costs, self.most, self.every)
            if path is None:
                part.bound = np.inf
                return part.bound
            part.bound = self.most * path[0] + self.every * path[1]
            if self.closed(part.bound):
                return part.bound
            if self.count > STRETCHES or self.size > SEARCHED:  # only what was searched can be chosen
                costs = [np.where(part.searched[k], c, np.inf) for c, k in zip(costs, layers, strict=True)]
                path = cheapest_cuts(costs, self.most, self.every)
                if path is None:
                    return part.bound
            stretches = list(zip(range(self.parts), path[2], [*path[2][1:], len(self.names)], strict=True))
            new = [(k, s, i, j) for k, (s, i, j) in zip(layers, stretches, strict=True) if not part.searched[k, i, j]]
            if not new:
                break
            for k, s, i, j in new:
                part.searched[k, i, j] = True
                part.costs[k, i, j] = max(part.costs[k, i, j], self.search(s, i, j, part.allowed).bound)
        found = [self.search(s, i, j, part.allowed).choice for s, i, j in stretches]
        own = {n: c[n] for (_, i, j), c in zip(stretches, found, strict=True) for n in self.names[i:j]}
        largest = 0.0
        for (_, i, j), c in zip(stretches, found, strict=True):
            for u in self._outside(i, j):
                more = self._crossing(u, i, j, c) - self._crossing(u, i, j, c)[c[u]]
                if more[own[u]] > largest:
                    largest = float(more[own[u]])
                    part.split = u, frozenset(self.classes[u][more <= largest / 2].tolist())
        self.offer(stretches, found, own, part.allowed)
        return part.bound

    def offer(
        self,
        stretches: Sequence[tuple[int, int, int]],
        found: Sequence[dict[str, int]],
        own: dict[str, int],
        allowed: Allowed,
    ) -> None:
        """Let every stretch, in order, know what those before it chose, and keep the outcome if it is better than the best."""
        choice: dict[str, int] = {}
        for (s, i, j), c in zip(stretches, found, strict=True):
            outside = {u: choice[u] for u in self._outside(i, j)}
            if any(c[u] != k for u, k in outside.items()):
                c = self.search(s, i, j, allowed, outside).choice
                if not c:
                    return
            choice |= {n: c[n] for n in self.names[i:j]}
        candidates = [choice, own]
        for s, i, j in stretches if choice != own else ():  # now those before know what their readers pay
            outside = {u: choice[u] for u in self._outside(i, j)}
            later = {
                u: sum((self._crossing(u, a, b, choice) for _, a, b in stretches if a >= j), np.zeros(c.size))
                for u, c in self.net.costs.items()
                if i <= self.place[u] < j and u in self.net.reads
            }
            c = self.search(s, i, j, allowed, outside, later).choice
            choice = choice | {n: c[n] for n in self.names[i:j] if c}
            candidates.append(choice)
        for candidate in candidates:
            costs = [self.cost(i, j, candidate) for _, i, j in stretches]
            total = self.most * max(costs) + self.every * sum(costs)
            if self.best is None or total < self.best.total:
                self.best = Stretches([i for _, i, _ in stretches], dict(candidate), costs, total, total, 0)

    def _outside(self, i: int, j: int) -> list[str]:
        """Nodes before a stretch that it reads."""
        at = self.place
        read = ((u, r) for u, values in self.net.reads.items() if at[u] < i for value in values for r in value)
        return list(dict.fromkeys(u for u, r in read if i <= at[r.name] < j))

    def _tables(self, u: str, i: int, j: int) -> dict[str, EdgeTable]:
        """What reading a node's values from outside costs a stretch: a table for each reader."""
        out: dict[str, EdgeTable] = {}
        for value in self.net.reads[u]:
            for k, r in enumerate(r for r in value if i <= self.place[r.name] < j):
                table = r.again if k else r.first
                if r.name in out:  # two values of one node
                    both = out[r.name].full() + table.full()
                    table = EdgeTable(both, *(np.arange(size) for size in both.shape))
                out[r.name] = table
        return out

    def _crossing(self, u: str, i: int, j: int, choice: Mapping[str, int]) -> Floats:
        """What a stretch pays for reading a node, for all configurations of it."""
        read = (t.table[t.rows, t.columns[choice[v]]] for v, t in self._tables(u, i, j).items())
        return sum(read, np.zeros(self.net.costs[u].size))

    def cost(self, i: int, j: int, choice: Mapping[str, int]) -> float:
        """Of a stretch, for a choice of all nodes."""
        inside = set(self.names[i:j])
        out = sum(float(self.net.costs[n][choice[n]]) for n in self.names[i:j])
        for (u, v), e in self.net.edges.items():
            if u in inside and v in inside:
                out += float(e.table[e.rows[choice[u]], e.columns[choice[v]]])
        return out + sum(float(self._crossing(u, i, j, choice)[choice[u]]) for u in self._outside(i, j))

    def search(
        self,
        s: int,
        i: int,
        j: int,
        allowed: Allowed,
        given: Mapping[str, int] | None = None,
        later: Mapping[str, Floats] | None = None,
    ) -> _Found:
        """The best of a stretch, nodes outside chosen freely among what is allowed, or given; ``later`` adds what others pay for its nodes."""
        inside, outside = self.names[i:j], self._outside(i, j)
        layer = s if self.limits is not None else 0
        key = (
            layer,
            i,
            j,
            tuple((n, allowed[n]) for n in (*outside, *inside) if n in allowed),
            tuple((given or {}).items()),
        )
        if key in self.known and not later:
            return self.known[key]
        self.count, self.size = self.count + 1, self.size + j - i
        costs = {n: self._within(n, allowed, self.net.costs[n]) for n in inside}
        costs |= {n: costs[n] + extra for n, extra in (later or {}).items()}
        for u in outside:
            costs[u] = self._within(u, allowed, np.zeros(self.net.costs[u].size))
            if given is not None:
                costs[u] = np.where(np.arange(costs[u].size) == given[u], 0.0, np.inf)
        tables = {(u, v): t for u in outside for v, t in self._tables(u, i, j).items()}
        memory = None
        if self.limits is not None:
            memory = {n: self.net.fixed[n] + self.flight[s] * self.net.each[n] for n in inside}
        found = self._minimise(inside, costs, tables, memory, None if self.limits is None else self.limits[s])
        if not later:
            self.known[key] = found
        return found

    def _minimise(
        self,
        inside: Sequence[str],
        costs: Mapping[str, Floats],
        tables: Mapping[tuple[str, str], EdgeTable],
        memory: Mapping[str, Floats] | None = None,
        limit: float | None = None,
    ) -> _Found:
        within = set(inside)
        tables = {e: t for e, t in self.net.edges.items() if within.issuperset(e)} | dict(tables)
        try:
            found = minimise(costs, tables, memory=memory, limit=limit, cache=self.net.cache)
        except PlanError:  # nothing fits, or nothing is allowed
            return _Found(np.inf, {})
        return _Found(found.bound, found.choice)

    def _within(self, n: str, allowed: Allowed, costs: Floats) -> Floats:
        if n not in allowed:
            return costs
        return np.where(np.isin(self.classes[n], list(allowed[n])), costs, np.inf)
