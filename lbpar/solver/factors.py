"""Cost tables over *classes* of configurations, and the (min, +) elimination of one variable.

An edge cost depends on a configuration only through the layout it gives one tensor, so many configurations of a
layer share a row of an edge matrix. A :class:`Factor` stores the distinct rows and columns once, with a map from
configuration to row. Eliminating a variable then costs (classes x classes x configurations) instead of the cube of
the number of configurations, and stays exact.

Repeated blocks of a network give the same tables again and again. Maps and tables are therefore interned and an
elimination is remembered by the identity of what it reads (:class:`Workshop`), so that the twenty-third residual
block costs a dictionary look-up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Cells worked on at a time: 16 MiB of float64 stays near the last-level cache and bounds the memory of any table.
CHUNK_CELLS = 1 << 21


@dataclass(frozen=True, eq=False)
class Classes:
    """A map from configurations to classes: ``index`` has shape (k,) and values in ``range(count)``."""

    index: Ints
    count: int


@dataclass(frozen=True, eq=False)
class Factor:
    """A term of the objective: ``table[maps[0].index[c0], maps[1].index[c1], ...]`` for the variables in ``scope``."""

    scope: tuple[int, ...]
    maps: tuple[Classes, ...]
    table: Floats

    def at(self, choice: Sequence[int]) -> float:
        """Value of the term for ``choice``, one configuration per variable of the problem."""
        where = tuple(m.index[choice[v]] for v, m in zip(self.scope, self.maps, strict=True))
        return float(self.table[where])


@dataclass(frozen=True, eq=False)
class Eliminated:
    """What eliminating a variable left behind: a table over its neighbours and the configuration that attains it."""

    neighbours: tuple[int, ...]
    maps: tuple[Classes, ...]
    table: Floats  # shape: classes of each neighbour
    best: NDArray[np.signedinteger[Any]]  # same shape: the configuration of the eliminated variable
    cells: int  # table cells evaluated

    def recall(self, choice: Sequence[int]) -> int:
        """Best configuration of the eliminated variable, its neighbours' being known."""
        return int(self.best[tuple(m.index[choice[u]] for u, m in zip(self.neighbours, self.maps, strict=True))])


@dataclass
class Problem:
    """Variables 0..n-1 with unary costs (shape (k_v,)) and factors over pairs of variables or more."""

    unary: list[Floats]
    factors: list[Factor]

    def total(self, choice: Sequence[int]) -> float:
        """Objective of ``choice``: unary terms in the order of the variables, then the factors in theirs."""
        value = 0.0
        for u, c in zip(self.unary, choice, strict=True):
            value += float(u[c])
        for f in self.factors:
            value += f.at(choice)
        return value


def row(f: Factor, v: int, choice: Sequence[int]) -> Floats:
    """Costs of ``f`` for every configuration of ``v``, shape (k_v,), the other variables being chosen."""
    where = tuple(slice(None) if u == v else int(m.index[choice[u]]) for u, m in zip(f.scope, f.maps, strict=True))
    return f.table[where][f.maps[f.scope.index(v)].index]


def classify(matrix: Floats) -> tuple[Ints, Ints]:
    """Group equal rows of ``matrix`` (k, m): the class of each row, shape (k,), and one row number per class.

    Rows are told apart by a 64-bit hash of their bits and then compared with their representative, so two rows of
    one class are equal to the last bit. Classes are numbered in order of first appearance.
    """
    rows = np.ascontiguousarray(matrix).reshape(matrix.shape[0], -1)
    if rows.shape[1] == 0:
        return np.zeros(rows.shape[0], np.int64), np.zeros(min(1, rows.shape[0]), np.int64)
    weights = np.random.default_rng(0x5EED).integers(1, 2**63, rows.shape[1], dtype=np.uint64) | np.uint64(1)
    bits = rows.view(np.uint64)
    keys = ((bits ^ (bits >> np.uint64(29))) * weights).sum(axis=1, dtype=np.uint64)
    _, first, index = np.unique(keys, return_index=True, return_inverse=True)
    if not np.array_equal(rows[first][index], rows, equal_nan=True):  # a hash collision: compare whole rows instead
        _, first, index = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(order.size)
    return rank[index.reshape(-1)], first[order]


def relabel(labels: Ints, bound: int) -> tuple[Ints, int]:
    """Number the labels that occur (all below ``bound``) 0, 1, ... in increasing order, and count them."""
    if bound > 1 << 20:
        old, new = np.unique(labels, return_inverse=True)
        return new.reshape(-1), old.size
    present = np.zeros(bound, bool)
    present[labels] = True
    rank = np.cumsum(present) - 1
    return rank[labels], int(rank[-1]) + 1


class Workshop:
    """Interns maps, compresses edge matrices and remembers eliminations for one search."""

    def __init__(self) -> None:
        self._memo: dict[tuple[Any, ...], Any] = {}
        self._alive: list[Any] = []  # identities are keys, so what they belong to must not be collected
        self._by_content: dict[tuple[Any, ...], Any] = {}

    def remember(self, key: tuple[Any, ...], value: Any, *used: Any) -> Any:
        """Store ``value`` under identities of ``used`` objects, which are kept alive."""
        self._memo[key] = value
        self._alive.extend(used)
        return value

    def recall(self, key: tuple[Any, ...]) -> Any:
        """The value stored under ``key``, or None."""
        return self._memo.get(key)

    def intern(self, array: NDArray[Any]) -> NDArray[Any]:
        """One object for all arrays of the same shape, type and bits."""
        known = self._memo.get(("array", id(array)))
        if known is not None:
            return known
        digest = hashlib.blake2b(array.tobytes(), digest_size=20).digest()
        one = self._by_content.setdefault((array.shape, array.dtype.str, digest), array)
        return self.remember(("array", id(array)), one, array, one)

    def classes(self, index: Ints, count: int) -> Classes:
        """One :class:`Classes` for all equal maps."""
        key = ("classes", count, index.tobytes())
        if key not in self._by_content:
            self._by_content[key] = Classes(index, count)
        return self._by_content[key]

    def compress(self, matrix: Floats) -> tuple[Classes, Classes, Floats]:
        """Distinct rows and columns of an edge matrix (k_u, k_v): maps of both sides and the small table."""
        key = ("compress", id(matrix))
        known = self.recall(key)
        if known is not None:
            return known
        rows, first_row = classify(matrix)
        small = matrix[first_row]
        columns, first_column = classify(small.T)
        table = np.ascontiguousarray(small[:, first_column])
        out = (self.classes(rows, len(first_row)), self.classes(columns, len(first_column)), table)
        return self.remember(key, out, matrix)

    def joint(self, maps: Sequence[Classes]) -> tuple[Classes, tuple[Ints, ...] | None]:
        """Coarsest common refinement of ``maps``, and for each map the old class of every new class; None if all equal."""
        unique = list(dict.fromkeys(maps))
        if len(unique) == 1:
            return unique[0], None
        key = ("joint", *map(id, maps))
        known = self.recall(key)
        if known is not None:
            return known
        merged, count = unique[0].index, unique[0].count
        for m in unique[1:]:
            merged, count = relabel(merged * m.count + m.index, count * m.count)
        first = np.empty(count, np.int64)
        first[merged[::-1]] = np.arange(merged.size - 1, -1, -1)  # the first configuration is written last
        out = (self.classes(merged, count), tuple(m.index[first] for m in maps))
        return self.remember(key, out, *maps)

    def cheapest(self, unary: Floats, classes: Classes) -> tuple[Floats, Ints]:
        """For every class the least unary cost and the first configuration that has it."""
        key = ("cheapest", id(unary), id(classes))
        known = self.recall(key)
        if known is not None:
            return known
        if classes.count == unary.size:  # every configuration is a class of its own
            alone = np.empty(unary.size, np.int64)
            alone[classes.index] = np.arange(unary.size)
            return self.remember(key, (unary[alone], alone), unary, classes)
        order = np.lexsort((unary, classes.index))
        starts = np.searchsorted(classes.index[order], np.arange(classes.count))
        best = order[starts]
        return self.remember(key, (unary[best], best), unary, classes)

    def add_unary(self, unary: Floats, table: Floats, classes: Classes) -> Floats:
        """``unary`` plus a table over its classes."""
        key = ("unary", id(unary), id(table), id(classes))
        known = self.recall(key)
        if known is not None:
            return known
        return self.remember(key, unary + table[classes.index], unary, table, classes)

    def eliminate(self, variable: int, unary: Floats, factors: Sequence[Factor]) -> Eliminated:
        """Minimise ``unary[c] + sum of factors`` over the configurations c of ``variable``, for all neighbours'.

        Ties go to the configuration that comes first among the cheapest of its class, classes in order.
        """
        neighbours = tuple(dict.fromkeys(u for f in factors for u in f.scope if u != variable))
        local = {u: i for i, u in enumerate(neighbours)} | {variable: len(neighbours)}
        shape_key = tuple(
            (id(f.table), *((local[u], id(m)) for u, m in zip(f.scope, f.maps, strict=True))) for f in factors
        )
        key = ("eliminate", id(unary), shape_key)
        known: Eliminated | None = self.recall(key)
        if known is not None:
            return Eliminated(neighbours, known.maps, known.table, known.best, 0)
        out = self._eliminate(variable, unary, factors, neighbours)
        self.remember(key, out, unary, *(f.table for f in factors), *(m for f in factors for m in f.maps))
        return out

    def _eliminate(
        self, variable: int, unary: Floats, factors: Sequence[Factor], neighbours: tuple[int, ...]
    ) -> Eliminated:
        axes = (*neighbours, variable)
        joints: list[Classes] = []
        picks: dict[tuple[int, int], Ints] = {}  # (factor, variable): its old class of every joint class
        for u in axes:
            touching = [i for i, f in enumerate(factors) if u in f.scope]
            maps = [factors[i].maps[factors[i].scope.index(u)] for i in touching]
            if maps:
                joint, old = self.joint(maps)
                joints.append(joint)
                if old is not None:
                    picks.update({(i, u): o for i, o in zip(touching, old, strict=True)})
            else:
                joints.append(self.classes(np.zeros(unary.size, np.int64), 1))
        cost, representative = self.cheapest(unary, joints[-1])
        parts = [cost.reshape((1,) * len(neighbours) + (-1,))]
        for i, f in enumerate(factors):
            order = sorted(range(len(f.scope)), key=lambda j: axes.index(f.scope[j]))
            table = f.table
            for axis, u in enumerate(f.scope):
                if (i, u) in picks:
                    table = table.take(picks[i, u], axis=axis)
            table = table.transpose(order)
            present = {f.scope[j] for j in order}
            sizes = iter(table.shape)
            parts.append(table.reshape(tuple(next(sizes) if u in present else 1 for u in axes)))
        shape = tuple(j.count for j in joints)
        small = np.int16 if unary.size < 2**15 else np.int32
        value = np.empty(shape[:-1])
        best = np.empty(shape[:-1], small)
        _contract(parts, shape, representative.astype(small), value, best)
        return Eliminated(neighbours, tuple(joints[:-1]), value, best, int(np.prod(shape, dtype=object)))


def _contract(
    parts: list[Floats], shape: tuple[int, ...], names: NDArray[Any], value: Floats, best: NDArray[Any]
) -> None:
    """``value = min over the last axis of sum(parts)`` and ``best = names[argmin]``, in bounded chunks."""
    rest = 1
    for s in shape[1:]:
        rest *= s
    if len(shape) > 1 and shape[0] * rest > CHUNK_CELLS:
        step = max(1, CHUNK_CELLS // rest)
        for start in range(0, shape[0], step):
            stop = min(shape[0], start + step)
            cut = [p if p.shape[0] == 1 else p[start:stop] for p in parts]
            if stop - start == 1 and len(shape) > 2:
                _contract([p[0] for p in cut], shape[1:], names, value[start], best[start])
            else:
                _reduce(cut, names, (stop - start, *shape[1:]), value[start:stop], best[start:stop])
        return
    _reduce(parts, names, shape, value, best)


def _reduce(
    parts: list[Floats], names: NDArray[Any], shape: tuple[int, ...], value: Floats, best: NDArray[Any]
) -> None:
    parts = sorted(parts, key=lambda p: p.size)
    total = parts[0]
    for p in parts[1:]:
        total = total + p
    total = np.broadcast_to(total, shape)
    if len(shape) == 1:
        where = int(total.argmin())
        value[...] = total[where]
        best[...] = names[where]
        return
    arg = total.argmin(axis=-1)
    rows = total.reshape(-1, shape[-1])
    value[...] = rows[np.arange(len(rows)), arg.reshape(-1)].reshape(value.shape)
    best[...] = names[arg]
