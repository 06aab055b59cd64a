"""What convolutions and pools share: windows that slide over the spatial dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from lbpar.errors import GraphError
from lbpar.graph.loops import Operand, Shape, Window
from lbpar.graph.op import Op


def through(operand: Operand, windows: Sequence[Window], transposed: bool = False) -> Operand:
    """The operand with its spatial dimensions read through windows of their loops."""
    n, *space, c = operand.dims
    cut = (replace(i, window=w, transposed=transposed) for i, w in zip(space, windows, strict=True))
    return replace(operand, dims=(n, *cut, c))


class Windowed(Op):
    """An op with a window; one entry of each tuple per spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """The window of each spatial dimension."""
        cut = zip(self.kernel, self.stride, self.dilation, self.pad, strict=True)
        return tuple(Window(k, s, d, before) for k, s, d, (before, _) in cut)

    def check_rank(self, xs: Sequence[Shape]) -> None:
        """Raise GraphError unless there is one input with as many spatial dimensions as the window."""
        (x,) = xs
        rank = len(self.kernel)
        if len(x) != rank + 2:
            letters = ", ".join("DHW"[3 - rank :])
            raise GraphError(
                f"{self.kind}: got an input of shape {x}, expected (N, {letters}, C) for a {rank}-D kernel."
            )

    def positions(self, spatial: Shape, ceil: bool = False) -> Shape:
        """How many places the window has in each dimension; ``ceil``: the last one may reach beyond the padding after the input."""
        out = []
        for e, w, (p, q) in zip(spatial, self.windows, self.pad, strict=True):
            room = e + p + q - w.reach - 1
            o = (-(-room // w.stride) if ceil else room // w.stride) + 1
            if ceil and (o - 1) * w.stride >= e + p:
                o -= 1  # the last window must start inside the input or its left padding
            if room < 0 or o < 1:
                raise GraphError(
                    f"{self.kind}: kernel {w.kernel} (dilation {w.dilation}) is larger than the padded input extent {e} + {p} + {q}; "
                    "use a smaller kernel or more padding."
                )
            out.append(o)
        return tuple(out)

    def sides(self, inside: Operand, outside: Operand, by_output: bool) -> tuple[Operand, Operand]:
        """The tensors that windows read and write, where the loops run over the outputs, or else over the inputs."""
        if by_output:
            return through(inside, self.windows), outside
        return inside, through(outside, self.windows, transposed=True)
