"""Max, average and global average pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from lbpar.config import layers
from lbpar.config.layers import Layer
from lbpar.errors import GraphError
from lbpar.graph.loops import Index, Kernel, Operand, Shape, Window, plain, tensor_loops
from lbpar.graph.op import Op, like


@dataclass(frozen=True)
class _Pool(Op):
    """Fields of a windowed pool; one entry of each tuple per spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[tuple[int, int], ...]
    ceil_mode: bool
    dilation: tuple[int, ...]

    @classmethod
    def make(cls, **options: Any) -> Op:
        if options["stride"] is None:
            options["stride"] = options["kernel"]
        options.setdefault("dilation", (1,) * len(options["kernel"]))
        return cls(**options)

    def windows(self) -> tuple[Window, ...]:
        cut = zip(self.kernel, self.stride, self.dilation, self.pad, strict=True)
        return tuple(Window(k, s, d, p[0]) for k, s, d, p in cut)

    def infer(self, xs: Sequence[Shape]) -> Shape:
        (x,) = xs
        rank = len(self.kernel)
        if len(x) != rank + 2:
            raise GraphError(f"{self.kind}: got an input of shape {x}, expected {rank} spatial dimensions.")
        out = []
        for e, k, s, d, (p, q) in zip(x[1:-1], self.kernel, self.stride, self.dilation, self.pad, strict=True):
            room = e + p + q - (k - 1) * d - 1
            if max(p, q) > ((k - 1) * d + 1) // 2:
                raise GraphError(
                    f"{self.kind}: padding ({p}, {q}) must be at most half of the window ({(k - 1) * d + 1})."
                )
            o = (-(-room // s) if self.ceil_mode else room // s) + 1
            if self.ceil_mode and (o - 1) * s >= e + p:
                o -= 1  # the last window must start inside the input or its left padding
            if room < 0 or o < 1:
                raise GraphError(
                    f"{self.kind}: window {k} (dilation {d}) is larger than the padded input extent {e} + {p} + {q}."
                )
            out.append(o)
        return (x[0], *out, x[-1])

    def loops(self, xs: Sequence[Shape]) -> dict[str, int]:
        return dict(tensor_loops(self.infer(xs)))

    def _sides(self, xs: Sequence[Shape], by_output: bool) -> tuple[Operand, Operand]:
        x, y = xs[0], self.infer(xs)
        px, py = plain(x), plain(y)
        windows = self.windows()
        if by_output:
            px = (px[0], *(Index(i.extent, i.loops, w) for i, w in zip(px[1:-1], windows, strict=True)), px[-1])
        else:
            py = (py[0], *(Index(i.extent, i.loops, w, True) for i, w in zip(py[1:-1], windows, strict=True)), py[-1])
        return Operand("x0", px), Operand("y", py)


@dataclass(frozen=True)
class MaxPool(_Pool):
    """Maximum over each window; padding never wins; the first maximum in row-major order takes the gradient."""

    options: ClassVar[type[Layer]] = layers.MaxPool

    def _arg(self, y: Operand) -> Operand:
        return Operand("arg", y.dims, dtype="opaque")

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        a, b = self._sides(xs, True)
        loops = tensor_loops(self.infer(xs))
        flops = prod(self.infer(xs)) * prod(self.kernel)
        return (Kernel("max_pool_forward", loops, (a,), (b, self._arg(b)), (("windows", self.windows()),), flops),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        # Push: the maximum's position is known where the window was read, so dx is made there, ghosts included.
        a, b = self._sides(xs, True)
        loops = tensor_loops(self.infer(xs))
        reads = (like("dy", b), self._arg(b))
        attrs = (("windows", self.windows()),)
        return (Kernel("max_pool_backward", loops, reads, (like("dx0", a),), attrs, prod(self.infer(xs)), push=True),)


@dataclass(frozen=True)
class AvgPool(_Pool):
    """Mean over each window; ``count_include_pad`` counts zeros of the padding (not what lies beyond it)."""

    count_include_pad: bool
    options: ClassVar[type[Layer]] = layers.AvgPool

    def _attrs(self, xs: Sequence[Shape]) -> tuple[tuple[str, object], ...]:
        sides = zip(xs[0][1:-1], self.pad, strict=True)
        counted = tuple((-p, e + q) if self.count_include_pad else (0, e) for e, (p, q) in sides)
        return (("windows", self.windows()), ("counted", counted))

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        a, b = self._sides(xs, True)
        flops = prod(self.infer(xs)) * prod(self.kernel)
        return (Kernel("avg_pool_forward", tensor_loops(self.infer(xs)), (a,), (b,), self._attrs(xs), flops),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        a, b = self._sides(xs, False)
        flops = prod(self.infer(xs)) * prod(self.kernel)
        reads, writes = (like("dy", b),), (like("dx0", a),)
        return (Kernel("avg_pool_backward", tensor_loops(xs[0]), reads, writes, self._attrs(xs), flops),)


@dataclass(frozen=True)
class GlobalAvgPool(Op):
    """Mean over all spatial positions: (N, [D, H, W], C) to (N, C)."""

    options: ClassVar[type[Layer]] = layers.GlobalAvgPool

    def infer(self, xs: Sequence[Shape]) -> Shape:
        (x,) = xs
        if len(x) < 3:
            raise GraphError(f"global_avg_pool: got an input of shape {x}, expected spatial dimensions.")
        return (x[0], x[-1])

    def loops(self, xs: Sequence[Shape]) -> dict[str, int]:
        return dict(tensor_loops(xs[0]))

    def _attrs(self, xs: Sequence[Shape]) -> tuple[tuple[str, object], ...]:
        return (("scale", 1.0 / prod(xs[0][1:-1])),)

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        y = Operand("y", plain(self.infer(xs)))
        return (
            Kernel(
                "spatial_sum", tensor_loops(xs[0]), (Operand("x0", plain(xs[0])),), (y,), self._attrs(xs), prod(xs[0])
            ),
        )

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        dy, dx = Operand("dy", plain(self.infer(xs))), Operand("dx0", plain(xs[0]))
        return (Kernel("spatial_broadcast", tensor_loops(xs[0]), (dy,), (dx,), self._attrs(xs), prod(xs[0])),)
