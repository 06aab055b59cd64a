"""Inference on samples that are larger than the network's input: windows that overlap, blended with Gaussian weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.dataset import Dataset
from lbpar.data.patches.cut import Windows

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


Parts = Iterator[tuple[str, tuple[slice, ...], Array | None]]


@dataclass(frozen=True)
class Tiling:
    """Windows that cover a sample of a size, in the order of their origins.

    Attributes
    ----------
    space : tuple of int
        The size.
    origins : list of tuple of int
    weights : list of dict
        Along each dimension, of a window by where it begins.
    """

    space: tuple[int, ...]
    origins: list[tuple[int, ...]]
    weights: list[dict[int, Array]]


def tiling(space: Sequence[int], patch: Sequence[int], overlap: float) -> Tiling:
    """Windows of one size over a sample."""
    begins = [starts(e, p, overlap) for e, p in zip(space, patch, strict=True)]
    weights = [dict(zip(b, shares(e, p, b), strict=True)) for e, p, b in zip(space, patch, begins, strict=True)]
    return Tiling(tuple(space), list(product(*begins)), weights)


def slide(
    data: Dataset, outputs: Mapping[str, Sequence[int]], overlap: float, predict: Callable[[Dataset], Parts]
) -> Parts:
    """The blended outputs for each sample, as (output, where, planes): on rank 0, None elsewhere. Collective over all ranks.

    Rank 0 holds as many planes of each as a window has. The order of sums does not depend on the grid.

    Parameters
    ----------
    data : Dataset
        Its samples may differ in size.
    outputs : mapping
        Shape of what the network makes of a window, by the names of its outputs.
    overlap : float
        Of windows, a part of them.
    predict : callable
        Gives the network's outputs for samples, each in order and in parts.
    """
    *patch, _ = next(iter(outputs.values()))
    sizes = [data.extents(n) for n in range(len(data))]
    of_size = {size: tiling(size, patch, overlap) for size in dict.fromkeys(sizes)}
    origins = [of_size[size].origins for size in sizes]
    windows = Windows(data, patch, origins)
    cut = data.map(lambda _, one: Windows(one, patch, origins))
    slabs: dict[str, Array] = {}
    for name, where, part in predict(cut):
        inner = where[1] if len(where) > 1 else slice(0, patch[0])
        for i, n in enumerate(range(where[0].start, where[0].stop)):
            sample, k = windows.which(n)
            tiles = of_size[sizes[sample]]
            space, weights = tiles.space, tiles.weights
            first, *others = tiles.origins[k]
            if part is not None:
                if name not in slabs:
                    slabs[name] = np.zeros((patch[0], *space[1:], outputs[name][-1]))
                window = part[i] * weights[0][first][inner].reshape(-1, *(1,) * len(space))
                for d, b in enumerate(others, 1):
                    window *= weights[d][b].reshape(-1, *(1,) * (len(space) - d))
                at = (slice(b, b + p) for b, p in zip(others, patch[1:], strict=True))
                slabs[name][(inner, *at)] += window
            following = tiles.origins[k + 1][0] if k + 1 < len(tiles.origins) else space[0]
            if inner.stop < patch[0] or following == first:
                continue
            done = None
            if part is not None:
                slab, ready = slabs[name], following - first
                done = slab[:ready].astype(part.dtype)[None]
                slab[: len(slab) - ready] = slab[ready:].copy()
                slab[len(slab) - ready :] = 0
            if following == space[0]:
                slabs.pop(name, None)  # the next sample may have another size
            yield name, (slice(sample, sample + 1), slice(first, following), *(slice(0, e) for e in space[1:])), done
