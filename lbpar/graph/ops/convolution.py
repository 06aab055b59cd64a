"""Convolution and transposed convolution, 2-D and 3-D, grouped, strided, dilated, asymmetrically padded.

Weights are (F, [kD], kH, kW, C/groups); a transposed convolution's are (C, [kD], kH, kW, F/groups), so that it is
the data gradient of a convolution with the same array.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

from lbpar.config import layers
from lbpar.config.layers import Layer
from lbpar.errors import GraphError
from lbpar.graph.loops import Index, Kernel, Operand, Param, Shape, Window, spatial_letters
from lbpar.graph.op import Op, like

Loops = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class _Filter(Op):
    """Fields and checks shared by both convolutions; one entry of each tuple per spatial dimension."""

    filters: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    bias: bool
    init: Literal["he", "glorot"]
    weighted: ClassVar[bool] = True

    def _check(self, xs: Sequence[Shape]) -> tuple[int, Shape, int]:
        (x,) = xs
        rank = len(self.kernel)
        if len(x) != rank + 2:
            raise GraphError(
                f"{self.kind}: got an input of shape {x}, expected (N, {'D, ' * (rank == 3)}H, W, C) for a {rank}-D kernel."
            )
        if x[-1] % self.groups or self.filters % self.groups:
            raise GraphError(
                f"{self.kind}: groups={self.groups} must divide both the input channels ({x[-1]}) and the filters ({self.filters})."
            )
        return x[0], x[1:-1], x[-1]

    def _windows(self) -> tuple[Window, ...]:
        cut = zip(self.kernel, self.stride, self.dilation, self.pad, strict=True)
        return tuple(Window(k, s, d, p[0]) for k, s, d, p in cut)

    def _channel(self, extent: int, loop: str) -> Index:
        return Index(extent, ("G", loop) if self.groups > 1 else (loop,))

    def _loops(self, n: int, spatial: Shape, c: int) -> Loops:
        g = self.groups
        names = spatial_letters(len(spatial))
        head = (("N", n), *zip(names, spatial, strict=True))
        return (*head, *((("G", g),) if g > 1 else ()), ("F", self.filters // g), ("C", c // g))

    def _kernel_dims(self) -> tuple[Index, ...]:
        return tuple(Index(k) for k in self.kernel)

    def _sides(
        self, n: int, inside: Shape, outside: Shape, small: Index, big: Index, *, by_output: bool
    ) -> tuple[Operand, Operand]:
        """The operands on the two sides of the windows: (input side, output side), indexed by the output or the input side."""
        names = spatial_letters(len(inside))
        windows = self._windows()
        first = Index(n, ("N",))
        if by_output:
            a = tuple(Index(e, (s,), w) for e, s, w in zip(inside, names, windows, strict=True))
            b = tuple(Index(e, (s,)) for e, s in zip(outside, names, strict=True))
        else:
            a = tuple(Index(e, (s,)) for e, s in zip(inside, names, strict=True))
            b = tuple(Index(e, (s,), w, True) for e, s, w in zip(outside, names, windows, strict=True))
        return Operand("in", (first, *a, small)), Operand("out", (first, *b, big))

    def _attrs(self) -> tuple[tuple[str, object], ...]:
        return (("windows", self._windows()),)

    def loops(self, xs: Sequence[Shape]) -> dict[str, int]:
        n, *spatial, _ = self.infer(xs)
        return dict(self._loops(n, tuple(spatial), xs[0][-1]))

    def splits(self, xs: Sequence[Shape]) -> dict[str, bool]:
        return {loop: loop == "G" for loop in self.loops(xs) if self.groups == 1 or loop not in ("F", "C")}

    def params(self, xs: Sequence[Shape]) -> dict[str, Param]:
        taps, c = prod(self.kernel), xs[0][-1]
        w = self._operands(xs, by_output=True)[2]
        out = {
            "weight": Param(w.dims, self.init, "weight", taps * c // self.groups, taps * self.filters // self.groups)
        }
        if self.bias:
            out["bias"] = Param((self._channel(self.filters, "F"),), "zeros", "bias")
        return out

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        x, y, w = self._operands(xs, by_output=True)
        loops = self._loops(y.shape[0], y.shape[1:-1], xs[0][-1])
        bias = (Operand("bias", (self._channel(self.filters, "F"),)),) if self.bias else ()
        return (Kernel(f"{self.kind}_forward", loops, (x, w, *bias), (y,), self._attrs(), self._flops(xs)),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        n, spatial, c = self._check(xs)
        kernels = []
        if "dweight" in wanted:
            x, y, w = self._operands(xs, by_output=True)
            loops, dy = self._loops(n, y.shape[1:-1], c), like("dy", y)
            name, flops = f"{self.kind}_backward_weights", self._flops(xs)
            kernels.append(Kernel(name, loops, (x, dy), (like("dweight", w),), self._attrs(), flops))
            if self.bias:
                # No C among its loops: every rank of a split sum holds the whole dy.
                inside = tuple((loop, e) for loop, e in loops if loop != "C")
                db = Operand("dbias", (self._channel(self.filters, "F"),))
                kernels.append(Kernel("bias_backward", inside, (dy,), (db,)))
        if "dx0" in wanted:
            x, y, w = self._operands(xs, by_output=False)
            loops, reads = self._loops(n, spatial, c), (like("dy", y), w)
            name, flops = f"{self.kind}_backward_data", self._flops(xs)
            kernels.append(Kernel(name, loops, reads, (like("dx0", x),), self._attrs(), flops))
        return tuple(kernels)

    @abstractmethod
    def _operands(self, xs: Sequence[Shape], *, by_output: bool) -> tuple[Operand, Operand, Operand]:
        """x, y and the weights; spatial loops run over the output, or else over the input."""

    @abstractmethod
    def _flops(self, xs: Sequence[Shape]) -> int:
        """Floating-point operations of one pass."""


@dataclass(frozen=True)
class Conv(_Filter):
    """Convolution (cross-correlation): y[n,o,f] = b[f] + sum over k, c of x[n, o*stride + k*dilation - pad, c] * w[f,k,c]."""

    options: ClassVar[type[Layer]] = layers.Conv

    def infer(self, xs: Sequence[Shape]) -> Shape:
        n, spatial, _ = self._check(xs)
        out = []
        for e, k, s, d, p in zip(spatial, self.kernel, self.stride, self.dilation, self.pad, strict=True):
            o = (e + p[0] + p[1] - (k - 1) * d - 1) // s + 1
            if o < 1:
                raise GraphError(
                    f"conv: kernel {k} (dilation {d}) is larger than the padded input extent {e} + {p[0]} + {p[1]}; use a smaller kernel or more padding."
                )
            out.append(o)
        return (n, *out, self.filters)

    def _operands(self, xs: Sequence[Shape], *, by_output: bool) -> tuple[Operand, Operand, Operand]:
        n, spatial, c = self._check(xs)
        cx, cf = self._channel(c, "C"), self._channel(self.filters, "F")
        x, y = self._sides(n, spatial, self.infer(xs)[1:-1], cx, cf, by_output=by_output)
        w = Operand("weight", (cf, *self._kernel_dims(), Index(c // self.groups, ("C",))))
        return like("x0", x), like("y", y), w

    def _flops(self, xs: Sequence[Shape]) -> int:
        return 2 * prod(self.infer(xs)) * prod(self.kernel) * xs[0][-1] // self.groups


@dataclass(frozen=True)
class ConvTranspose(_Filter):
    """Transposed convolution: y[n,o,f] = b[f] + sum over i, k, c with i*stride + k*dilation - pad = o of x[n,i,c] * w[c,k,f].

    ``output_pad`` lengthens the output at its end, as in PyTorch.
    """

    output_pad: tuple[int, ...]
    options: ClassVar[type[Layer]] = layers.ConvTranspose

    def infer(self, xs: Sequence[Shape]) -> Shape:
        n, spatial, _ = self._check(xs)
        cut = zip(spatial, self.kernel, self.stride, self.dilation, self.pad, self.output_pad, strict=True)
        if any(q >= max(s, d) for q, s, d in zip(self.output_pad, self.stride, self.dilation, strict=True)):
            raise GraphError(
                f"output_pad: got {list(self.output_pad)}, expected less than the stride {self.stride} or the dilation {self.dilation}."
            )
        out = tuple((e - 1) * s - p[0] - p[1] + (k - 1) * d + 1 + q for e, k, s, d, p, q in cut)
        if min(out) < 1:
            raise GraphError(f"conv_transpose: the output would have spatial shape {out}; use less padding.")
        return (n, *out, self.filters)

    def _operands(self, xs: Sequence[Shape], *, by_output: bool) -> tuple[Operand, Operand, Operand]:
        # x is the *output* side of the windows of the convolution that this op transposes.
        n, spatial, c = self._check(xs)
        cx, cf = self._channel(c, "C"), self._channel(self.filters, "F")
        y, x = self._sides(n, self.infer(xs)[1:-1], spatial, cf, cx, by_output=not by_output)
        w = Operand("weight", (cx, *self._kernel_dims(), Index(self.filters // self.groups, ("F",))))
        return like("x0", x), like("y", y), w

    def _flops(self, xs: Sequence[Shape]) -> int:
        return 2 * prod(xs[0]) * prod(self.kernel) * self.filters // self.groups
