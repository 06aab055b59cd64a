"""Losses over classes with a factor per position, and what metrics follow from: NumPy functions for `Engine.on_host`.

Names are those of `Engine`'s losses: P stands for x.shape[:-1], the positions, and the last dimension of x holds the classes from
``class_start`` on. Positions whose target is ``ignore`` (None: no label) count nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lbpar.engine.base import Array, Float64Array
from lbpar.engine.losses import local_classes, probabilities, shifted
from lbpar.engine.norm import rows_of

# Losses with a factor per position.


def label_factors(
    target: Array, class_weights: Sequence[float], ignore: int | None
) -> tuple[Float64Array, Float64Array]:
    """Per position the weight of its target's class, -1 where it is ignored, float64 P; and the sum of weights, of shape ()."""
    known = _known(target, ignore)
    factors = np.where(known, np.asarray(class_weights)[np.where(known, target, 0)], -1.0)
    return factors, np.asarray(factors.sum(where=known))


def class_spread(x: Array, m: Array, class_weights: Sequence[float]) -> Float64Array:
    """Sum over the local classes of ``w * (x - m)``, float64 P."""
    return np.asarray(shifted(x, m) @ np.asarray(class_weights, np.float64))


def weighed_entropy_loss(sums: Array, factors: Array, total: Array, gamma: float, scale: float) -> Float64Array:
    """Cross-entropy, or focal loss, with a factor per position; ``scale`` times its sum by ``total``, or 0 where that is 0.

    A position has ``f * (1 - q)**gamma * -log(q)`` with q the softmax at its target.
    """
    if not total:
        return np.zeros(())
    nats = np.maximum(np.log(sums[0]) - sums[1], 0)
    loss = (factors * (nats * (-np.expm1(-nats)) ** gamma)).sum(where=factors > 0)
    return np.asarray(scale * loss / total)


def smoothed_entropy_loss(
    sums: Array,
    factors: Array,
    total: Array,
    spread: Array,
    gamma: float,
    scale: float,
    smoothing: float,
    class_weights: Sequence[float],
) -> Float64Array:
    """``1 - smoothing`` times `weighed_entropy_loss`, and ``smoothing / F`` times the sum over classes of ``-w * log(p)``."""
    loss = (1 - smoothing) * weighed_entropy_loss(sums, factors, total, gamma, scale)
    if total:
        even = (sum(class_weights) * np.log(sums[0]) - spread).sum(where=factors >= 0)
        loss += scale * smoothing / len(class_weights) * even / total
    return np.asarray(loss)


def weighed_entropy_backward(
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
    """The gradient of `smoothed_entropy_loss` for the local classes; ``class_weights`` of all classes."""
    if not total:
        return np.zeros_like(x)
    slope, known = (1 - smoothing) * np.maximum(factors, 0), factors >= 0
    if gamma:
        nats = np.maximum(np.log(sums[0]) - sums[1], 0)
        rest = -np.expm1(-nats)  # 1 - q
        with np.errstate(divide="ignore", invalid="ignore"):
            steep = rest**gamma + gamma * np.exp(-nats) * nats * rest ** (gamma - 1)
        slope *= np.where(rest == 0, 0, steep)
    even = smoothing / len(class_weights)
    dx = probabilities(x, m, sums)
    dx *= (slope + even * sum(class_weights) * known)[..., None]
    _add_each_at_target(dx, target, class_start, -slope)
    if smoothing:
        dx -= even * known[..., None] * np.asarray(class_weights)[class_start : class_start + x.shape[-1]]
    dx *= scale / total
    return dx.astype(x.dtype, copy=False)


def region_sums(
    x: Array, m: Array, sums: Array, target: Array, class_start: int, ignore: int | None, per_sample: bool
) -> Float64Array:
    """As `dice_sums`, of positions that are not ignored; (3, N, C), the sums of each sample, with ``per_sample``."""
    known = _known(target, ignore)
    p = probabilities(x, m, sums) * known[..., None]
    local = np.where(known, target, -1)[..., None] == class_start + np.arange(x.shape[-1])
    axes = tuple(range(per_sample, x.ndim - 1))
    return np.stack([(p * local).sum(axes), p.sum(axes), local.sum(axes)])


def region_loss(dsums: Array, factors: Sequence[float], eps: float) -> Float64Array:
    """Sum over samples and the local classes of ``factor * (1 - (2*I + eps) / (P + T + eps))``."""
    overlap, p, t = dsums
    return np.asarray((np.asarray(factors) * (1 - (2 * overlap + eps) / (p + t + eps))).sum())


def region_backward(
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
    """As `dice_backward`, of `region_loss`; 0 where the position is ignored."""
    per_sample = dsums.ndim == 3
    shape = (dsums.shape[1], *(1,) * (x.ndim - 2), x.shape[-1]) if per_sample else (x.shape[-1],)
    overlap, p, t = (part.reshape(shape) for part in dsums)
    union, known = p + t + eps, _known(target, ignore)
    local = target[..., None] == class_start + np.arange(x.shape[-1])
    g = np.asarray(factors) * ((2 * overlap + eps) / (union * union) - 2 / union * local) * known[..., None]
    return g.astype(x.dtype), np.asarray((g * probabilities(x, m, sums)).sum(axis=-1))


# What metrics follow from.


def count_known_hits(rank: Array, target: Array, tops: Sequence[int], ignore: int) -> Float64Array:
    """`count_hits` of the positions that are not ignored, and, last, their number."""
    known = target != ignore
    return np.array([*((known & (rank < k)).sum() for k in tops), known.sum()], np.float64)


def softmax_first(x: Array, m: Array, class_start: int) -> Float64Array:
    """Minus the first local class whose logit is the maximum, float64 P; -inf where there is none."""
    if not x.shape[-1]:
        return np.full(x.shape[:-1], -np.inf)
    largest = x == m[..., None]
    return np.where(largest.any(axis=-1), -(class_start + largest.argmax(axis=-1)), -np.inf)


def class_counts(first: Array, target: Array, classes: int, ignore: int | None) -> Float64Array:
    """float64 (3, classes): how many positions are of the class and found, taken for it, and of it."""
    table = class_confusion(first, target, classes, ignore)
    return np.stack([table.diagonal(), table.sum(axis=0), table.sum(axis=1)])


def sample_counts(first: Array, target: Array, classes: int, ignore: int | None) -> Float64Array:
    """float64 (N, 3, classes): `class_counts` of each sample."""
    out = np.zeros((len(target), 3, classes))
    for own, one, labels in zip(out, first, target, strict=True):
        own[...] = class_counts(one, labels, classes, ignore)
    return out


def dice_of_samples(counts: Array) -> Float64Array:
    """float64 (2, classes), of `sample_counts`: the sum of the Dice of samples that have one, and how many have."""
    found, union = counts[:, 0], counts[:, 1] + counts[:, 2]
    dice = np.divide(2 * found, union, out=np.zeros(found.shape), where=union > 0)
    return np.stack([dice.sum(axis=0), (union > 0).sum(axis=0)])


def class_confusion(first: Array, target: Array, classes: int, ignore: int | None) -> Float64Array:
    """float64 (classes, classes): how many positions of a class (rows) were taken for a class (columns)."""
    told = _known(target, ignore) & np.isfinite(first)
    pairs = target[told].astype(np.int64) * classes - first[told].astype(np.int64)
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes).astype(np.float64)


def error_sums(x: Array, t: Array) -> Float64Array:
    """float64 (2,): the sums of ``|x - t|`` and of its square."""
    d = x.astype(np.float64) - t
    return np.array([np.abs(d).sum(), np.square(d).sum()])


def _known(target: Array, ignore: int | None) -> Array:
    """Which positions count."""
    return np.ones(target.shape, bool) if ignore is None else target != ignore


def _add_each_at_target(values: Float64Array, target: Array, class_start: int, amounts: Float64Array) -> None:
    """Add an amount per position to values[..., target] in place, where local."""
    local, inside = local_classes(target, class_start, values.shape[-1])
    rows_of(values)[np.flatnonzero(inside), local[inside]] += amounts[inside]
