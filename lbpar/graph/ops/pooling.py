"""Max, average and global average pooling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from lbpar.config import layers
from lbpar.config.layers import Layer
from lbpar.errors import GraphError
from lbpar.graph.loops import Kernel, Operand, Shape, like, tensor, tensor_loops
from lbpar.graph.op import Attrs, Op
from lbpar.graph.ops.windows import Windowed


@dataclass(frozen=True)
class _Pool(Windowed):
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

    def infer(self, xs: Sequence[Shape]) -> Shape:
        self.check_rank(xs)
        for w, pads in zip(self.windows, self.pad, strict=True):
            if max(pads) > (w.reach + 1) // 2:
                raise GraphError(f"{self.kind}: padding {pads} must be at most half of the window ({w.reach + 1}).")
        n, *space, c = xs[0]
        return (n, *self.positions(tuple(space), self.ceil_mode), c)

    def _sides(self, xs: Sequence[Shape], by_output: bool) -> tuple[Operand, Operand]:
        return self.sides(tensor("x0", xs[0]), tensor("y", self.infer(xs)), by_output)


@dataclass(frozen=True)
class MaxPool(_Pool):
    """Maximum over each window; padding never wins; the first maximum in row-major order takes the gradient."""

    options: ClassVar[type[Layer]] = layers.MaxPool
    sample: ClassVar[Mapping[str, Any] | None] = {"kernel": 3, "stride": 1, "pad": 1}

    def attrs(self) -> Attrs:
        return (("windows", self.windows),)

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        x, y = self._sides(xs, True)
        writes, flops = (y, Operand("arg", y.dims, dtype="opaque")), prod(y.shape) * prod(self.kernel)
        return (Kernel("max_pool_forward", tensor_loops(y.shape), (x,), writes, self.attrs(), flops),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        # Push: the maximum's position is known where the window was read, so dx is made there, ghosts included.
        x, y = self._sides(xs, True)
        reads, writes = (like("dy", y), Operand("arg", y.dims, dtype="opaque")), (like("dx0", x),)
        loops = tensor_loops(y.shape)
        return (Kernel("max_pool_backward", loops, reads, writes, self.attrs(), prod(y.shape), push=True),)


@dataclass(frozen=True)
class AvgPool(_Pool):
    """Mean over each window; ``count_include_pad`` counts zeros of the padding (not what lies beyond it)."""

    count_include_pad: bool
    options: ClassVar[type[Layer]] = layers.AvgPool
    sample: ClassVar[Mapping[str, Any] | None] = {"kernel": 2}

    def _kernel(self, name: str, xs: Sequence[Shape], over: Shape, read: Operand, write: Operand) -> Kernel:
        extents = zip(xs[0][1:-1], self.pad, strict=True)
        counted = tuple((-p, e + q) if self.count_include_pad else (0, e) for e, (p, q) in extents)
        attrs, flops = (("windows", self.windows), ("counted", counted)), prod(self.infer(xs)) * prod(self.kernel)
        return Kernel(name, tensor_loops(over), (read,), (write,), attrs, flops)

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        x, y = self._sides(xs, True)
        return (self._kernel("avg_pool_forward", xs, y.shape, x, y),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        x, y = self._sides(xs, False)
        return (self._kernel("avg_pool_backward", xs, x.shape, like("dy", y), like("dx0", x)),)


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

    def _kernel(self, name: str, xs: Sequence[Shape], read: Operand, write: Operand) -> tuple[Kernel, ...]:
        attrs = (("scale", 1.0 / prod(xs[0][1:-1])),)
        return (Kernel(name, tensor_loops(xs[0]), (read,), (write,), attrs, prod(xs[0])),)

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        return self._kernel("spatial_sum", xs, tensor("x0", xs[0]), tensor("y", self.infer(xs)))

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        return self._kernel("spatial_broadcast", xs, tensor("dy", self.infer(xs)), tensor("dx0", xs[0]))
