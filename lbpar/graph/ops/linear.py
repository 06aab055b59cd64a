"""The fully connected layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

from lbpar.config import layers
from lbpar.config.layers import Layer
from lbpar.errors import GraphError
from lbpar.graph.loops import Index, Kernel, Operand, Param, Shape
from lbpar.graph.op import Op


@dataclass(frozen=True)
class Linear(Op):
    """y[n,f] = b[f] + sum over c of x[n,c] * w[f,c]; weights are (F, C)."""

    features: int
    bias: bool
    init: Literal["he", "glorot"]
    options: ClassVar[type[Layer]] = layers.Linear
    weighted: ClassVar[bool] = True

    def infer(self, xs: Sequence[Shape]) -> Shape:
        (x,) = xs
        if len(x) != 2:
            raise GraphError(
                f"linear: got an input of shape {x}, expected (N, C); put a flatten or global_avg_pool before it."
            )
        return (x[0], self.features)

    def loops(self, xs: Sequence[Shape]) -> dict[str, int]:
        return {"N": xs[0][0], "F": self.features, "C": xs[0][1]}

    def params(self, xs: Sequence[Shape]) -> dict[str, Param]:
        n, c = xs[0]
        out = {"weight": Param(self._operands(n, c)["weight"].dims, self.init, "weight", c, self.features)}
        if self.bias:
            out["bias"] = Param((Index(self.features, ("F",)),), "zeros", "bias")
        return out

    def _operands(self, n: int, c: int) -> dict[str, Operand]:
        f = Index(self.features, ("F",))
        batch, cin = Index(n, ("N",)), Index(c, ("C",))
        dims = {"x0": (batch, cin), "weight": (f, cin), "bias": (f,), "y": (batch, f)}
        dims |= {"d" + k: v for k, v in dims.items()}
        return {k: Operand(k, v) for k, v in dims.items()}

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        o, loops = self._operands(*xs[0]), tuple(self.loops(xs).items())
        reads = (o["x0"], o["weight"], *((o["bias"],) if self.bias else ()))
        return (Kernel("linear_forward", loops, reads, (o["y"],), (), self._flops(xs)),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        o, loops = self._operands(*xs[0]), tuple(self.loops(xs).items())
        flops = self._flops(xs)
        out = []
        if "dweight" in wanted:
            out.append(Kernel("linear_backward_weights", loops, (o["x0"], o["dy"]), (o["dweight"],), (), flops))
            if self.bias:
                inside = tuple((k, e) for k, e in loops if k != "C")
                out.append(Kernel("bias_backward", inside, (o["dy"],), (o["dbias"],)))
        if "dx0" in wanted:
            out.append(Kernel("linear_backward_data", loops, (o["dy"], o["weight"]), (o["dx0"],), (), flops))
        return tuple(out)

    def _flops(self, xs: Sequence[Shape]) -> int:
        return 2 * prod(xs[0]) * self.features
