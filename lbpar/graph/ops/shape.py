"""Ops that move elements: concatenate, flatten, nearest upsampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from lbpar.config import layers
from lbpar.config.layers import Layer
from lbpar.errors import GraphError
from lbpar.graph.loops import Index, Kernel, Operand, Shape, Window, plain, spatial_letters, tensor_loops
from lbpar.graph.op import Op, like


@dataclass(frozen=True)
class Concat(Op):
    """Concatenation along the channels."""

    options: ClassVar[type[Layer]] = layers.Concat

    def infer(self, xs: Sequence[Shape]) -> Shape:
        if not xs:
            raise GraphError("concat: got no input.")
        if any(s[:-1] != xs[0][:-1] for s in xs):
            raise GraphError(
                f"concat: got inputs of shapes {', '.join(map(str, xs))}, expected them equal but for the channels."
            )
        return (*xs[0][:-1], sum(s[-1] for s in xs))

    def loops(self, xs: Sequence[Shape]) -> dict[str, int]:
        return dict(tensor_loops(self.infer(xs)))

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
        y = Operand("y", plain(self.infer(xs)))
        return (Kernel("concat", tensor_loops(y.shape), tuple(self._inputs(xs)), (y,)),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        dy = Operand("dy", plain(self.infer(xs)))
        ops = [like("d" + o.value, o) for o in self._inputs(xs)]
        return tuple(Kernel("cut", tensor_loops(dy.shape), (dy,), (o,)) for o in ops if o.value in wanted)


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
        return (Kernel("reshape", tensor_loops(xs[0]), (Operand("x0", plain(xs[0])),), (self._output("y", xs),)),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        return (Kernel("reshape", tensor_loops(xs[0]), (self._output("dy", xs),), (Operand("dx0", plain(xs[0])),)),)


@dataclass(frozen=True)
class Upsample(Op):
    """Nearest-neighbour upsampling by an integer factor per spatial dimension."""

    factor: tuple[int, ...]
    options: ClassVar[type[Layer]] = layers.Upsample

    def infer(self, xs: Sequence[Shape]) -> Shape:
        (s,) = xs
        if len(s) != len(self.factor) + 2:
            raise GraphError(f"upsample: got an input of shape {s}, expected {len(self.factor)} spatial dimensions.")
        return (s[0], *(e * f for e, f in zip(s[1:-1], self.factor, strict=True)), s[-1])

    def loops(self, xs: Sequence[Shape]) -> dict[str, int]:
        return dict(tensor_loops(self.infer(xs)))

    def _windows(self) -> tuple[Window, ...]:
        return tuple(Window(f, f) for f in self.factor)  # one coarse cell covers f fine ones

    def _mixed(self, value: str, shape: Shape, transposed: bool) -> Operand:
        p = plain(shape)
        cells = zip(p[1:-1], self._windows(), strict=True)
        return Operand(value, (p[0], *(Index(i.extent, i.loops, w, transposed) for i, w in cells), p[-1]))

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        y = self.infer(xs)
        reads, writes = (self._mixed("x0", xs[0], True),), (Operand("y", plain(y)),)
        return (Kernel("upsample_forward", tensor_loops(y), reads, writes, (("factors", self.factor),), prod(y)),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        y = self.infer(xs)
        reads, writes = (self._mixed("dy", y, False),), (Operand("dx0", plain(xs[0])),)
        return (Kernel("upsample_backward", tensor_loops(xs[0]), reads, writes, (("factors", self.factor),), prod(y)),)
