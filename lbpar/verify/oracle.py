"""What an engine of a type should compute: the reference engine in float64, its operands rounded where the type says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lbpar.engine.base import Array, Window
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.registry import BFLOAT16


def oracle(dtype: str) -> NumpyEngine:
    """The engine beside which one of ``dtype`` is judged."""
    return RoundedEngine(np.float64) if dtype == BFLOAT16 else NumpyEngine(np.float64)


class RoundedEngine(NumpyEngine):
    """The reference with the operands of convolutions and matrix products rounded to bfloat16.

    An engine of dtype bfloat16 gives the same up to the rounding of its sums. Beside the exact gradient it would prove little: the
    rounding of operands alone moves that of a deep network by tens of per cent.
    """

    def conv_forward(
        self, x: Array, w: Array, b: Array | None, win: Window, groups: int, out_spatial: Sequence[int]
    ) -> Array:
        return super().conv_forward(rounded(x), rounded(w), b, win, groups, out_spatial)

    def conv_backward_data(self, dy: Array, w: Array, win: Window, groups: int, in_spatial: Sequence[int]) -> Array:
        return super().conv_backward_data(rounded(dy), rounded(w), win, groups, in_spatial)

    def conv_backward_weights(self, x: Array, dy: Array, win: Window, groups: int, out: Array | None = None) -> Array:
        return super().conv_backward_weights(rounded(x), rounded(dy), win, groups, out)

    def linear_forward(self, x: Array, w: Array, b: Array | None) -> Array:
        return super().linear_forward(rounded(x), rounded(w), b)

    def linear_backward_data(self, dy: Array, w: Array) -> Array:
        return super().linear_backward_data(rounded(dy), rounded(w))

    def linear_backward_weights(self, x: Array, dy: Array, out: Array | None = None) -> Array:
        return super().linear_backward_weights(rounded(x), rounded(dy), out)


def rounded(a: Array) -> Any:
    """``a`` rounded to bfloat16, the nearest and of two the even one, in its own type."""
    bits = np.ascontiguousarray(a, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) & np.uint32(0xFFFF0000)).view(np.float32).astype(a.dtype)
