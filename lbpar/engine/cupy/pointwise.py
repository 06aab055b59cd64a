"""Kernels that work element by element, and what goes along channels (``kernels/pointwise.cu``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lbpar.engine.cupy.device import CupyDevice
from lbpar.engine.cupy.kernels import THREADS, address, index_type, kind_of
from lbpar.engine.cupy.names import ACTIVATIONS
from lbpar.engine.cupy.pieces import Box, dense, moves
from lbpar.engine.device import Array

FILE = "pointwise.cu"
MOST = 8
"""Arrays that one kernel adds or multiplies."""

_INPUTS = np.dtype([("of", "u8", MOST), ("count", "i8")])
_RESPONSE_NORM = np.dtype(
    [(name, "i8") for name in ("rows", "held", "channels")]
    + [(name, "i4") for name in ("size", "own", "first", "_")]
    + [(name, "f8") for name in ("alpha", "beta", "k")]
)
_UNITS = {2: "u16", 4: "u32", 8: "uint2"}


class Pointwise(CupyDevice):
    """The part of the engine that works element by element."""

    def _each(self, name: str, y: Array, *args: Any) -> Array:
        """Run a kernel whose threads stride over ``y``; it takes y, what is given, and y's size."""
        name = f"{name}<{kind_of(y.dtype)}>"
        self.kernels.launch(FILE, name, (self.kernels.blocks(y.size),), (THREADS,), (y, *args, y.size))
        return y

    def _like(self, x: Array) -> Array:
        return self.empty(x.shape, x.dtype)

    def _dense(self, x: Array) -> Array:
        return x if x.flags.c_contiguous else self.copy(x)

    def _as(self, a: Array, dtype: npt.DTypeLike) -> Array:
        return self._dense(a) if a.dtype == dtype else self.copy(a, dtype)

    def _cast(self, a: Array, out: Array) -> Array:
        if not (a.flags.c_contiguous and out.flags.c_contiguous):
            return self.copy(self._cast(self._dense(a), self.empty(a.shape, out.dtype)), out=out)
        name = f"convert<{kind_of(out.dtype)}, {kind_of(a.dtype)}>"
        self.kernels.launch(FILE, name, (self.kernels.blocks(a.size),), (THREADS,), (out, a, a.size))
        return out

    def relu_forward(self, x: Array) -> Array:
        return self._each("relu_forward", self._like(x), self._dense(x))

    def relu_backward(self, y: Array, dy: Array) -> Array:
        return self._each("relu_backward", self._like(dy), self._dense(y), self._dense(dy))

    def leaky_relu_forward(self, x: Array, slope: float) -> Array:
        return self._each("leaky_relu_forward", self._like(x), self._dense(x), float(slope))

    def leaky_relu_backward(self, y: Array, dy: Array, slope: float) -> Array:
        return self._each("leaky_relu_backward", self._like(dy), self._dense(y), self._dense(dy), float(slope))

    def sigmoid_forward(self, x: Array) -> Array:
        return self._each("sigmoid_forward", self._like(x), self._dense(x))

    def sigmoid_backward(self, y: Array, dy: Array) -> Array:
        return self._each("sigmoid_backward", self._like(dy), self._dense(y), self._dense(dy))

    def tanh_forward(self, x: Array, scale: float) -> Array:
        return self._each("tanh_forward", self._like(x), self._dense(x), float(scale))

    def tanh_backward(self, y: Array, dy: Array, scale: float) -> Array:
        return self._each("tanh_backward", self._like(dy), self._dense(y), self._dense(dy), float(scale))

    def activation_forward(self, kind: str, x: Array, *options: float | str) -> Array:
        name, option = _activation(kind, options)
        if name is None:  # of somebody's own
            return super().activation_forward(kind, x, *options)  # type: ignore[misc,no-any-return]
        return self._activate(f"forward<{kind_of(x.dtype)}, {name}>", self._like(x), option, x)

    def activation_backward(self, kind: str, kept: Array, dy: Array, *options: float | str) -> Array:
        name, option = _activation(kind, options)
        if name is None:
            return super().activation_backward(kind, kept, dy, *options)  # type: ignore[misc,no-any-return]
        return self._activate(f"backward<{kind_of(dy.dtype)}, {name}>", self._like(dy), option, kept, dy)

    def _activate(self, name: str, y: Array, option: float, *inputs: Array) -> Array:
        args = (y, *map(self._dense, inputs), option, y.size)
        self.kernels.launch("activations.cu", f"activation_{name}", (self.kernels.blocks(y.size),), (THREADS,), args)
        return y

    def add(self, xs: Sequence[Array]) -> Array:
        return self._joined("add_all", xs)

    def multiply(self, xs: Sequence[Array]) -> Array:
        return self._joined("multiply_all", xs)

    def _joined(self, name: str, xs: Sequence[Array]) -> Array:
        if len(xs) == 1:
            return self.copy(xs[0])
        xs = [self._dense(x) for x in xs]
        inputs = np.zeros((), _INPUTS)
        inputs["of"][: len(xs[:MOST])] = [address(x) for x in xs[:MOST]]
        inputs["count"] = len(xs[:MOST])
        y = self._each(name, self._like(xs[0]), inputs)
        return y if len(xs) <= MOST else self._joined(name, [y, *xs[MOST:]])

    def multiply_backward(self, dy: Array, xs: Sequence[Array], i: int) -> Array:
        return self.multiply([dy, *xs[:i], *xs[i + 1 :]])

    def axpy(self, a: float, x: Array, y: Array | None = None) -> Array:
        return self._each("axpy", self._like(x), self._dense(x), None if y is None else self._dense(y), float(a))

    def concat(self, xs: Sequence[Array]) -> Array:
        y = self.empty((*xs[0].shape[:-1], sum(x.shape[-1] for x in xs)), xs[0].dtype)
        strides, at, boxes = dense(y.shape, y.itemsize), address(y), []
        for x in xs:
            boxes.append(Box(at, address(x), x.shape, strides, x.strides))
            at += x.shape[-1] * y.itemsize
        self._pack(moves(boxes, y.itemsize))
        return y

    def channel_shuffle(self, x: Array, rows: int, columns: int) -> Array:
        y, x = self._like(x), self._dense(x)
        name = f"channel_shuffle<{_UNITS[x.itemsize]}, {index_type(x.size)}>"
        self.kernels.launch(FILE, name, (self.kernels.blocks(x.size),), (THREADS,), (y, x, x.size, rows, columns))
        return y

    def local_response_norm_forward(
        self, x: Array, size: int, own: int, first: int, channels: int, alpha: float, beta: float, k: float
    ) -> tuple[Array, Array]:
        y, scale = (self.empty((*x.shape[:-1], channels), x.dtype) for _ in range(2))
        window = _window(y, held=x.shape[-1], size=size, own=own, first=first, alpha=alpha, beta=beta, k=k)
        self._rows_of(y, "local_response_norm_forward", scale, self._dense(x), window)
        return y, scale

    def local_response_norm_ratio(self, y: Array, dy: Array, scale: Array) -> Array:
        return self._each("local_response_norm_ratio", self._like(dy), *map(self._dense, (y, dy, scale)))

    def local_response_norm_backward(
        self, x: Array, dy: Array, scale: Array, ratio: Array, size: int, first: int, alpha: float, beta: float
    ) -> Array:
        dx = self._like(x)
        window = _window(dx, held=ratio.shape[-1], size=size, first=first, alpha=alpha, beta=beta)
        return self._rows_of(dx, "local_response_norm_backward", *map(self._dense, (x, dy, scale, ratio)), window)

    def _rows_of(self, y: Array, name: str, *args: Any) -> Array:
        name = f"{name}<{kind_of(y.dtype)}, {index_type(y.size)}>"
        self.kernels.launch(FILE, name, (self.kernels.blocks(y.size),), (THREADS,), (y, *args))
        return y


def _activation(kind: str, options: Sequence[float | str]) -> tuple[str | None, float]:
    """Its function in the kernels, and its option there."""
    if "tanh" in options:
        return ACTIVATIONS.get(f"{kind} tanh"), 0.0
    return ACTIVATIONS.get(kind), float(next((o for o in options if not isinstance(o, str)), 0.0))


def _window(y: Array, **values: Any) -> Any:
    """`ResponseNorm` of the kernels."""
    out = np.zeros((), _RESPONSE_NORM)
    out["channels"] = y.shape[-1]
    out["rows"] = y.size // max(1, y.shape[-1])
    for name, value in values.items():
        out[name] = value
    return out
