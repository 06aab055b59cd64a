"""Inference on samples that are larger than the network's input: windows that overlap, blended with Gaussian weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.dataset import Dataset
from lbpar.data.patches import Windows

Array = NDArray[Any]
SIGMA = 1 / 8
"""Of the Gaussian, as a part of a window's extent."""
LEAST = 1e-3
"""Weights are no smaller, so that each place has some."""


def starts(extent: int, window: int, overlap: float) -> list[int]:
    """Where windows begin that cover an extent, evenly, with at least so much overlap."""
    step = max(1, int(window * (1 - overlap)))
    number = -(-(extent - window) // step) + 1
    return [round(i * (extent - window) / max(1, number - 1)) for i in range(number)]


def shares(extent: int, window: int, begins: list[int]) -> list[Array]:
    """What each window counts for at its places: Gaussian weights that add up to 1 over the windows."""
    own = np.maximum(np.exp(-0.5 * ((np.arange(window) - (window - 1) / 2) / (SIGMA * window)) ** 2), LEAST)
    total = np.zeros(extent)
    for b in begins:
        total[b : b + window] += own
    return [own / total[b : b + window] for b in begins]


Parts = Iterator[tuple[tuple[slice, ...], Array | None]]


def slide(data: Dataset, output: Sequence[int], overlap: float, predict: Callable[[Dataset], Parts]) -> Parts:
    """The blended output for each sample, as (where, planes): on rank 0, None elsewhere. Collective over all ranks.

    Rank 0 holds as many planes as a window has. The order of sums does not depend on the grid.

    Parameters
    ----------
    data : Dataset
    output : sequence of int
        Shape of what the network makes of a window.
    overlap : float
        Of windows, a part of them.
    predict : callable
        Gives the network's output for samples, in order and in parts.
    """
    (*patch, channels), space = output, data.sample_shape[:-1]
    begins = [starts(e, p, overlap) for e, p in zip(space, patch, strict=True)]
    weights = [dict(zip(b, shares(e, p, b), strict=True)) for e, p, b in zip(space, patch, begins, strict=True)]
    origins = list(product(*begins))
    slab: Array | None = None
    dtype: Any = None
    for where, part in predict(Windows(data, patch, origins)):
        inner = where[1] if len(where) > 1 else slice(0, patch[0])
        for i, n in enumerate(range(where[0].start, where[0].stop)):
            sample, k = divmod(n, len(origins))
            first, *others = origins[k]
            if part is not None:
                if slab is None:
                    slab, dtype = np.zeros((patch[0], *space[1:], channels)), part.dtype
                window = part[i] * weights[0][first][inner].reshape(-1, *(1,) * len(space))
                for d, b in enumerate(others, 1):
                    window *= weights[d][b].reshape(-1, *(1,) * (len(space) - d))
                at = (slice(b, b + p) for b, p in zip(others, patch[1:], strict=True))
                slab[(inner, *at)] += window
            following = origins[k + 1][0] if k + 1 < len(origins) else space[0]
            if inner.stop < patch[0] or following == first:
                continue
            done = None
            if slab is not None:
                ready = following - first
                done = slab[:ready].astype(dtype)
                slab[: len(slab) - ready] = slab[ready:].copy()
                slab[len(slab) - ready :] = 0
            yield (slice(sample, sample + 1), slice(first, following)), None if done is None else done[None]
