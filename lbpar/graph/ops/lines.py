"""Ops whose outputs are weighted sums of a few inputs along each spatial dimension: linear enlargement, reflected and repeated rims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from lbpar.graph.loops import Kernel, Operand, Shape, Window, tensor, tensor_loops

Rule = Literal["linear", "corners", "reflect", "replicate", "shift"]


@dataclass(frozen=True)
class Line:
    """How the outputs along one dimension follow from its inputs (`lbpar.engine.host.lines.taps` has the arithmetic).

    Parameters
    ----------
    rule : {"linear", "corners", "reflect", "replicate", "shift"}
        Linear interpolation of cells, or with the first and last input on the first and last output; inputs mirrored at
        the first and last, or these repeated; the inputs themselves.
    inputs, outputs : int
        How many there are.
    before : int
        Outputs before the first input (reflect, replicate).
    factor : int
        Outputs per input (linear, corners).
    """

    rule: Rule
    inputs: int
    outputs: int
    before: int = 0
    factor: int = 1

    @property
    def reads(self) -> tuple[Window, bool]:
        """The window through which outputs read inputs, and whether it is transposed. It may reach a little further than needed."""
        f, p, q = self.factor, self.before, self.outputs - self.inputs - self.before
        match self.rule:
            case "linear":  # input i counts for the outputs at less than one input's distance
                return Window(2 * f - f % 2, f, pad=f // 2), True
            case "corners":  # outputs are f to f + (f - 1) / (inputs - 1) to an input: they drift by up to f - 1
                return Window(3 * f - 2, f, pad=f - 1), True
            case "reflect":
                return Window(2 * (p + q) + 1, pad=p + 2 * q), False
            case "replicate":
                return Window(p + q + 1, pad=p + q), False
            case "shift":
                return Window(1), False

    @property
    def read_by(self) -> tuple[Window, bool]:
        """The window through which inputs find the outputs that read them."""
        p, q = self.before, self.outputs - self.inputs - self.before
        match self.rule:
            case "reflect":
                return Window(2 * (p + q) + 1, pad=p), False
            case "replicate":
                return Window(p + q + 1), False
            case _:
                return self.reads[0], False


def line_kernels(lines: Sequence[Line], x: Shape, y: Shape) -> tuple[Kernel, Kernel]:
    """The kernels that make y of x, and dx of dy, with a line per spatial dimension."""

    def kernel(name: str, read: Operand, write: Operand, windows: Sequence[tuple[Window, bool]]) -> Kernel:
        n, *space, c = read.dims
        cut = (replace(i, window=w, transposed=t) for i, (w, t) in zip(space, windows, strict=True))
        read = replace(read, dims=(n, *cut, c))
        flops = 2 * (len(y) - 2) * max(prod(x), prod(y))
        return Kernel(name, tensor_loops(write.shape), (read,), (write,), (("lines", tuple(lines)),), flops)

    forward = kernel("lines_forward", tensor("x0", x), tensor("y", y), [line.reads for line in lines])
    return forward, kernel("lines_backward", tensor("dy", y), tensor("dx0", x), [line.read_by for line in lines])
