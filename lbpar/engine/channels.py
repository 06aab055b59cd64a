"""Local response normalisation and softmax over channels in NumPy. Blocks may hold a part of the channels, with ghosts."""

from __future__ import annotations

import numpy as np

from lbpar.engine.base import Array, Engine, Float64Array


def window_sums(x: Array, size: int, first: int, channels: int) -> Array:
    """Sums over windows of channels: output j is the sum of ``x[..., j + first : j + first + size]``, clipped to what x holds."""
    out = np.zeros((*x.shape[:-1], channels), x.dtype)
    held = x.shape[-1]
    for tap in range(max(first, 1 - channels), min(first + size, held)):
        lo, hi = max(0, -tap), min(channels, held - tap)
        out[..., lo:hi] += x[..., lo + tap : hi + tap]
    return out


class Channels(Engine):
    """The engine's operations over channels."""

    def local_response_norm_forward(
        self, x: Array, size: int, own: int, first: int, channels: int, alpha: float, beta: float, k: float
    ) -> tuple[Array, Array]:
        scale = window_sums(x * x, size, first, channels)
        scale *= alpha / size
        scale += k
        return x[..., own : own + channels] * _power(scale, beta), scale

    def local_response_norm_backward(
        self, x: Array, dy: Array, scale: Array, ratio: Array, size: int, first: int, alpha: float, beta: float
    ) -> Array:
        dx = window_sums(ratio, size, first, x.shape[-1])
        dx *= x
        dx *= -2 * alpha * beta / size
        dx += dy * _power(scale, beta)
        return dx

    def softmax_denominator(self, x: Array, m: Array) -> Float64Array:
        return np.exp(x - m[..., None]).sum(axis=-1, dtype=np.float64)

    def softmax_forward(self, x: Array, m: Array, sums: Array) -> Array:
        y = np.exp(x - m[..., None])
        y *= (1 / sums).astype(y.dtype)[..., None]
        return y

    def softmax_inner(self, y: Array, dy: Array) -> Float64Array:
        return np.einsum("...c,...c->...", y, dy, dtype=np.float64)

    def softmax_backward(self, y: Array, dy: Array, inner: Array) -> Array:
        return y * (dy - inner.astype(y.dtype)[..., None])


def _power(scale: Array, beta: float) -> Array:
    """``scale ** -beta``."""
    if beta != 0.75:
        return scale**-beta
    root = np.sqrt(scale)  # two roots take a tenth of the time of a power
    root *= np.sqrt(root)
    return np.divide(1, root, out=root)
