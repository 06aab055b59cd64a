"""Update rules in NumPy, walked in pieces that stay in cache: many simple passes, one trip to memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt

import numpy as np

from lbpar.engine.device import Array, Float64Array
from lbpar.engine.rules import Blocks, Rules

# Elements per piece. Six float32 operands of this size fit a 1 MiB second-level cache, and a NumPy call's overhead
# (about 0.5 microseconds) stays well below its work (several microseconds).
CHUNK = 16384


def chunks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Corresponding pieces (views) of 1-D arrays of equal length; nothing for empty ones."""
    size = arrays[0].size
    if 0 < size <= CHUNK:  # the usual case costs no slicing
        yield arrays
        return
    for start in range(0, size, CHUNK):
        yield tuple(a[start : start + CHUNK] for a in arrays)


class Updates(Rules):
    """The engine's update rules."""

    def squared_norms(self, arrays: Sequence[Array]) -> Float64Array:
        return np.array([_squares(a) for a in arrays], np.float64)

    def unscale(self, grads: Sequence[Array], inverse: float) -> Float64Array:
        bad = np.zeros(1)
        for g in grads:
            for (part,) in chunks(g):
                part *= inverse
                bad[0] = bad[0] or not np.isfinite(part).all()
        return bad

    def clip(self, grads: Sequence[Array], squares: Float64Array, max_norm: float) -> None:
        factor = max_norm / (sqrt(float(squares.sum())) + 1e-6)
        if not factor >= 1.0:  # also where it is not a number
            for g in grads:
                for (part,) in chunks(g):
                    part *= factor

    def sgd(
        self, blocks: Blocks, momentum: float, nesterov: bool, decays: Sequence[float], rates: Sequence[float]
    ) -> None:
        for block, decay, rate in zip(blocks, decays, rates, strict=True):
            for p, g, *velocity in chunks(*block):
                d = _decayed(p, g, decay)
                s = np.empty_like(p)
                if velocity:
                    (v,) = velocity
                    v *= momentum
                    v += d
                    if nesterov:
                        np.multiply(v, momentum, out=s)
                        s += d
                        d = s
                    else:
                        d = v
                np.multiply(d, rate, out=s)
                p -= s

    def adam(
        self,
        blocks: Blocks,
        betas: tuple[float, float],
        eps: float,
        keeps: Sequence[float],
        decays: Sequence[float],
        rates: Sequence[float],
    ) -> None:
        for block, keep, decay, rate in zip(blocks, keeps, decays, rates, strict=True):
            for p, g, m, v in chunks(*block):
                if keep != 1:
                    p *= keep
                _moments(m, v, _decayed(p, g, decay), betas)
                s = np.sqrt(v)
                s += eps
                np.divide(m, s, out=s)
                s *= rate
                p -= s

    def lars(
        self,
        blocks: Blocks,
        squares: Float64Array,
        adapted: Sequence[bool],
        momentum: float,
        decays: Sequence[float],
        rates: Sequence[float],
        trust: float,
        eps: float,
    ) -> None:
        for block, square, adapts, decay, rate in zip(blocks, squares, adapted, decays, rates, strict=True):
            weight, grad = np.sqrt(square).tolist()
            below = grad + decay * weight + eps
            if adapts and weight > 0 and below > 0:
                rate *= trust * weight / below
            for p, g, v in chunks(*block):
                s = np.multiply(_decayed(p, g, decay), rate, out=np.empty_like(p))
                v *= momentum
                v += s
                p -= v

    def lamb_moments(
        self, blocks: Blocks, betas: tuple[float, float], eps: float, scale: float, decays: Sequence[float]
    ) -> Float64Array:
        squares = np.zeros((len(blocks), 2))
        for block, decay, square in zip(blocks, decays, squares, strict=True):
            square[0] = _squares(block[0])
            for p, g, m, v in chunks(*block):
                _moments(m, v, g, betas)
                square[1] += _squares(_direction(p, m, v, eps, scale, decay))
        return squares

    def lamb(
        self,
        blocks: Blocks,
        squares: Float64Array,
        adapted: Sequence[bool],
        eps: float,
        scale: float,
        decays: Sequence[float],
        rates: Sequence[float],
    ) -> None:
        for block, square, adapts, decay, rate in zip(blocks, squares, adapted, decays, rates, strict=True):
            weight, update = np.sqrt(square).tolist()
            if adapts and weight > 0 and update > 0:
                rate *= weight / update
            for p, m, v in chunks(*block):
                u = _direction(p, m, v, eps, scale, decay)
                u *= rate
                p -= u


def _squares(array: Array) -> float:
    """Sum of squares of a 1-D array, accumulated in float64 whatever its type; 0 for an empty one."""
    total = 0.0
    for (part,) in chunks(array):
        wide = part.astype(np.float64, copy=False)
        total += float(np.dot(wide, wide))
    return total


def _decayed(p: Array, g: Array, decay: float) -> Array:
    """``g + decay * p``; g itself without decay."""
    if not decay:
        return g
    d = p * decay
    d += g
    return d


def _moments(m: Array, v: Array, g: Array, betas: tuple[float, float]) -> None:
    """Running means of ``g`` (into ``m``) and of its square (into ``v``), in place."""
    b1, b2 = betas
    m *= b1
    s = np.multiply(g, 1 - b1, out=np.empty_like(m))
    m += s
    v *= b2
    np.multiply(g, g, out=s)
    s *= 1 - b2
    v += s


def _direction(p: Array, m: Array, v: Array, eps: float, scale: float, decay: float) -> Array:
    """``scale * m / (sqrt(v) + eps) + decay * p``."""
    u = np.sqrt(v)
    u += eps
    np.divide(m, u, out=u)
    u *= scale
    if decay:
        u += p * decay
    return u
