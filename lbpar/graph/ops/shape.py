"""Ops that move elements: concatenate, flatten, upsampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from lbpar.config import layers
from lbpar.config.layers import Layer
from lbpar.errors import GraphError
from lbpar.graph.loops import Index, Kernel, Operand, Shape, Window, like, plain, spatial_letters, tensor, tensor_loops
from lbpar.graph.op import Op
from lbpar.graph.ops.lines import Line, Rule, line_kernels
from lbpar.graph.ops.windows import through


@dataclass(frozen=True)
class Concat(Op):
    """Concatenation along the channels."""

    options: ClassVar[type[Layer]] = layers.Concat
    sample: ClassVar[Mapping[str, Any] | None] = {}

    def infer(self, xs: Sequence[Shape]) -> Shape:
        if not xs:
            raise GraphError("concat: got no input.")
        if any(s[:-1] != xs[0][:-1] for s in xs):
            raise GraphError(
                f"concat: got inputs of shapes {', '.join(map(str, xs))}, expected them equal but for the channels."
            )
        return (*xs[0][:-1], sum(s[-1] for s in xs))

    def splits(self, xs: Sequence[Shape]) -> dict[str, bool]:
        return {loop: even for loop, even in super().splits(xs).items() if loop != "C"}

    def _inputs(self, xs: Sequence[Shape]) -> list[Operand]:
        # Input i is the part [offset, offset + C_i) of the output's channels: a window of one tap, shifted by the offset.
        out, offset = [], 0
        for i, s in enumerate(xs):
            head = plain(s)[:-1]
            out.append(Operand(f"x{i}", (*head, Index(s[-1], ("C",), Window(1, pad=offset)))))
            offset += s[-1]
        return out

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        y = tensor("y", self.infer(xs))
        return (Kernel("concat", tensor_loops(y.shape), tuple(self._inputs(xs)), (y,)),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        dy = tensor("dy", self.infer(xs))
        parts = (like("d" + x.value, x) for x in self._inputs(xs) if "d" + x.value in wanted)
        return tuple(Kernel("cut", tensor_loops(dy.shape), (dy,), (part,)) for part in parts)


@dataclass(frozen=True)
class Flatten(Op):
    """(N, [D, H, W], C) to (N, [D*H*W*]C), in memory order (channels last)."""

    options: ClassVar[type[Layer]] = layers.Flatten

    def infer(self, xs: Sequence[Shape]) -> Shape:
        return (xs[0][0], prod(xs[0][1:]))

    def loops(self, xs: Sequence[Shape]) -> dict[str, int]:
        return dict(tensor_loops(xs[0]))

    def splits(self, xs: Sequence[Shape]) -> dict[str, bool]:
        return {"N": False, list(self.loops(xs))[1]: True}

    def _output(self, value: str, xs: Sequence[Shape]) -> Operand:
        n, *rest = xs[0]
        inner = (*spatial_letters(len(rest) - 1), "C")
        return Operand(value, (Index(n, ("N",)), Index(prod(rest), inner)))

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        return (Kernel("reshape", tensor_loops(xs[0]), (tensor("x0", xs[0]),), (self._output("y", xs),)),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        return (Kernel("reshape", tensor_loops(xs[0]), (self._output("dy", xs),), (tensor("dx0", xs[0]),)),)


@dataclass(frozen=True)
class Upsample(Op):
    """Upsampling by an integer factor per spatial dimension, to the nearest neighbour or linear."""

    factor: tuple[int, ...]
    mode: str = "nearest"
    align_corners: bool = False
    options: ClassVar[type[Layer]] = layers.Upsample
    sample: ClassVar[Mapping[str, Any] | None] = {}

    def infer(self, xs: Sequence[Shape]) -> Shape:
        (s,) = xs
        if len(s) != len(self.factor) + 2:
            raise GraphError(f"upsample: got an input of shape {s}, expected {len(self.factor)} spatial dimensions.")
        return (s[0], *(e * f for e, f in zip(s[1:-1], self.factor, strict=True)), s[-1])

    def _kernel(self, name: str, over: Shape, read: Operand, write: Operand, flops: int) -> tuple[Kernel, ...]:
        return (Kernel(name, tensor_loops(over), (read,), (write,), (("factors", self.factor),), flops),)

    def _cells(self, operand: Operand, transposed: bool) -> Operand:
        return through(operand, [Window(f, f) for f in self.factor], transposed)  # one coarse cell covers f fine ones

    def _lines(self, xs: Sequence[Shape]) -> tuple[Kernel, Kernel]:
        rule: Rule = "corners" if self.align_corners else "linear"
        cut = zip(xs[0][1:-1], self.factor, strict=True)
        return line_kernels([Line(rule if f > 1 else "shift", e, e * f, 0, f) for e, f in cut], xs[0], self.infer(xs))

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        if self.mode == "linear":
            return self._lines(xs)[:1]
        y = self.infer(xs)
        return self._kernel("upsample_forward", y, self._cells(tensor("x0", xs[0]), True), tensor("y", y), prod(y))

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        if self.mode == "linear":
            return self._lines(xs)[1:]
        y = self.infer(xs)
        return self._kernel(
            "upsample_backward", xs[0], self._cells(tensor("dy", y), False), tensor("dx0", xs[0]), prod(y)
        )
