"""Ops that pad and crop space: each output is one input, or zero, or the rim has what lies inside."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from lbpar.config import layers
from lbpar.config.layers import Layer
from lbpar.errors import GraphError
from lbpar.graph.loops import Kernel, Operand, Shape, Window, tensor, tensor_loops
from lbpar.graph.op import Op
from lbpar.graph.ops.lines import Line, Rule, line_kernels
from lbpar.graph.ops.windows import through


class Shift(Op):
    """y[o] = x[o - before], zero where that lies outside."""

    @abstractmethod
    def sides(self, xs: Sequence[Shape]) -> tuple[tuple[int, int], ...]:
        """Zeros before and after each spatial dimension; negative ones crop."""

    def infer(self, xs: Sequence[Shape]) -> Shape:
        n, *space, c = xs[0]
        sides = self.sides(xs)
        if len(sides) != len(space):
            raise GraphError(f"{self.kind}: got an input of shape {xs[0]}, expected {len(sides)} spatial dimensions.")
        out = tuple(e + p + q for e, (p, q) in zip(space, sides, strict=True))
        if any(e + min(p, 0) + min(q, 0) < 1 for e, (p, q) in zip(space, sides, strict=True)):
            raise GraphError(f"{self.kind}: nothing would be left of an input of shape {xs[0]}; crop less.")
        return (n, *out, c)

    def _kernel(self, read: Operand, write: Operand, before: Sequence[int]) -> tuple[Kernel, ...]:
        windows = [Window(1, pad=p) for p in before]
        return (
            Kernel(
                "shift", tensor_loops(write.shape), (through(read, windows),), (write,), (("before", tuple(before)),)
            ),
        )

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        return self._kernel(tensor("x0", xs[0]), tensor("y", self.infer(xs)), [p for p, _ in self.sides(xs)])

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        return self._kernel(tensor("dy", self.infer(xs)), tensor("dx0", xs[0]), [-p for p, _ in self.sides(xs)])


@dataclass(frozen=True)
class Pad(Shift):
    """A rim around space: zeros, whose negative numbers crop, or what lies inside, mirrored or repeated."""

    pad: tuple[tuple[int, int], ...]
    mode: layers.PadMode = "zeros"
    options: ClassVar[type[Layer]] = layers.PadLayer
    sample: ClassVar[Mapping[str, Any] | None] = {"pad": 1, "mode": "reflect"}

    def sides(self, xs: Sequence[Shape]) -> tuple[tuple[int, int], ...]:
        return self.pad

    def infer(self, xs: Sequence[Shape]) -> Shape:
        out = super().infer(xs)
        if self.mode == "reflect" and any(max(pq) >= e for pq, e in zip(self.pad, xs[0][1:-1], strict=True)):
            raise GraphError(
                f"{self.kind}: got an input of shape {xs[0]} and {[list(pq) for pq in self.pad]} to reflect, expected less than each extent."
            )
        return out

    def _rims(self, xs: Sequence[Shape]) -> tuple[Kernel, Kernel]:
        mode, sides = cast(Rule, self.mode), zip(xs[0][1:-1], self.pad, strict=True)
        lines = [Line(mode if p or q else "shift", e, e + p + q, p) for e, (p, q) in sides]
        return line_kernels(lines, xs[0], self.infer(xs))

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        return super().forward(xs, training) if self.mode == "zeros" else self._rims(xs)[:1]

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        return super().backward(xs, wanted) if self.mode == "zeros" else self._rims(xs)[1:]


@dataclass(frozen=True)
class Crop(Shift):
    """Space without its rim."""

    crop: tuple[tuple[int, int], ...]
    options: ClassVar[type[Layer]] = layers.Crop
    sample: ClassVar[Mapping[str, Any] | None] = {"crop": 1}

    def sides(self, xs: Sequence[Shape]) -> tuple[tuple[int, int], ...]:
        return tuple((-p, -q) for p, q in self.crop)


@dataclass(frozen=True)
class Fit(Shift):
    """The first input, cropped or padded at the ends to the spatial extents of the second; in a network it is a `Pad` (`padding`)."""

    options: ClassVar[type[Layer]] = layers.Fit

    def sides(self, xs: Sequence[Shape]) -> tuple[tuple[int, int], ...]:
        if len(xs) != 2 or len(xs[0]) != len(xs[1]):
            raise GraphError(
                f"fit: got inputs of shapes {', '.join(map(str, xs))}, expected the tensor to fit, and one with as many dimensions."
            )
        return tuple((0, b - a) for a, b in zip(xs[0][1:-1], xs[1][1:-1], strict=True))

    def padding(self, xs: Sequence[Shape]) -> Pad:
        """The same for these shapes, which reads the first input only."""
        return Pad(self.sides(xs))
