"""Norms of whole parameters of which a rank holds a block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np

from lbpar.engine.base import Engine
from lbpar.engine.device import Array


class Norms(Protocol):
    """Turns sums over local blocks into sums over whole parameters."""

    def squared(self, names: Sequence[str], squares: Array) -> Array:
        """Sum each row over the distinct blocks of its parameter.

        Collective over all ranks when parameters are split: every rank calls it with the same names and as many columns.

        Parameters
        ----------
        names : sequence of str
            Parameters.
        squares : float64 (len(names), k)
            Sums of squares over this rank's blocks, of k quantities (for example weight and update); may be overwritten.

        Returns
        -------
        float64 (len(names), k)
            The same sums over whole parameters, equal on all ranks to the last bit, so that replicas stay equal.
        """
        ...


class LocalNorms:
    """Norms where this process holds whole parameters: the identity."""

    def squared(self, names: Sequence[str], squares: Array) -> Array:
        """See `Norms.squared`."""
        return squares


class ReducedNorms:
    """Norms by one reduction of one small vector, whatever the layouts of the parameters.

    A block that several ranks hold (replicas) must be counted once: exactly one of them owns it.

    Parameters
    ----------
    reduce : callable
        Takes a 1-D float64 array, returns its elementwise sum over **all** ranks (an allreduce; it may reuse the
        array). Called once per `squared`, so the cost is one latency per step.
    owned : collection of str
        Names of the parameters whose block this rank counts, for example those where its coordinate is zero on
        every axis along which the parameter is replicated.
    engine : Engine
        Holds the arrays.
    """

    def __init__(self, reduce: Callable[[Array], Array], owned: Collection[str], engine: Engine) -> None:
        self._reduce, self._owned, self._engine = reduce, frozenset(owned), engine

    def squared(self, names: Sequence[str], squares: Array) -> Array:
        """See `Norms.squared`; collective over the ranks of ``reduce``."""
        counted = self._engine.zeros(squares.shape, squares.dtype)
        mine = np.array([i for i, name in enumerate(names) if name in self._owned], np.int64)
        rows = (mine, slice(None))
        self._engine.unpack(self._engine.pack(squares, rows), counted, rows)
        return self._reduce(counted.reshape(-1)).reshape(squares.shape)
