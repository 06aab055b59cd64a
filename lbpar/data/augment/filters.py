"""Blur and coarser pixels: a block reads its own place in the original and what lies around it."""

from __future__ import annotations

import numpy as np

from lbpar.data.augment.changed import Array, ByBlock
from lbpar.layout.runs import Box

TRUNCATE = 4.0
"""Where a Gaussian ends, in its deviations (scipy's default)."""


class Blurred(ByBlock):
    """Samples blurred by a Gaussian; beyond a sample's edge it is mirrored."""

    def _block(self, n: int, spans: list[tuple[int, int]], rest: Box, targets: bool) -> Array:
        sigma = next(iter(self._drawn("blur", n)), 0.0)
        if not sigma:
            return self._original(n, spans, rest)
        from scipy.ndimage import gaussian_filter

        halo = int(TRUNCATE * sigma + 0.5)
        index = [_reflected(np.arange(lo - halo, hi + halo), e) for (lo, hi), e in zip(spans, self._space, strict=True)]
        wide = _gathered(self._original(n, [(int(i.min()), int(i.max()) + 1) for i in index], rest), index)
        axes = tuple(range(len(spans)))
        gaussian_filter(wide, sigma, output=wide, mode="constant", truncate=TRUNCATE, axes=axes)
        return wide[tuple(slice(halo, halo + hi - lo) for lo, hi in spans)]


class Coarsened(ByBlock):
    """Samples of which a grid of fewer pixels is kept, with linear interpolation between these."""

    def _block(self, n: int, spans: list[tuple[int, int]], rest: Box, targets: bool) -> Array:
        factor = next(iter(self._drawn("low_resolution", n)), 1.0)
        if factor == 1:
            return self._original(n, spans, rest)
        taps = [coarse_taps(lo, hi, e, factor) for (lo, hi), e in zip(spans, self._space, strict=True)]
        index = [np.concatenate([before, after]) for before, after, _ in taps]
        first = [int(i.min()) for i in index]
        values = self._original(n, [(f, int(i.max()) + 1) for f, i in zip(first, index, strict=True)], rest)
        for d, ((before, after, weight), f) in enumerate(zip(taps, first, strict=True)):
            weight = weight.astype(values.dtype).reshape(-1, *(1,) * (values.ndim - 1 - d))
            values = np.take(values, before - f, d) * (1 - weight) + np.take(values, after - f, d) * weight
        return values


def coarse_taps(lo: int, hi: int, extent: int, factor: float) -> tuple[Array, Array, Array]:
    """Of places lo to hi, the kept pixels before and after each, and the weight of the one after."""
    number = max(1, round(extent / factor))
    at = np.clip((np.arange(lo, hi) + 0.5) * number / extent - 0.5, 0, number - 1)
    before = np.floor(at).astype(np.int64)
    kept = [((np.minimum(before + k, number - 1) + 0.5) * extent / number).astype(np.int64) for k in range(2)]
    return kept[0], kept[1], at - before


def _reflected(index: Array, extent: int) -> Array:
    """Indices beyond an edge, mirrored: c b a | a b c."""
    index = index % (2 * extent)
    return np.minimum(index, 2 * extent - 1 - index)


def _gathered(values: Array, index: list[Array]) -> Array:
    """An array of the places ``index`` of what was read from the smallest of them on."""
    for d, i in enumerate(index):
        if not np.array_equal(i, np.arange(i[0], i[0] + len(i))):
            values = np.take(values, i - i.min(), d)
    return np.ascontiguousarray(values)
