"""Pooling on blocks with ghosts, upsampling, and sums over space undone (``kernels/pooling.cu``)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from lbpar.engine.base import LocalWindow, Window
from lbpar.engine.cupy.kernels import THREADS, index_type, kind_of
from lbpar.engine.cupy.norms import F64
from lbpar.engine.cupy.sample_norms import SampleNorms
from lbpar.engine.device import Array, Float64Array

FILE = "pooling.cu"
_THREE = 3
_POOL = np.dtype(
    [("batch", "i8"), ("channels", "i8")]
    + [(name, "i8", _THREE) for name in ("in", "out", "pad")]
    + [(name, "i4", _THREE) for name in ("kernel", "stride", "dilation")],
    align=True,
)
_UPSAMPLE = np.dtype(
    [("batch", "i8"), ("channels", "i8")]
    + [(name, "i8", _THREE) for name in ("in", "out", "offset")]
    + [("factor", "i4", _THREE)],
    align=True,
)
_FEW = 127
"""Taps that an int8 can count."""


class Pooling(SampleNorms):
    """The part of the engine that pools."""

    def max_pool_forward(self, x: Array, win: Window, out_spatial: Sequence[int]) -> tuple[Array, Array]:
        y = self.empty((x.shape[0], *out_spatial, x.shape[-1]), x.dtype)
        arg = self.empty(y.shape, np.int8 if prod(d.kernel for d in win) <= _FEW else np.int32)
        self._pool("max_pool_forward", _counts(arg), y, x.shape, y.shape, win, y, arg, self._dense(x))
        return y, arg

    def max_pool_backward(self, dy: Array, arg: Array, win: Window, in_spatial: Sequence[int]) -> Array:
        dx = self.empty((dy.shape[0], *in_spatial, dy.shape[-1]), dy.dtype)
        args = (dx, self._dense(dy), self._dense(arg))
        self._pool("max_pool_backward", _counts(arg), dx, dx.shape, dy.shape, win, *args)
        return dx

    def avg_pool_forward(
        self, x: Array, win: Window, out_spatial: Sequence[int], divisors: Sequence[Float64Array]
    ) -> Array:
        y = self.empty((x.shape[0], *out_spatial, x.shape[-1]), x.dtype)
        args = (y, self._dense(x), self._factors(divisors, x))
        self._pool("avg_pool_forward", "", y, x.shape, y.shape, win, *args)
        return y

    def avg_pool_backward(
        self, dy: Array, win: Window, in_spatial: Sequence[int], divisors: Sequence[Float64Array]
    ) -> Array:
        dx = self.empty((dy.shape[0], *in_spatial, dy.shape[-1]), dy.dtype)
        args = (dx, self._dense(dy), self._factors(divisors, dy))
        self._pool("avg_pool_backward", "", dx, dx.shape, dy.shape, win, *args)
        return dx

    def spatial_broadcast(self, dy: Array, spatial: Sequence[int], scale: float) -> Array:
        dx = self.empty((dy.shape[0], *spatial, dy.shape[-1]), dy.dtype)
        args = (dx, self._dense(dy), float(scale), dy.shape[0], prod(spatial), dy.shape[-1])
        self._strided("spatial_broadcast", "", dx, dx.size, *args)
        return dx

    def upsample_forward(
        self, x: Array, factors: Sequence[int], out_spatial: Sequence[int], offsets: Sequence[int]
    ) -> Array:
        y = self.empty((x.shape[0], *out_spatial, x.shape[-1]), x.dtype)
        sizes = _upsample(x.shape, y.shape, factors, offsets)
        self._strided("upsample_forward", "", y, max(x.size, y.size), y, self._dense(x), sizes)
        return y

    def upsample_backward(self, dy: Array, factors: Sequence[int]) -> Array:
        inner = tuple(n // f for n, f in zip(dy.shape[1:-1], factors, strict=True))
        dx = self.empty((dy.shape[0], *inner, dy.shape[-1]), dy.dtype)
        sizes = _upsample(dx.shape, dy.shape, factors, (0,) * len(inner))
        self._strided("upsample_backward", "", dx, dy.size, dx, self._dense(dy), sizes)
        return dx

    def _pool(
        self,
        name: str,
        more: str,
        result: Array,
        inner: tuple[int, ...],
        outer: tuple[int, ...],
        win: Window,
        *args: Any,
    ) -> None:
        sizes = np.zeros((), _POOL)
        sizes["batch"], sizes["channels"] = inner[0], inner[-1]
        sizes["in"], sizes["out"] = _three(inner[1:-1], 1), _three(outer[1:-1], 1)
        whole = _three(win, LocalWindow(1))
        for field in ("kernel", "stride", "dilation", "pad"):
            sizes[field] = [getattr(d, field) for d in whole]
        self._strided(name, more, result, max(prod(inner), prod(outer)), *args, sizes)

    def _strided(self, name: str, more: str, result: Array, largest: int, *args: Any) -> None:
        """Launch a kernel whose threads stride over units of ``result``."""
        name = f"{name}<{kind_of(result.dtype)}{more}, {index_type(largest)}>"
        self.kernels.launch(FILE, name, (self.kernels.blocks(result.size),), (THREADS,), args)

    def _factors(self, divisors: Sequence[Float64Array], x: Array) -> Array:
        """1 / divisor of each position, 0 where it is 0, one dimension behind the other."""
        kind = F64 if x.dtype == F64 else np.dtype(np.float32)

        def make() -> npt.NDArray[Any]:
            parts = [np.divide(1.0, d, out=np.zeros(len(d)), where=np.asarray(d) != 0) for d in divisors]
            return np.concatenate([*(np.ones(1),) * (_THREE - len(parts)), *parts]).astype(kind)

        return self._uploaded(("factors", kind, *map(id, divisors)), divisors, make)


def _counts(arg: Array) -> str:
    """Type of the numbers of taps."""
    return ", signed char" if arg.dtype == np.int8 else ", int"


def _three(values: Sequence[Any], missing: Any) -> tuple[Any, ...]:
    """One for each of three dimensions; those that are missing stand first."""
    return (missing,) * (_THREE - len(values)) + tuple(values)


def _upsample(inner: tuple[int, ...], outer: tuple[int, ...], factors: Sequence[int], offsets: Sequence[int]) -> Any:
    sizes = np.zeros((), _UPSAMPLE)
    sizes["batch"], sizes["channels"] = outer[0], outer[-1]
    sizes["in"], sizes["out"] = _three(inner[1:-1], 1), _three(outer[1:-1], 1)
    sizes["offset"], sizes["factor"] = _three(offsets, 0), _three(factors, 1)
    return sizes
