"""Normalisation within samples (``kernels/sample_norm.cu``)."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from lbpar.engine.cupy.kernels import THREADS, index_type, kind_of
from lbpar.engine.cupy.norms import F32, F64, Norms, _parameters
from lbpar.engine.device import Array, Float64Array

FILE = "sample_norm.cu"
_GROUPS = np.dtype([(name, "i8") for name in ("rows", "positions", "groups", "width")] + [("count", "f8")])
_FEW = 1024
"""Values up to which a warp sums those of a row and group; above, a block of threads does."""


class SampleNorms(Norms):
    """The part of the engine that normalises within samples."""

    def sample_norm_sums(self, x: Array) -> Float64Array:
        sums = self.empty((4, x.shape[0], x.shape[2]), F64)
        self._units("sample_norm_sums", "", x, sums, self._dense(x))
        return sums

    def sample_norm_apply(
        self, x: Array, mean: Array, invstd: Array, scale: Array | None = None, bias: Array | None = None
    ) -> Array:
        moments, affine = (self._as(a, F64) for a in (mean, invstd)), (self._parameter(a, x) for a in (scale, bias))
        return self._elements("sample_norm_apply", x, 1.0, self._dense(x), *moments, *affine)

    def sample_norm_forward(
        self, x: Array, scale: Array | None, bias: Array | None, count: float, eps: float
    ) -> tuple[Float64Array, Array]:
        made: tuple[Float64Array, Array] | None = None

        def ours() -> None:
            nonlocal made
            made = None  # of a run before, while plans are timed
            made = super(SampleNorms, self).sample_norm_forward(x, scale, bias, count, eps)  # type: ignore[misc]

        rows, positions, groups, width = x.shape
        key, whole = (x.shape, x.dtype.name), positions * width == count
        if scale is None or bias is None or not whole or not self.graphs or not self.graphs.sample_norm_plan(*key):
            ours()
            assert made is not None
            return made
        y, mean, invstd = self._like(x), *(self.empty((rows * groups,), F32) for _ in range(2))
        scale, bias = (self._as(a, F32) for a in (scale, bias))
        arrays = {"x": self._dense(x), "y": y, "scale": scale, "b": bias, "mean": mean, "invstd": invstd}
        if not self.graphs.sample_norm(key, arrays, eps, ours):
            assert made is not None
            return made
        return self._found(None, mean, invstd, None, count, eps).reshape((3, rows, groups)), y

    def sample_norm_backward_sums(
        self, x: Array, dy: Array, mean: Array, invstd: Array, scale: Array | None = None
    ) -> tuple[Float64Array, Array, Array]:
        rows, positions, groups, width = x.shape
        given = (self._dense(x), self._dense(dy), self._as(mean, F64), self._as(invstd, F64))
        sums, kind = self.empty((2, rows, groups), F64), f", {kind_of(_parameters(x))}"
        self._units("sample_norm_backward_sums", kind, x, sums, *given, self._parameter(scale, x))
        tiles, chunks, each = self._cut(rows * positions, x.reshape((rows, positions, groups * width)))
        partial, gradients = self.empty((2, chunks, groups * width), F64), self.empty((2, groups * width), self.dtype)
        name = f"sample_norm_scale_partials<{kind_of(x.dtype)}>"
        self.kernels.launch(FILE, name, (tiles, chunks), (THREADS,), (partial, *given, _groups(x), each))
        name, grid = f"column_sums<{kind_of(self.dtype)}>", (-(-groups * width // 32), 1, 2)
        self._norm(name, grid, gradients, partial, 1.0, 2, groups * width, chunks)
        return sums, gradients[1].reshape((groups, width)), gradients[0].reshape((groups, width))

    def sample_norm_backward_data(
        self, count: float, x: Array, dy: Array, mean: Array, invstd: Array, sums: Array, scale: Array | None = None
    ) -> Array:
        given = (self._dense(x), self._dense(dy), *(self._as(a, F64) for a in (mean, invstd, sums)))
        return self._elements("sample_norm_backward_data", x, float(count), *given, self._parameter(scale, x))

    def _units(self, name: str, more: str, x: Array, *args: Any) -> None:
        """Launch a kernel that sums over each row and group."""
        rows, positions, groups, width = x.shape
        share = 32 if positions * width <= _FEW else THREADS
        name = f"{name}<{kind_of(x.dtype)}{more}, {share}>"
        grid = (self.kernels.blocks(rows * groups * share),)
        self.kernels.launch(FILE, name, grid, (THREADS,), (*args, _groups(x)))

    def _elements(self, name: str, x: Array, count: float, *args: Any) -> Array:
        y, name = self._like(x), f"{name}<{kind_of(x.dtype)}, {kind_of(_parameters(x))}, {index_type(x.size)}>"
        self.kernels.launch(
            FILE, name, (self.kernels.blocks(prod(x.shape)),), (THREADS,), (y, *args, _groups(x, count))
        )
        return y


def _groups(x: Array, count: float = 1.0) -> Any:
    """`Groups` of the kernels."""
    out = np.zeros((), _GROUPS)
    for name, value in zip(_GROUPS.names or (), (*x.shape, count), strict=True):
        out[name] = value
    return out
