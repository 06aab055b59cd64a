"""What occurs again is kept once: maps, tables, and the results of working on them.

Repeated blocks of a network give the same tables again and again. They become one object here, and a result is
remembered by the identity of what it was made from, so that the twenty-third residual block costs a dictionary look-up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lbpar.solver.factors import Classes, Floats, Ints

F = TypeVar("F", bound=Callable[..., Any])


def remembered(method: F) -> F:
    """A method of `Cache` that is called once for the same objects; they are kept alive, since their identity is the key."""

    @wraps(method)
    def call(self: Cache, *args: Any) -> Any:
        key = (method.__name__, *map(id, args))
        if key not in self.results:
            self.results[key] = method(self, *args), args
        return self.results[key][0]

    return call  # type: ignore[return-value]


class Cache:
    """Arrays, maps and results of one search."""

    def __init__(self) -> None:
        self.results: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self._by_content: dict[tuple[Any, ...], Any] = {}

    @remembered
    def intern(self, array: NDArray[Any]) -> NDArray[Any]:
        """One object for all arrays of the same shape, type and bits."""
        digest = hashlib.blake2b(array.tobytes(), digest_size=20).digest()
        return self._by_content.setdefault((array.shape, array.dtype.str, digest), array)

    def classes(self, index: Ints, count: int) -> Classes:
        """One object for all equal maps."""
        return self._by_content.setdefault((count, index.tobytes()), Classes(index, count))

    @remembered
    def compress(self, matrix: Floats) -> tuple[Classes, Classes, Floats]:
        """Distinct rows and columns of an edge matrix (k_u, k_v): maps of both sides and the small table."""
        rows, first_row = classify(matrix)
        small = matrix[first_row]
        columns, first_column = classify(small.T)
        table = np.ascontiguousarray(small[:, first_column])
        return self.classes(rows, len(first_row)), self.classes(columns, len(first_column)), table

    @remembered
    def joint(self, *maps: Classes) -> tuple[Classes, tuple[Ints, ...]]:
        """Coarsest common refinement of ``maps``, and for each map the old class of every new class; none if all are equal."""
        unique = list(dict.fromkeys(maps))
        if len(unique) == 1:
            return unique[0], ()
        merged, count = unique[0].index, unique[0].count
        for m in unique[1:]:
            merged, count = relabel(merged * m.count + m.index, count * m.count)
        first = np.empty(count, np.int64)
        first[merged[::-1]] = np.arange(merged.size - 1, -1, -1)  # the first configuration is written last
        return self.classes(merged, count), tuple(m.index[first] for m in maps)

    @remembered
    def cheapest(self, unary: Floats, classes: Classes) -> tuple[Floats, Ints]:
        """For every class the least unary cost and the first configuration that has it."""
        order = np.lexsort((unary, classes.index))
        best = order[np.searchsorted(classes.index[order], np.arange(classes.count))]
        return unary[best], best

    @remembered
    def add(self, unary: Floats, table: Floats, classes: Classes) -> Floats:
        """``unary`` plus a table over its classes."""
        return unary + table[classes.index]


def classify(matrix: Floats) -> tuple[Ints, Ints]:
    """Group equal rows of ``matrix`` (k, m): the class of each row, shape (k,), and one row number per class.

    Rows are told apart by a 64-bit hash of their bits and then compared with their representative, so two rows of
    one class are equal to the last bit. Classes are numbered in order of first appearance.
    """
    rows = np.ascontiguousarray(matrix)
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
