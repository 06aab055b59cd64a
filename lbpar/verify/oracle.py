"""What an engine of a type should compute, and what rounding may change of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lbpar.engine.base import Array, Float64Array, Window
from lbpar.engine.norm import rows_of
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.registry import BFLOAT16


def oracle(dtype: str) -> NumpyEngine:
    """The engine beside which one of ``dtype`` is judged."""
    return RoundedEngine(np.float64) if dtype == BFLOAT16 else NumpyEngine(np.float64)


def rounding(dtype: str) -> NumpyEngine:
    """An engine that differs from the oracle by what rounding in ``dtype`` may do: sums in another order, or operands not rounded."""
    return NumpyEngine(np.float64) if dtype == BFLOAT16 else HalvedEngine(dtype)


class RoundedEngine(NumpyEngine):
    """The reference with the operands of convolutions and matrix products rounded to bfloat16.

    An engine of dtype bfloat16 gives the same up to the rounding of its sums. Beside the exact gradient it would prove little: the
    rounding of operands alone moves that of a deep network by tens of per cent.
    """


def _rounding_operands(name: str) -> Callable[..., Any]:
    """A product of the reference whose first two arguments are rounded."""

    def product(self: RoundedEngine, a: Array, b: Array, *rest: Any, **named: Any) -> Any:
        return getattr(super(RoundedEngine, self), name)(rounded(a), rounded(b), *rest, **named)

    return product


for _name in ("forward", "backward_data", "backward_weights"):
    for _kind in ("conv", "linear"):
        setattr(RoundedEngine, f"{_kind}_{_name}", _rounding_operands(f"{_kind}_{_name}"))


class HalvedEngine(NumpyEngine):
    """The reference with every large sum cut into two, as ranks cut them: over channels, filters, samples or positions.

    What it gives differs from the uncut sums by rounding only, carried through the network by the same kernels.
    """

    def conv_forward(
        self, x: Array, w: Array, b: Array | None, win: Window, groups: int, out_spatial: Sequence[int]
    ) -> Array:
        cut = x.shape[-1] // 2
        if groups > 1 or not cut:
            return super().conv_forward(x, w, b, win, groups, out_spatial)
        first = super().conv_forward(x[..., :cut], w[..., :cut], None, win, 1, out_spatial)
        return first + super().conv_forward(x[..., cut:], w[..., cut:], b, win, 1, out_spatial)

    def conv_backward_data(self, dy: Array, w: Array, win: Window, groups: int, in_spatial: Sequence[int]) -> Array:
        cut = dy.shape[-1] // 2
        if groups > 1 or not cut:
            return super().conv_backward_data(dy, w, win, groups, in_spatial)
        first = super().conv_backward_data(dy[..., :cut], w[:cut], win, 1, in_spatial)
        return first + super().conv_backward_data(dy[..., cut:], w[cut:], win, 1, in_spatial)

    def conv_backward_weights(self, x: Array, dy: Array, win: Window, groups: int, out: Array | None = None) -> Array:
        cut = dy.shape[1] // 2
        later = (replace(win[0], pad=win[0].pad - cut * win[0].stride), *win[1:])
        first = super().conv_backward_weights(x, dy[:, :cut], win, groups)
        return np.add(first, super().conv_backward_weights(x, dy[:, cut:], later, groups), out=out)

    def bias_backward(self, dy: Array) -> Array:
        return super().bias_backward(dy[::2]) + super().bias_backward(dy[1::2])

    def linear_forward(self, x: Array, w: Array, b: Array | None) -> Array:
        cut = x.shape[1] // 2
        return super().linear_forward(x[:, :cut], w[:, :cut], None) + super().linear_forward(x[:, cut:], w[:, cut:], b)

    def linear_backward_data(self, dy: Array, w: Array) -> Array:
        cut = len(w) // 2
        return super().linear_backward_data(dy[:, :cut], w[:cut]) + super().linear_backward_data(dy[:, cut:], w[cut:])

    def linear_backward_weights(self, x: Array, dy: Array, out: Array | None = None) -> Array:
        first = super().linear_backward_weights(x[::2], dy[::2])
        return np.add(first, super().linear_backward_weights(x[1::2], dy[1::2]), out=out)

    def norm_sums(self, x: Array, shift: Array) -> Float64Array:
        rows = rows_of(x)
        return super().norm_sums(rows[::2], shift) + super().norm_sums(rows[1::2], shift)

    def norm_backward_sums(self, x: Array, dy: Array, mean: Array, invstd: Array) -> Float64Array:
        rows, gradients = rows_of(x), rows_of(dy)
        even = super().norm_backward_sums(rows[::2], gradients[::2], mean, invstd)
        return even + super().norm_backward_sums(rows[1::2], gradients[1::2], mean, invstd)


def rounded(a: Array) -> Any:
    """``a`` rounded to bfloat16, the nearest and of two the even one, in its own type."""
    bits = np.ascontiguousarray(a, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) & np.uint32(0xFFFF0000)).view(np.float32).astype(a.dtype)
