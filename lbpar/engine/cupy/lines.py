"""Sums along spatial dimensions (``kernels/lines.cu``), elements at regular distances, and PReLU (``kernels/prelu.cu``)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from lbpar.engine.cupy.kernels import THREADS, index_type, kind_of
from lbpar.engine.cupy.label_losses import LabelLosses
from lbpar.engine.cupy.norms import F64, _matrix, _parameters
from lbpar.engine.device import Array
from lbpar.engine.host.lines import Taps

_LINES = np.dtype([(name, "i8") for name in ("outer", "in", "out", "inner", "taps")])
PRELU = "prelu.cu"


class Lines(LabelLosses):
    """The part of the engine that interpolates, mirrors and repeats: `lbpar.engine.host`."""

    def along_lines(self, x: Array, lines: Sequence[Taps | None]) -> Array:
        for axis, line in enumerate(lines, 1):
            if line is None:
                continue
            (index, weight), shape = line, x.shape
            y = self.empty((*shape[:axis], index.shape[1], *shape[axis + 1 :]), x.dtype)
            sizes = np.zeros((), _LINES)
            for name, value in zip(_LINES.names or (), (prod(shape[:axis]), shape[axis], index.shape[1], prod(shape[axis + 1 :]), len(index)), strict=True):  # fmt: skip
                sizes[name] = value
            args = (y, self._dense(x), self._upload(index), self._upload(weight), sizes)
            name = f"along_lines<{kind_of(x.dtype)}, {index_type(y.size)}>"
            self.kernels.launch("lines.cu", name, (self.kernels.blocks(y.size),), (THREADS,), args)
            x = y
        return x

    def thinned(self, x: Array, part: tuple[slice, ...]) -> Array:
        return self.pack(x, (*part, *(slice(None) for _ in x.shape[len(part) :])))

    def prelu_forward(self, x: Array, slope: Array) -> Array:
        return self._prelu("prelu_forward", x, slope, self._dense(x))

    def prelu_backward_data(self, x: Array, dy: Array, slope: Array) -> Array:
        return self._prelu("prelu_backward_data", x, slope, self._dense(x), self._dense(dy))

    def prelu_slope_sums(self, x: Array, dy: Array, per_channel: bool) -> Array:
        rows, channels = _matrix(x)
        tiles, chunks, each = self._cut(rows, x)
        partial = self.empty((chunks, channels), F64)
        args = (partial, self._dense(x), self._dense(dy), rows, channels, each)
        self.kernels.launch(PRELU, f"prelu_slope_partials<{kind_of(x.dtype)}>", (tiles, chunks), (THREADS,), args)
        if per_channel:
            return self._ended(partial, chunks, channels)
        return self._ended(partial, chunks * channels, 1)

    def _ended(self, partial: Array, chunks: int, channels: int) -> Array:
        """Sums over chunks, in the type of parameters."""
        out = self.empty((channels,), self.dtype)
        grid = (-(-channels // 32), 1, 1)
        self._norm(f"column_sums<{kind_of(self.dtype)}>", grid, out, partial, 1.0, 1, channels, chunks)
        return out

    def _prelu(self, name: str, x: Array, slope: Array, *inputs: Array) -> Array:
        y, (rows, channels) = self._like(x), _matrix(x)
        name = f"{name}<{kind_of(x.dtype)}, {kind_of(_parameters(x))}>"
        args: tuple[Any, ...] = (y, *inputs, self._parameter(slope, x), slope.size == 1, rows, channels)
        self.kernels.launch(PRELU, name, self._spread(rows, x), (THREADS,), args)
        return y
