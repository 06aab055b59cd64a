"""What an engine of a type should compute, and what rounding may change of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lbpar.engine.base import Array, Engine, Float64Array, Window
from lbpar.engine.half import NumpyHalves
from lbpar.engine.norm import rows_of
from lbpar.engine.numpy_engine import NumpyEngine


def oracle(tested: Engine, dtype: str) -> NumpyEngine:
    """The engine beside which one of ``dtype`` is judged.

    Where the host holds activations in a half type it rounds them as well: beside the exact gradient little would be proved, for rounding
    alone moves that of a deep network by tens of per cent.
    """
    return NumpyHalves(dtype) if tested.host and tested.activations != tested.dtype else NumpyEngine(np.float64)


def rounding(tested: Engine, dtype: str) -> Engine:
    """An engine that differs from the oracle by what rounding in ``dtype`` may do."""
    if tested.activations == tested.dtype:
        return HalvedEngine(dtype)
    return _HalvedHalves(dtype) if tested.host else tested


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


class _HalvedHalves(HalvedEngine, NumpyHalves):
    """The same with activations of a half type, in which partial sums are rounded before they are added."""
