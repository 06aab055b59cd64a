"""Element-wise ops: activations, add, multiply, dropout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from lbpar.config import layers
from lbpar.config.layers import Layer
from lbpar.errors import GraphError
from lbpar.graph.loops import Index, Kernel, Operand, Param, Shape, tensor, tensor_loops
from lbpar.graph.op import Op


@dataclass(frozen=True)
class Pointwise(Op):
    """Output element i depends on input elements i only; all tensors have one shape."""

    elementwise: ClassVar[bool] = True
    sample: ClassVar[Mapping[str, Any] | None] = {}

    def infer(self, xs: Sequence[Shape]) -> Shape:
        if not xs:
            raise GraphError(f"{self.kind}: got no input.")
        if any(s != xs[0] for s in xs):
            raise GraphError(f"{self.kind}: got inputs of shapes {', '.join(map(str, xs))}, expected equal shapes.")
        return xs[0]

    def _kernel(self, name: str, xs: Sequence[Shape], reads: Sequence[Operand], writes: str, **more: object) -> Kernel:
        attrs, flops = (*self.attrs(), *more.items()), prod(xs[0]) * max(1, len(reads) - 1)
        return Kernel(name, tensor_loops(xs[0]), tuple(reads), (tensor(writes, xs[0]),), attrs, flops)

    def _inputs(self, xs: Sequence[Shape]) -> list[Operand]:
        return [tensor(f"x{i}", s) for i, s in enumerate(xs)]


@dataclass(frozen=True)
class Activation(Pointwise):
    """y = f(x), whose gradient is a function of dy and of one of x and y."""

    #: Which; y is better, since what follows mostly keeps it anyway.
    kept: ClassVar[str] = "y"

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        return (self._kernel(f"{self.kind}_forward", xs, self._inputs(xs), "y"),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        reads = (tensor(self.kept, xs[0]), tensor("dy", xs[0]))
        return (self._kernel(f"{self.kind}_backward", xs, reads, "dx0"),)


@dataclass(frozen=True)
class Relu(Activation):
    """max(x, 0)."""

    options: ClassVar[type[Layer]] = layers.Relu


@dataclass(frozen=True)
class LeakyRelu(Activation):
    """x where x > 0, slope * x elsewhere."""

    slope: float
    options: ClassVar[type[Layer]] = layers.LeakyRelu


@dataclass(frozen=True)
class PRelu(Pointwise):
    """x where x > 0, weight * x elsewhere."""

    per_channel: bool
    options: ClassVar[type[Layer]] = layers.PRelu

    def params(self, xs: Sequence[Shape]) -> dict[str, Param]:
        return {"weight": Param(self._slope("weight", xs).dims, 0.25, "norm")}

    def _slope(self, value: str, xs: Sequence[Shape]) -> Operand:
        return Operand(value, (Index(xs[0][-1], ("C",)) if self.per_channel else Index(1),))

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        return (self._kernel("prelu_forward", xs, (*self._inputs(xs), self._slope("weight", xs)), "y"),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        reads, kernels = (tensor("x0", xs[0]), tensor("dy", xs[0])), []
        if "dweight" in wanted:
            sums = (self._slope("dweight", xs),)
            kernels.append(Kernel("prelu_slope_sums", tensor_loops(xs[0]), reads, sums, self.attrs(), 2 * prod(xs[0])))
        if "dx0" in wanted:
            kernels.append(self._kernel("prelu_backward_data", xs, (*reads, self._slope("weight", xs)), "dx0"))
        return tuple(kernels)


@dataclass(frozen=True)
class Sigmoid(Activation):
    """1 / (1 + exp(-x))."""

    options: ClassVar[type[Layer]] = layers.Sigmoid


@dataclass(frozen=True)
class Tanh(Activation):
    """scale * tanh(x)."""

    scale: float
    options: ClassVar[type[Layer]] = layers.Tanh


@dataclass(frozen=True)
class Elu(Activation):
    """x where x > 0, alpha * (exp(x) - 1) elsewhere."""

    alpha: float
    options: ClassVar[type[Layer]] = layers.Elu


@dataclass(frozen=True)
class Gelu(Activation):
    """x * P(normal < x)."""

    approximate: str
    options: ClassVar[type[Layer]] = layers.Gelu
    kept: ClassVar[str] = "x0"


@dataclass(frozen=True)
class Silu(Activation):
    """x / (1 + exp(-x))."""

    options: ClassVar[type[Layer]] = layers.Silu
    kept: ClassVar[str] = "x0"


@dataclass(frozen=True)
class Softplus(Activation):
    """log(1 + exp(beta * x)) / beta."""

    beta: float
    options: ClassVar[type[Layer]] = layers.Softplus


@dataclass(frozen=True)
class Hardsigmoid(Activation):
    """clip(slope * x + 1/2, 0, 1)."""

    slope: float
    options: ClassVar[type[Layer]] = layers.Hardsigmoid


@dataclass(frozen=True)
class Hardswish(Activation):
    """x * clip(x / 6 + 1/2, 0, 1)."""

    options: ClassVar[type[Layer]] = layers.Hardswish
    kept: ClassVar[str] = "x0"


@dataclass(frozen=True)
class Add(Pointwise):
    """Sum of the inputs; dy passes to each unchanged."""

    options: ClassVar[type[Layer]] = layers.Add

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        return (self._kernel("add", xs, self._inputs(xs), "y"),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        dy = tensor("dy", xs[0])
        ins = range(len(xs))
        return tuple(self._kernel("identity", xs, (dy,), f"dx{i}") for i in ins if f"dx{i}" in wanted)


@dataclass(frozen=True)
class Multiply(Pointwise):
    """Product of the inputs."""

    options: ClassVar[type[Layer]] = layers.Multiply

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        return (self._kernel("multiply", xs, self._inputs(xs), "y"),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        reads = (tensor("dy", xs[0]), *self._inputs(xs))
        ins = range(len(xs))
        return tuple(self._kernel("multiply_backward", xs, reads, f"dx{i}", i=i) for i in ins if f"dx{i}" in wanted)


@dataclass(frozen=True)
class Dropout(Pointwise):
    """Zero each element with probability ``rate`` and scale the rest by 1/(1-rate); the mask depends on the global index only."""

    rate: float
    options: ClassVar[type[Layer]] = layers.Dropout

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        return (self._kernel("dropout" if training else "identity", xs, self._inputs(xs), "y"),)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        return (self._kernel("dropout", xs, (tensor("dy", xs[0]),), "dx0"),)
