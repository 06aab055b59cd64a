"""Split softmax and the losses in NumPy. Everything that is summed is float64; see `Engine` for what the names mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lbpar.engine.base import Array, Engine, Float64Array
from lbpar.engine.norm import rows_of, sum_rows

#: Losses that are functions of the error: the function and its slope.
ERRORS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "l1": (np.abs, np.sign),
    "huber": (lambda d: np.where(np.abs(d) <= 1, 0.5 * d * d, np.abs(d) - 0.5), lambda d: np.clip(d, -1, 1)),
}


class Losses(Engine):
    """The engine's split softmax and losses."""

    def softmax_max(self, x: Array) -> Array:
        return np.asarray(x.max(axis=-1, initial=-np.inf))

    def softmax_sums(self, x: Array, m: Array, target: Array, class_start: int) -> Float64Array:
        difference = shifted(x, m)
        result = np.empty((3, *x.shape[:-1]))
        np.exp(difference).sum(axis=-1, out=result[0])
        result[1] = _at_target(difference, target, class_start)
        difference.sum(axis=-1, out=result[2])
        return result

    def cross_entropy_loss(self, sums: Array, smoothing: float, classes: int, scale: float) -> Float64Array:
        each = np.log(sums[0]) - (1 - smoothing) * sums[1]
        if smoothing:  # unsmoothed, a logit of -inf is legal and must not turn into 0 * -inf
            each -= smoothing / classes * sums[2]
        return np.asarray(scale * each.sum())

    def cross_entropy_backward(
        self,
        x: Array,
        m: Array,
        sums: Array,
        target: Array,
        class_start: int,
        smoothing: float,
        classes: int,
        scale: float,
    ) -> Array:
        dx = probabilities(x, m, sums)
        dx -= smoothing / classes
        _add_at_target(dx, target, class_start, smoothing - 1)
        dx *= scale
        return dx.astype(x.dtype, copy=False)

    def softmax_rank(self, x: Array, m: Array, sums: Array, target: Array, class_start: int) -> Float64Array:
        difference, own = shifted(x, m), sums[1][..., None]
        earlier = np.arange(class_start, class_start + x.shape[-1]) < target[..., None]
        before = np.count_nonzero((difference > own) | (earlier & (difference == own)), axis=-1)
        return np.where(np.isfinite(sums[0]), before, np.inf)

    def count_hits(self, rank: Array, tops: Sequence[int]) -> Float64Array:
        return np.array([(rank < k).sum() for k in tops], np.float64)

    def mse_loss(self, x: Array, t: Array, scale: float) -> Float64Array:
        return np.asarray(scale * np.square(x.astype(np.float64) - t).sum())

    def mse_backward(self, x: Array, t: Array, scale: float) -> Array:
        dx = x - t.astype(x.dtype, copy=False)
        dx *= 2 * scale
        return dx

    def error_loss(self, x: Array, t: Array, kind: str, scale: float) -> Float64Array:
        return np.asarray(scale * ERRORS[kind][0](x.astype(np.float64) - t).sum())

    def error_backward(self, x: Array, t: Array, kind: str, scale: float) -> Array:
        return np.asarray(ERRORS[kind][1](x - t.astype(x.dtype, copy=False)) * scale, x.dtype)

    def bce_loss(self, x: Array, t: Array, scale: float) -> Float64Array:
        """Max(x, 0) - x*t + log(1 + exp(-|x|)) never overflows."""
        z = x.astype(np.float64)
        return np.asarray(scale * (np.maximum(z, 0) - z * t + np.log1p(np.exp(-np.abs(z)))).sum())

    def bce_backward(self, x: Array, t: Array, scale: float) -> Array:
        dx = sigmoid(x)
        dx -= t.astype(x.dtype, copy=False)
        dx *= scale
        return dx

    def dice_sums(self, x: Array, m: Array, sums: Array, target: Array, class_start: int) -> Float64Array:
        p = probabilities(x, m, sums)
        local, inside = local_classes(target, class_start, x.shape[-1])
        hit = local[inside]
        result = np.empty((3, x.shape[-1]))
        result[0] = np.bincount(hit, weights=_at_target(p, target, class_start)[inside], minlength=x.shape[-1])
        result[1] = sum_rows(p)
        result[2] = np.bincount(hit, minlength=x.shape[-1])
        return result

    def dice_loss(self, dsums: Array, eps: float, classes: int) -> Float64Array:
        overlap, p, t = dsums
        return np.asarray(((1 - (2 * overlap + eps) / (p + t + eps)) / classes).sum())

    def dice_backward(
        self, x: Array, m: Array, sums: Array, target: Array, class_start: int, dsums: Array, eps: float, classes: int
    ) -> tuple[Array, Float64Array]:
        overlap, p, t = dsums
        union = p + t + eps
        g = np.empty(x.shape)
        g[...] = (2 * overlap + eps) / (union * union) / classes
        _add_at_target(g, target, class_start, -2 / union / classes)
        return g.astype(x.dtype), np.asarray((g * probabilities(x, m, sums)).sum(axis=-1))

    def dice_backward_data(self, x: Array, m: Array, sums: Array, g: Array, inner: Array) -> Array:
        dx = g - inner[..., None]
        dx *= probabilities(x, m, sums)
        return dx.astype(x.dtype, copy=False)


def sigmoid(x: Array) -> Array:
    """``1 / (1 + exp(-x))`` from exp(-|x|), which neither overflows nor loses small values."""
    e, y = np.negative(np.abs(x)), np.minimum(x, 0)
    for a in (e, y):
        np.exp(a, out=a)
    e += 1
    y /= e
    return y


def shifted(x: Array, m: Array) -> Float64Array:
    """``x - m``."""
    return x.astype(np.float64) - m[..., None]


def probabilities(x: Array, m: Array, sums: Array) -> Float64Array:
    """The softmax."""
    p = shifted(x, m)
    np.exp(p, out=p)
    p /= sums[0][..., None]
    return p


def local_classes(target: Array, class_start: int, width: int) -> tuple[Array, Array]:
    """Targets counted from the first local class (int64), and which of them are local."""
    local = target.astype(np.int64) - class_start
    return local, (local >= 0) & (local < width)


def _at_target(values: Float64Array, target: Array, class_start: int) -> Float64Array:
    """values[..., target] where local, else 0; shape of target."""
    local, inside = local_classes(target, class_start, values.shape[-1])
    picked = np.zeros(target.shape)
    picked[inside] = rows_of(values)[np.flatnonzero(inside), local[inside]]
    return picked


def _add_at_target(values: Float64Array, target: Array, class_start: int, amount: float | Array) -> None:
    """Add amount (a number, or one per local class) to values[..., target] in place, where local."""
    local, inside = local_classes(target, class_start, values.shape[-1])
    hit = local[inside]
    rows_of(values)[np.flatnonzero(inside), hit] += amount if np.isscalar(amount) else np.asarray(amount)[hit]
