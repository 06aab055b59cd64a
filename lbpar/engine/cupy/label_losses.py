"""Losses with a factor per position, Dice over regions, and what metrics follow from (``kernels/label_losses.cu``)."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any

import numpy as np

from lbpar.engine.cupy.kernels import SHARED, THREADS, kind_of
from lbpar.engine.cupy.losses import NOBODY, Losses, _integers
from lbpar.engine.cupy.norms import F64, LEAST, _matrix, _parameters
from lbpar.engine.device import Array, Float64Array

FILE = "label_losses.cu"
MOST_ALONG = 65535


class LabelLosses(Losses):
    """The part of the engine that ends networks whose classes or positions differ in weight: `lbpar.engine.host.label_losses`."""

    def label_factors(
        self, target: Array, class_weights: Sequence[float], ignore: int | None
    ) -> tuple[Float64Array, Float64Array]:
        factors, n = self.empty(target.shape, F64), target.size
        blocks = max(1, self.kernels.blocks(n))
        partial, total = self.empty((blocks,), F64), self.empty((), F64)
        args = (self._dense(target), self._numbers(class_weights), _label(ignore), len(class_weights), n)
        self._label(f"label_factors<{kind_of(target.dtype)}>", (blocks,), factors, partial, *args)
        self._loss("sum_partials", (1,), total, partial, 1.0, blocks)
        return factors, total

    def class_spread(self, x: Array, m: Array, class_weights: Sequence[float]) -> Float64Array:
        args = (*self._both(x, m), self._numbers(class_weights))
        return self._by_rows(FILE, "class_spread", x, self.empty(x.shape[:-1], F64), *args)

    def weighed_entropy_loss(
        self, sums: Array, factors: Array, total: Array, gamma: float, scale: float
    ) -> Float64Array:
        return self._entropy(sums, factors, total, None, gamma, scale, 0.0, (1.0,))

    def smoothed_entropy_loss(
        self,
        sums: Array,
        factors: Array,
        total: Array,
        spread: Array,
        gamma: float,
        scale: float,
        smoothing: float,
        class_weights: Sequence[float],
    ) -> Float64Array:
        return self._entropy(sums, factors, total, spread, gamma, scale, smoothing, class_weights)

    def _entropy(
        self,
        sums: Array,
        factors: Array,
        total: Array,
        spread: Array | None,
        gamma: float,
        scale: float,
        smoothing: float,
        class_weights: Sequence[float],
    ) -> Float64Array:
        n, loss = factors.size, self.empty((), F64)
        blocks = max(1, self.kernels.blocks(n))
        partial, more = self.empty((blocks,), F64), None if spread is None else self._as(spread, F64)
        args = (partial, self._as(sums, F64), self._as(factors, F64), more, float(gamma))
        self._label("entropy_partials", (blocks,), *args, *_smooth(smoothing, class_weights), n)
        self._label("entropy_loss", (1,), loss, partial, self._as(total, F64), float(scale), blocks)
        return loss

    def weighed_entropy_backward(
        self,
        x: Array,
        m: Array,
        sums: Array,
        target: Array,
        factors: Array,
        total: Array,
        class_start: int,
        gamma: float,
        scale: float,
        smoothing: float,
        class_weights: Sequence[float],
    ) -> Array:
        weights = self._numbers(class_weights[class_start : class_start + x.shape[-1]])
        arrays = (
            *self._both(x, m),
            self._as(sums, F64),
            self._dense(target),
            self._as(factors, F64),
            self._as(total, F64),
        )
        args = (weights, class_start, float(gamma), float(scale), *_smooth(smoothing, class_weights))
        return self._by_rows(FILE, "weighed_entropy_backward", x, self._like(x), *arrays, *args, more=_integers(target))

    def region_sums(
        self, x: Array, m: Array, sums: Array, target: Array, class_start: int, ignore: int | None, per_sample: bool
    ) -> Float64Array:
        rows, channels = _matrix(x)
        samples = x.shape[0] if per_sample else 1
        positions = rows // max(samples, 1)
        chunks = max(1, min(4 * self._card.processors // max(samples, 1), positions // LEAST))
        each = max(1, -(-positions // chunks))
        chunks, along = max(1, -(-positions // each)), min(samples, MOST_ALONG)
        partial, dsums = self.empty((samples, chunks, 3, channels), F64), self.empty((3, samples, channels), F64)
        arrays = (partial, *self._both(x, m), self._as(sums, F64), self._dense(target))
        args = (*arrays, class_start, _label(ignore), samples, positions, channels, each)
        name = f"region_partials<{kind_of(x.dtype)}{_integers(target)}>"
        self._label(name, (-(-channels // 64), chunks, along), *args)
        self._label("region_sums", (-(-channels // 32), 1, along), dsums, partial, samples, channels, chunks)
        return dsums if per_sample else dsums.reshape((3, channels))

    def region_loss(self, dsums: Array, factors: Sequence[float], eps: float) -> Float64Array:
        loss, channels = self.empty((), F64), dsums.shape[-1]
        args = (self._as(dsums, F64), self._numbers(factors), float(eps), dsums[0].size // max(channels, 1), channels)
        self._label("region_loss", (1,), loss, *args)
        return loss

    def region_backward(
        self,
        x: Array,
        m: Array,
        sums: Array,
        target: Array,
        dsums: Array,
        class_start: int,
        factors: Sequence[float],
        eps: float,
        ignore: int | None,
    ) -> tuple[Array, Float64Array]:
        g, inner, (rows, channels) = self._like(x), self.empty(x.shape[:-1], F64), _matrix(x)
        samples = x.shape[0] if len(dsums.shape) == 3 else 1
        slopes, of = self.empty((2, samples, channels), _parameters(x)), (samples, channels)
        grid = (self.kernels.blocks(samples * channels),)
        args = (slopes, self._as(dsums, F64), self._numbers(factors), float(eps), *of)
        self._label(f"region_slopes<{kind_of(slopes.dtype)}>", grid, *args)
        arrays = (inner, *self._both(x, m), self._as(sums, F64), self._dense(target), slopes)
        more = (class_start, _label(ignore), samples, rows // max(samples, 1))
        self._by_rows(FILE, "region_backward", x, g, *arrays, *more, more=_integers(target))
        return g, inner

    def dice_sums(self, x: Array, m: Array, sums: Array, target: Array, class_start: int) -> Float64Array:
        return self.region_sums(x, m, sums, target, class_start, None, False)

    def dice_loss(self, dsums: Array, eps: float, classes: int) -> Float64Array:
        return self.region_loss(dsums, (1 / classes,) * dsums.shape[-1], eps)

    def dice_backward(
        self, x: Array, m: Array, sums: Array, target: Array, class_start: int, dsums: Array, eps: float, classes: int
    ) -> tuple[Array, Float64Array]:
        factors = (1 / classes,) * x.shape[-1]
        return self.region_backward(x, m, sums, target, dsums, class_start, factors, eps, None)

    def dice_backward_data(self, x: Array, m: Array, sums: Array, g: Array, inner: Array) -> Array:
        args = (*self._both(x, m), self._as(sums, F64), self._dense(g), self._as(inner, F64))
        return self._by_rows(FILE, "region_backward_data", x, self._like(x), *args)

    def count_known_hits(self, rank: Array, target: Array, tops: Sequence[int], ignore: int) -> Float64Array:
        return self._count_hits(rank, target, (*tops, nan), ignore)

    def softmax_first(self, x: Array, m: Array, class_start: int) -> Float64Array:
        first = self.empty(x.shape[:-1], F64)
        return self._by_rows(FILE, "softmax_first", x, first, *self._both(x, m), class_start)

    def class_counts(self, first: Array, target: Array, classes: int, ignore: int | None) -> Float64Array:
        return self._counts(self.empty((3, classes), F64), first, target, ignore)

    def sample_counts(self, first: Array, target: Array, classes: int, ignore: int | None) -> Float64Array:
        samples = target.shape[0]
        counts = self.empty((samples, 3, classes), F64)
        for n in range(samples):
            self._counts(counts[n], first[n], target[n], ignore)
        return counts

    def _counts(self, counts: Float64Array, first: Array, target: Array, ignore: int | None) -> Float64Array:
        classes = counts.shape[1]
        table = self.class_confusion(first, target, classes, ignore)
        self._label("class_counts", (self.kernels.blocks(classes),), counts, table, classes)
        return counts

    def dice_of_samples(self, counts: Array) -> Float64Array:
        samples, _, classes = counts.shape
        dice = self.empty((2, classes), F64)
        self._label("dice_of_samples", (self.kernels.blocks(classes),), dice, self._as(counts, F64), classes, samples)
        return dice

    def class_confusion(self, first: Array, target: Array, classes: int, ignore: int | None) -> Float64Array:
        table, bins = self.zeros((classes, classes), F64), 4 * classes * classes
        mine = bins <= SHARED
        args = (table, self._as(first, F64), self._dense(target), _label(ignore), classes, mine, target.size)
        name, grid = f"class_confusion<{kind_of(target.dtype)}>", (self.kernels.blocks(target.size),)
        self.kernels.launch(FILE, name, grid, (THREADS,), args, bins if mine else 0)
        return table

    def error_sums(self, x: Array, t: Array) -> Float64Array:
        n, sums = x.size, self.empty((2,), F64)
        blocks = max(1, self.kernels.blocks(n))
        partial, name = self.empty((2, blocks), F64), f"error_partials_of_both<{kind_of(x.dtype)}, {kind_of(t.dtype)}>"
        self._label(name, (blocks, 2), partial, self._dense(x), self._dense(t), n)
        self._loss("sum_partials", (1, 2), sums, partial, 1.0, blocks)
        return sums

    def _label(self, name: str, grid: tuple[int, ...], *args: Any) -> None:
        self.kernels.launch(FILE, name, grid, (THREADS,), args)

    def _numbers(self, values: Sequence[float]) -> Float64Array:
        """Numbers that are the same in every step, on the device."""
        key = tuple(values)
        return self._uploaded(("numbers", key), key, lambda: np.array(key, np.float64))


def _label(ignore: int | None) -> int:
    """A label that is ignored, as kernels take it."""
    return NOBODY if ignore is None else ignore


def _smooth(smoothing: float, class_weights: Sequence[float]) -> tuple[float, float, float]:
    """What each class gets of the target, as part of its weight; the part of the target that is spread; the sum of weights."""
    return smoothing / len(class_weights), float(smoothing), float(sum(class_weights))
