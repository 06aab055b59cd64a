"""Norms of whole parameters of which a rank holds a block, and gradient clipping by their total."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import isfinite, sqrt
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lbpar.errors import TrainingError
from lbpar.runtime.optim.blocks import chunks, flat, sum_of_squares

Sums = NDArray[np.float64]


class Norms(Protocol):
    """Turns sums over local blocks into sums over whole parameters."""

    def squared(self, local: Mapping[str, Sums]) -> dict[str, Sums]:
        """Sum each entry over the distinct blocks of its parameter.

        Collective over all ranks when parameters are split: every rank calls it with the same names, in the same
        order, with entries of the same length.

        Parameters
        ----------
        local : mapping from parameter name to float64 array, shape (k,)
            Sums of squares over this rank's block; k quantities at once (for example of weight and update).

        Returns
        -------
        dict from parameter name to float64 array, shape (k,)
            The same sums over the whole parameter, equal on all ranks to the last bit, so that replicas of a
            parameter stay equal.
        """
        ...


class LocalNorms:
    """Norms where this process holds whole parameters: the identity."""

    def squared(self, local: Mapping[str, Sums]) -> dict[str, Sums]:
        """See `Norms.squared`."""
        return dict(local)


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
    """

    def __init__(self, reduce: Callable[[Sums], Sums], owned: Collection[str]) -> None:
        self._reduce = reduce
        self._owned = frozenset(owned)

    def squared(self, local: Mapping[str, Sums]) -> dict[str, Sums]:
        """See `Norms.squared`; collective over the ranks of ``reduce``."""
        if not local:
            return {}
        packed = np.concatenate([v if name in self._owned else np.zeros_like(v) for name, v in local.items()])
        total = self._reduce(packed)
        bounds = np.cumsum([v.size for v in local.values()])[:-1]
        return dict(zip(local, np.split(total, bounds), strict=True))


def clip_by_global_norm(grads: Mapping[str, NDArray[Any]], max_norm: float, norms: Norms | None = None) -> float:
    """Scale all gradients in place so that the norm of their concatenation is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``: factor ``min(1, max_norm / (norm + 1e-6))``.

    Parameters
    ----------
    grads : mapping from parameter name to array
        C-contiguous local blocks of the (fully summed) gradients.
    max_norm : float
        Bound on the Euclidean norm.
    norms : Norms, optional
        Default: this process holds whole parameters. Collective as `Norms.squared`.

    Returns
    -------
    float
        The norm before clipping.

    Raises
    ------
    TrainingError
        A gradient is not finite; on all ranks alike, with the name of the first such parameter.
    """
    local = {name: np.array([sum_of_squares(flat(name, g))]) for name, g in grads.items()}
    total = 0.0
    for name, square in (norms or LocalNorms()).squared(local).items():
        if not isfinite(square[0]):
            raise TrainingError(
                f"gradient clipping: the gradient of {name} has norm {sqrt_or_nan(square[0])}, expected a finite one. "
                "Lower the learning rate, warm up for longer, or look for bad samples."
            )
        total += float(square[0])
    norm = sqrt(total)
    factor = max_norm / (norm + 1e-6)
    if factor < 1.0:
        for name, g in grads.items():
            for (part,) in chunks(flat(name, g)):
                part *= factor
    return norm


def sqrt_or_nan(square: float) -> float:
    """Square root that passes NaN and infinity on, for messages."""
    return float(np.sqrt(square))
