"""Ops whose output depends on other channels of the same position: local response normalisation, softmax, channel shuffle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from lbpar.config import layers
from lbpar.config.layers import Layer
from lbpar.errors import GraphError
from lbpar.graph.loops import Index, Kernel, Operand, Shape, Window, like, plain, tensor, tensor_loops
from lbpar.graph.op import Op


@dataclass(frozen=True)
class LocalResponseNorm(Op):
    """y = x / scale^beta, scale = k + alpha / size · (sum of x² over ``size`` neighbouring channels), zeros beyond the ends.

    The window of channel c begins at c - size // 2, as PyTorch's does.
    """

    size: int
    alpha: float
    beta: float
    k: float
    options: ClassVar[type[Layer]] = layers.LocalResponseNorm
    sample: ClassVar[Mapping[str, Any] | None] = {}

    def _windowed(self, value: str, shape: Shape, transposed: bool) -> Operand:
        window = Window(self.size, pad=self.size // 2)
        return Operand(value, (*plain(shape)[:-1], Index(shape[-1], ("C",), window, transposed)))

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        (shape,) = xs
        reads, writes = (self._windowed("x0", shape, False),), (tensor(v, shape) for v in ("y", "scale"))
        flops = prod(shape) * (2 * self.size + 4)
        return (Kernel("local_response_norm_forward", tensor_loops(shape), reads, tuple(writes), self.attrs(), flops),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        (shape,) = xs
        loops, n = tensor_loops(shape), prod(shape)
        x, y, dy, scale, ratio = (tensor(v, shape) for v in ("x0", "y", "dy", "scale", "ratio"))
        reads, dx = (x, dy, scale, self._windowed("ratio", shape, True)), like("dx0", x)
        return (  # the first makes what the second sums over channels: one tensor with ghosts instead of three
            Kernel("local_response_norm_ratio", loops, (y, dy, scale), (ratio,), (), 2 * n),
            Kernel("local_response_norm_backward", loops, reads, (dx,), self.attrs(), n * (self.size + 5)),
        )


@dataclass(frozen=True)
class Softmax(Op):
    """exp(x - max) / sum of exp(x - max), over the channels; where they are split, maximum and sums are combined over ranks."""

    options: ClassVar[type[Layer]] = layers.Softmax
    sample: ClassVar[Mapping[str, Any] | None] = {}

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        (shape,) = xs
        loops, n, positions = tensor_loops(shape), prod(shape), plain(shape)[:-1]
        x, y = tensor("x0", shape), tensor("y", shape)
        peak, sums = Operand("peak", positions, "max"), Operand("sums", positions, dtype="float64")
        return (
            Kernel("softmax_max", loops, (x,), (peak,), (), n),
            Kernel("softmax_denominator", loops, (x, peak), (sums,), (), 3 * n),
            Kernel("softmax_forward", loops, (x, peak, sums), (y,), (), 3 * n),
        )

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        (shape,) = xs
        loops, n = tensor_loops(shape), prod(shape)
        y, dy, dx = (tensor(v, shape) for v in ("y", "dy", "dx0"))
        inner = Operand("inner", plain(shape)[:-1], dtype="float64")
        return (
            Kernel("softmax_inner", loops, (y, dy), (inner,), (), 2 * n),
            Kernel("softmax_backward", loops, (y, dy, inner), (dx,), (), 2 * n),
        )


@dataclass(frozen=True)
class ChannelShuffle(Op):
    """Channels as ``groups`` rows, read column by column: channel j·groups + i of y is channel i·(C/groups) + j of x.

    G and C count rows and columns; that both tensors have both, in another order, is all that the op is.
    """

    groups: int
    options: ClassVar[type[Layer]] = layers.ChannelShuffle
    sample: ClassVar[Mapping[str, Any] | None] = {"groups": 4}

    def infer(self, xs: Sequence[Shape]) -> Shape:
        if xs[0][-1] % self.groups:
            raise GraphError(f"channel_shuffle: groups={self.groups} must divide the channels ({xs[0][-1]}).")
        return xs[0]

    def loops(self, xs: Sequence[Shape]) -> dict[str, int]:
        return dict(tensor_loops(xs[0])[:-1]) | {"G": self.groups, "C": xs[0][-1] // self.groups}

    def splits(self, xs: Sequence[Shape]) -> dict[str, bool]:
        return {loop: False for loop in self.loops(xs) if loop not in ("G", "C")}

    def _kernel(self, xs: Sequence[Shape], read: str, written: str) -> tuple[Kernel, ...]:
        orders = {"x": ("G", "C"), "y": ("C", "G")}
        head, c = plain(xs[0])[:-1], xs[0][-1]
        ends = (Operand(v, (*head, Index(c, orders["x" if "x" in v else "y"]))) for v in (read, written))
        reads, writes = ((end,) for end in ends)
        return (Kernel("channel_shuffle", tuple(self.loops(xs).items()), reads, writes),)

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        return self._kernel(xs, "x0", "y")

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        return self._kernel(xs, "dy", "dx0")
