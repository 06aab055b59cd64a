"""Convolutions and matrix products by the tiled kernels (``kernels/convolution.cu``, ``kernels/gemm.cu``)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

import numpy as np

from lbpar.engine.base import Window
from lbpar.engine.cupy import launch_conv, launch_gemm
from lbpar.engine.cupy.blas import TRANSPOSED, Blas
from lbpar.engine.cupy.graphs import Graphs
from lbpar.engine.cupy.kernels import address
from lbpar.engine.cupy.launch_conv import Geometry
from lbpar.engine.cupy.pieces import Box, dense, moves
from lbpar.engine.cupy.plans import ALIGNMENT
from lbpar.engine.cupy.pointwise import Pointwise
from lbpar.engine.cupy.tiles import MATHS, Card, Job, Math
from lbpar.engine.device import Array

MOST_JOBS = 4096


def _key(boxes: Sequence[Sequence[tuple[int, int]]]) -> Hashable:
    return tuple(map(tuple, boxes))


class Products(Pointwise):
    """The part of the engine that multiplies.

    Attributes
    ----------
    tf32 : bool
        Multiply float32 in TF32, whose products have 11 bits; sums are float32.
    graphs : Graphs or None
        cuDNN's convolutions and norms, where they are used.
    blas : Blas or None
        cuBLAS, where it is used.
    """

    tf32 = False
    graphs: Graphs | None = None
    blas: Blas | None = None

    def __init__(self) -> None:
        super().__init__()
        properties = self._runtime.getDeviceProperties(self._runtime.getDevice())
        architecture = 10 * properties["major"] + properties["minor"]
        self._card = Card(architecture=architecture, processors=properties["multiProcessorCount"])
        self._jobs: dict[Hashable, Job] = {}

    def _multiply(self, key: Hashable, make: Callable[[Math, Card], Job], **arrays: Array | None) -> None:
        """Launch the job of a key: shapes and flags. Arrays go by the names that the job's maker gives them."""
        held = [a for a in arrays.values() if a is not None]
        aligned = gcd(self._card.alignment, *map(address, held))
        name = held[0].dtype.name
        assert all(a.dtype == held[0].dtype for a in held), {n: a.dtype for n, a in arrays.items() if a is not None}
        key = (key, name, self.tf32, aligned)
        job = self._jobs.get(key)
        if job is None:
            if len(self._jobs) >= MOST_JOBS:  # varying shapes must not grow memory without bound
                self._jobs.clear()
            arithmetic = MATHS["tf32" if name == "float32" and self.tf32 else name]
            job = self._jobs[key] = make(arithmetic, replace(self._card, alignment=aligned))
        workspace = self.empty((job.workspace_bytes,), np.uint8) if job.workspace_bytes else None
        found: dict[str, Any] = {**arrays, "workspace": workspace, "": None}
        for launch in job.launches:
            args = (*(found[a] for a in launch.arrays), launch.sizes)
            self.kernels.launch(launch.source, launch.name, launch.grid, launch.block, args, launch.shared_bytes)

    def _place(self, shape: tuple[int, ...], x: Array, out: Array | None) -> Array:
        """Where a kernel writes a gradient of weights: in x's type, and in ``out`` if it has that type and cuDNN, where it is used, can write there."""
        if out is None or out.dtype != x.dtype or (self.graphs is not None and address(out) % ALIGNMENT):
            return self.empty(shape, x.dtype)
        return out

    def _placed(self, dw: Array, out: Array | None) -> Array:
        """The gradient in the parameters' type, where it was wanted."""
        mixed = self.activations != self.dtype and dw.dtype == self.activations
        if dw is out or (out is None and not mixed):
            return dw
        return self.copy(dw, self.dtype, out)

    def conv_forward(
        self, x: Array, w: Array, b: Array | None, win: Window, groups: int, out_spatial: Sequence[int]
    ) -> Array:
        return self._conv_forward(x, w, b, win, groups, tuple(out_spatial), False)

    def conv_relu_forward(
        self, x: Array, w: Array, b: Array | None, win: Window, groups: int, out_spatial: Sequence[int]
    ) -> Array:
        return self._conv_forward(x, w, b, win, groups, tuple(out_spatial), True)

    def _conv_forward(
        self, x: Array, w: Array, b: Array | None, win: Window, groups: int, out: tuple[int, ...], relu: bool
    ) -> Array:
        y, kind, biased = self.empty((x.shape[0], *out, w.shape[0]), x.dtype), x.dtype.name, b is not None
        g = Geometry.of(x.shape[0], x.shape[1:-1], out, win, groups, x.shape[-1], w.shape[0])
        arrays: dict[str, Array | None] = {"y": y, "x": self._dense(x), "w": self._as(w, x.dtype)}
        if self.graphs is not None and self.graphs.apart(g, kind, biased, relu):
            self._convolve("forward", g, kind, arrays)
            y = y if b is None else self.bias_add(y, b)
            return self.relu_forward(y) if relu else y
        arrays["b"] = None if b is None else self._as(b, x.dtype)
        self._convolve("forward", g, kind, arrays, biased, relu)
        return y

    def bias_add(self, y: Array, b: Array) -> Array:
        raise NotImplementedError

    def conv_backward_data(self, dy: Array, w: Array, win: Window, groups: int, in_spatial: Sequence[int]) -> Array:
        inner, channels = tuple(in_spatial), w.shape[-1] * groups
        dx = self.empty((dy.shape[0], *inner, channels), dy.dtype)
        g = Geometry.of(dy.shape[0], inner, dy.shape[1:-1], win, groups, channels, w.shape[0])
        self._convolve("data", g, dy.dtype.name, {"dx": dx, "dy": self._dense(dy), "w": self._as(w, dy.dtype)})
        return dx

    def conv_forward_parts(
        self,
        x: Array,
        w: Array,
        b: Array | None,
        win: Window,
        groups: int,
        y: Array,
        boxes: Sequence[Sequence[tuple[int, int]]],
        relu: bool = False,
    ) -> None:
        def make(arithmetic: Math, card: Card) -> Job:
            g = Geometry.of(x.shape[0], x.shape[1:-1], y.shape[1:-1], win, groups, x.shape[-1], w.shape[0])
            if len(boxes) == 1:
                return launch_conv.conv_forward(arithmetic, card, g, b is not None, relu, box=boxes[0])
            return launch_conv.conv_rims(arithmetic, card, g, boxes, b is not None, relu)

        key = ("conv parts", x.shape, w.shape, win, groups, y.shape, b is None, relu, _key(boxes))
        self._multiply(
            key, make, y=y, x=self._dense(x), w=self._as(w, x.dtype), b=None if b is None else self._as(b, x.dtype)
        )

    def conv_backward_data_parts(
        self,
        dy: Array,
        w: Array,
        win: Window,
        groups: int,
        dx: Array,
        boxes: Sequence[Sequence[tuple[int, int]]],
    ) -> None:
        def make(arithmetic: Math, card: Card) -> Job:
            g = Geometry.of(dy.shape[0], dx.shape[1:-1], dy.shape[1:-1], win, groups, dx.shape[-1], w.shape[0])
            if len(boxes) == 1:
                return launch_conv.conv_backward_data(arithmetic, card, g, box=boxes[0])
            return launch_conv.conv_data_rims(arithmetic, card, g, boxes)

        key = ("data parts", dy.shape, w.shape, win, groups, dx.shape, _key(boxes))
        self._multiply(key, make, dx=dx, dy=self._dense(dy), w=self._as(w, dy.dtype))

    # cuDNN writes whole arrays. Where most of one is wanted that is no loss: the rest is written once more, by who has the ghosts.

    def conv_forward_inside(
        self,
        x: Array,
        w: Array,
        b: Array | None,
        win: Window,
        groups: int,
        out_spatial: Sequence[int],
        box: Sequence[tuple[int, int]],
        relu: bool = False,
    ) -> Array:
        out = tuple(out_spatial)
        g = Geometry.of(x.shape[0], x.shape[1:-1], out, win, groups, x.shape[-1], w.shape[0])
        if self._whole("forward", g, x, box, out):
            return self._conv_forward(x, w, b, win, groups, out, relu)
        return super().conv_forward_inside(x, w, b, win, groups, out, box, relu)  # type: ignore[misc,no-any-return]

    def conv_backward_data_inside(
        self,
        dy: Array,
        w: Array,
        win: Window,
        groups: int,
        in_spatial: Sequence[int],
        box: Sequence[tuple[int, int]],
    ) -> Array:
        inner = tuple(in_spatial)
        g = Geometry.of(dy.shape[0], inner, dy.shape[1:-1], win, groups, w.shape[-1] * groups, w.shape[0])
        if self._whole("data", g, dy, box, inner):
            return self.conv_backward_data(dy, w, win, groups, inner)
        return super().conv_backward_data_inside(dy, w, win, groups, inner, box)  # type: ignore[misc,no-any-return]

    def _whole(
        self, what: str, g: Geometry, x: Array, box: Sequence[tuple[int, int]], extents: tuple[int, ...]
    ) -> bool:
        """Whether cuDNN computes all of a result of which a box is wanted."""
        mostly = 2 * prod(stop - start for start, stop in box) > prod(extents)
        return mostly and self.graphs is not None and self.graphs.plan(what, g, x.dtype.name) is not None

    def conv_backward_weights(self, x: Array, dy: Array, win: Window, groups: int, out: Array | None = None) -> Array:
        dw = self._place((dy.shape[-1], *(d.kernel for d in win), x.shape[-1] // groups), x, out)
        g = Geometry.of(x.shape[0], x.shape[1:-1], dy.shape[1:-1], win, groups, x.shape[-1], dy.shape[-1])
        self._convolve("weights", g, x.dtype.name, {"dw": dw, "dy": self._dense(dy), "x": self._dense(x)})
        return self._placed(dw, out)

    def _convolve(
        self, what: str, g: Geometry, kind: str, arrays: dict[str, Array | None], bias: bool = False, relu: bool = False
    ) -> None:
        """Compute a pass of a convolution ("forward", "data", "weights") by cuDNN, or by our kernels."""

        def make(arithmetic: Math, card: Card) -> Job:
            if what == "forward":
                return launch_conv.conv_forward(arithmetic, card, g, bias, relu)
            if what == "data":
                return launch_conv.conv_backward_data(arithmetic, card, g)
            return launch_conv.conv_backward_weights(arithmetic, card, g)

        def ours() -> None:
            self._multiply((what, g, bias, relu), make, **arrays)

        if self.graphs is None or self.graphs.plan(what, g, kind, bias, relu) is None:
            ours()
        else:
            self.graphs.convolve((what, g, kind, bias, relu), arrays, ours)

    # Linear layers: by cuBLAS where there is one, else by our kernels.

    def linear_forward(self, x: Array, w: Array, b: Array | None) -> Array:
        sizes = (x.shape[0], x.shape[1], w.shape[0])
        y, bias = self.empty((sizes[0], sizes[2]), x.dtype), None if b is None else self._as(b, x.dtype)
        x, w = self._dense(x), self._as(w, x.dtype)
        if self.blas is not None and self.blas.takes(x, w):
            if bias is not None:  # in every row, before the product is added: one rounding
                rows = Box(address(y), address(bias), y.shape, dense(y.shape, y.itemsize), (0, y.itemsize))
                self._pack(moves([rows], y.itemsize))
            self.blas.multiply(y, x, w, of_b=TRANSPOSED, add=bias is not None)
            return y

        def make(arithmetic: Math, card: Card) -> Job:
            return launch_gemm.linear_forward(arithmetic, card, *sizes, bias=b is not None)

        self._multiply(("linear", "forward", *sizes, b is not None), make, y=y, x=x, w=w, b=bias)
        return y

    def linear_backward_data(self, dy: Array, w: Array) -> Array:
        sizes = (dy.shape[0], w.shape[1], dy.shape[1])
        dx, dy, w = self.empty(sizes[:2], dy.dtype), self._dense(dy), self._as(w, dy.dtype)
        if self.blas is not None and self.blas.takes(dy, w):
            self.blas.multiply(dx, dy, w)
            return dx

        def make(arithmetic: Math, card: Card) -> Job:
            return launch_gemm.linear_backward_data(arithmetic, card, *sizes)

        self._multiply(("linear", "data", *sizes), make, dx=dx, dy=dy, w=w)
        return dx

    def linear_backward_weights(self, x: Array, dy: Array, out: Array | None = None) -> Array:
        sizes = (x.shape[0], x.shape[1], dy.shape[1])
        dw, dy, x = self._place((sizes[2], sizes[1]), x, out), self._dense(dy), self._dense(x)
        if self.blas is not None and self.blas.takes(x, dy):
            self.blas.multiply(dw, dy, x, of_a=TRANSPOSED)
            return self._placed(dw, out)

        def make(arithmetic: Math, card: Card) -> Job:
            return launch_gemm.linear_backward_weights(arithmetic, card, *sizes)

        self._multiply(("linear", "weights", *sizes), make, dw=dw, dy=dy, x=x)
        return self._placed(dw, out)
