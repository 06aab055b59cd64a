"""Contrast, brightness, gamma and noise: each value by itself."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from lbpar.data.augment.changed import Array, Changed
from lbpar.layout.runs import Box, index_parts
from lbpar.random import fold, normal, outer_sum


class Toned(Changed):
    """Samples with other contrast, brightness and gamma, and with noise."""

    def _read(self, samples: NDArray[np.int64], box: Box) -> Array:
        x = self._source.read(samples, box)
        for values, n in zip(x, samples.tolist(), strict=True):
            self._tone(n, values)
            for deviation in self._drawn("noise", n):
                self._add_noise(n, values, box, deviation)
        return x

    def _tone(self, n: int, values: Array) -> None:
        contrast, gamma = self._augment.contrast, self._augment.gamma
        for factor in self._drawn("contrast", n):
            assert contrast is not None
            values *= factor
            values += contrast.centre * (1 - factor)
        for shift in self._drawn("brightness", n):
            values += shift
        for power in self._drawn("gamma", n):
            assert gamma is not None
            low, high = gamma.span
            inside = np.clip(values, low, high)
            values -= inside  # what lies beyond the two
            values += ((inside - low) / (high - low)) ** power * (high - low) + low

    def _add_noise(self, n: int, values: Array, box: Box, deviation: float) -> None:
        key, parts = fold(self._key("noise"), 2, n), index_parts(box, self.sample_shape)
        if 0 in values.shape or not deviation:
            return
        step = max(1, (1 << 16) // prod(values.shape[1:]))
        for i in range(0, len(values), step):  # a few planes at a time: numbers in float64 take memory
            values[i : i + step] += deviation * normal(key, outer_sum([parts[0][i : i + step], *parts[1:]]))
