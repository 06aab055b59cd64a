"""Products with a matrix of weights: linear layers, convolutions and transposed convolutions, grouped, strided, dilated, padded unevenly.

Weights are (F, [kD], kH, kW, C/groups), or (F, C); a transposed convolution's are (C, [kD], kH, kW, F/groups), so that it is
the data gradient of a convolution with the same array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Literal

from lbpar.config import layers
from lbpar.config.layers import Layer
from lbpar.errors import GraphError
from lbpar.graph.loops import Index, Kernel, Operand, Param, Product, Shape, like, plain, tensor_loops
from lbpar.graph.ops.windows import Windowed

Loops = tuple[tuple[str, int], ...]


class Weighted(Windowed):
    """Outputs F that are sums over C (and over a kernel) of inputs times weights."""

    filters: int
    groups: int
    bias: bool
    init: Literal["he", "glorot"]
    weighted: ClassVar[bool] = True
    #: Whether the input lies on the output side of the windows.
    transposed: ClassVar[bool] = False

    def check_groups(self, xs: Sequence[Shape]) -> None:
        """Raise GraphError unless the groups divide the channels."""
        c = xs[0][-1]
        if c % self.groups or self.filters % self.groups:
            raise GraphError(
                f"{self.kind}: groups={self.groups} must divide both the input channels ({c}) and the filters ({self.filters})."
            )

    def _loops(self, xs: Sequence[Shape], by_output: bool) -> Loops:
        g, over = self.groups, self.infer(xs) if by_output else xs[0]
        groups = (("G", g),) if g > 1 else ()
        return (*tensor_loops(over)[:-1], *groups, ("F", self.filters // g), ("C", xs[0][-1] // g))

    def loops(self, xs: Sequence[Shape]) -> dict[str, int]:
        return dict(self._loops(xs, True))

    def splits(self, xs: Sequence[Shape]) -> dict[str, bool]:
        return {loop: loop == "G" for loop in self.loops(xs) if self.groups == 1 or loop not in ("F", "C")}

    def _operands(self, xs: Sequence[Shape], by_output: bool = True) -> tuple[Operand, Operand, Operand, Operand]:
        """x, y, the weights and the bias; spatial loops run over the output, or else over the input."""
        group = ("G",) if self.groups > 1 else ()
        x, y = Operand("x0", plain(xs[0], (*group, "C"))), Operand("y", plain(self.infer(xs), (*group, "F")))
        if self.transposed:
            y, x = self.sides(y, x, not by_output)
            first, last = x, Index(self.filters // self.groups, ("F",))
        else:
            x, y = self.sides(x, y, by_output)
            first, last = y, Index(xs[0][-1] // self.groups, ("C",))
        w = Operand("weight", (first.dims[-1], *map(Index, self.kernel), last))
        return x, y, w, Operand("bias", (y.dims[-1],))

    def _kernel(
        self, product: Product, xs: Sequence[Shape], reads: tuple[Operand, ...], write: Operand, by_output: bool = True
    ) -> Kernel:
        one, other = (xs[0], self.filters) if self.transposed else (self.infer(xs), xs[0][-1])
        flops = 2 * prod(one) * prod(self.kernel) * other // self.groups
        attrs = (("windows", self.windows),) if self.kernel else ()
        name = f"{self.kind}_{product}"
        return Kernel(name, self._loops(xs, by_output), reads, (write,), attrs, flops, product=product)

    def params(self, xs: Sequence[Shape]) -> dict[str, Param]:
        _, _, w, b = self._operands(xs)
        fan_in, fan_out = (prod(self.kernel) * n // self.groups for n in (xs[0][-1], self.filters))
        out = {"weight": Param(w.dims, self.init, "weight", fan_in, fan_out)}
        return out | ({"bias": Param(b.dims, "zeros", "bias")} if self.bias else {})

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        x, y, w, b = self._operands(xs)
        return (self._kernel("forward", xs, (x, w, b) if self.bias else (x, w), y),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        kernels = []
        if "dweight" in wanted:
            x, y, w, b = self._operands(xs)
            dy = like("dy", y)
            kernels.append(self._kernel("backward_weights", xs, (x, dy), like("dweight", w)))
            if self.bias:
                # No C among its loops: every rank of a split sum holds the whole dy.
                inside = tuple((loop, e) for loop, e in self._loops(xs, True) if loop != "C")
                kernels.append(Kernel("bias_backward", inside, (dy,), (like("dbias", b),)))
        if "dx0" in wanted:
            x, y, w, _ = self._operands(xs, by_output=False)
            kernels.append(self._kernel("backward_data", xs, (like("dy", y), w), like("dx0", x), by_output=False))
        return tuple(kernels)


@dataclass(frozen=True)
class _Filter(Weighted):
    filters: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    bias: bool
    init: Literal["he", "glorot"]


@dataclass(frozen=True)
class Conv(_Filter):
    """Convolution (cross-correlation): y[n,o,f] = b[f] + sum over k, c of x[n, o*stride + k*dilation - pad, c] * w[f,k,c]."""

    options: ClassVar[type[Layer]] = layers.Conv

    def infer(self, xs: Sequence[Shape]) -> Shape:
        self.check_rank(xs)
        self.check_groups(xs)
        return (xs[0][0], *self.positions(xs[0][1:-1]), self.filters)


@dataclass(frozen=True)
class ConvTranspose(_Filter):
    """Transposed convolution: y[n,o,f] = b[f] + sum over i, k, c with i*stride + k*dilation - pad = o of x[n,i,c] * w[c,k,f].

    ``output_pad`` lengthens the output at its end, as in PyTorch.
    """

    output_pad: tuple[int, ...]
    options: ClassVar[type[Layer]] = layers.ConvTranspose
    sample: ClassVar[Mapping[str, Any] | None] = {"filters": 32, "kernel": 2, "stride": 2}
    transposed: ClassVar[bool] = True

    def infer(self, xs: Sequence[Shape]) -> Shape:
        self.check_rank(xs)
        self.check_groups(xs)
        if any(q >= max(s, d) for q, s, d in zip(self.output_pad, self.stride, self.dilation, strict=True)):
            raise GraphError(
                f"output_pad: got {list(self.output_pad)}, expected less than the stride {self.stride} or the dilation {self.dilation}."
            )
        cut = zip(xs[0][1:-1], self.windows, self.pad, self.output_pad, strict=True)
        out = tuple((e - 1) * w.stride - p - q + w.reach + 1 + more for e, w, (p, q), more in cut)
        if min(out) < 1:
            raise GraphError(f"conv_transpose: the output would have spatial shape {out}; use less padding.")
        return (xs[0][0], *out, self.filters)


@dataclass(frozen=True)
class Linear(Weighted):
    """y[n,f] = b[f] + sum over c of x[n,c] * w[f,c]; weights are (F, C)."""

    features: int
    bias: bool
    init: Literal["he", "glorot"]
    options: ClassVar[type[Layer]] = layers.Linear
    kernel = stride = pad = dilation = ()
    groups = 1

    @property
    def filters(self) -> int:  # type: ignore[override]
        return self.features

    def infer(self, xs: Sequence[Shape]) -> Shape:
        (x,) = xs
        if len(x) != 2:
            raise GraphError(
                f"linear: got an input of shape {x}, expected (N, C); put a flatten or global_avg_pool before it."
            )
        return (x[0], self.features)
