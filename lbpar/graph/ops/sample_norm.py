"""Normalisation within samples: instance, group and layer norm. Statistics are merged over the loops that do not index them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from lbpar.config import layers
from lbpar.config.layers import Layer
from lbpar.errors import GraphError
from lbpar.graph.loops import Index, Kernel, Operand, Param, Shape, plain, tensor_loops
from lbpar.graph.op import Op

Loops = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class SampleNorm(Op):
    """(x - mean) / sqrt(var + eps), with the biased variance, in training as in inference.

    Parameters
    ----------
    eps : float
        Added to the variance.
    affine : bool
        Learn a scale and a shift per channel.
    """

    eps: float
    affine: bool
    sample: ClassVar[Mapping[str, Any] | None] = {}
    #: The loops that the channels are.
    channels: ClassVar[tuple[str, ...]] = ("C",)

    @abstractmethod
    def statistics(self, shape: Shape) -> tuple[Index, ...]:
        """How the statistics of an input are indexed: the loops that they are *not* taken over."""

    def _loops(self, xs: Sequence[Shape]) -> Loops:
        return tensor_loops(xs[0])

    def loops(self, xs: Sequence[Shape]) -> dict[str, int]:
        return dict(self._loops(xs))

    def params(self, xs: Sequence[Shape]) -> dict[str, Param]:
        c = (Index(xs[0][-1], self.channels),)
        return {"weight": Param(c, "ones", "norm"), "bias": Param(c, "zeros", "norm")} if self.affine else {}

    def _tensor(self, value: str, xs: Sequence[Shape]) -> Operand:
        return Operand(value, plain(xs[0], self.channels))

    def _statistic(self, value: str, parts: int, xs: Sequence[Shape]) -> Operand:
        return Operand(value, (Index(parts), *self.statistics(xs[0])), dtype="float64")

    def _vectors(self, xs: Sequence[Shape], *names: str) -> tuple[Operand, ...]:
        return tuple(Operand(n, (Index(xs[0][-1], self.channels),)) for n in names) if self.affine else ()

    def _kernel(self, name: str, xs: Sequence[Shape], reads: Any, writes: Any, flops: int, **more: Any) -> Kernel:
        attrs = (("own", tuple(i.loops for i in self.statistics(xs[0]))), *more.items())
        return Kernel(f"sample_norm_{name}", self._loops(xs), reads, writes, attrs, flops * prod(xs[0]))

    def _count(self, xs: Sequence[Shape]) -> int:
        return prod(xs[0]) // prod(i.extent for i in self.statistics(xs[0]))

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        x0, y = self._tensor("x0", xs), self._tensor("y", xs)
        sums, moments = self._statistic("sums", 4, xs), self._statistic("moments", 3, xs)
        inside = tuple(dict.fromkeys(loop for i in self.statistics(xs[0]) for loop in i.loops))
        loops = tuple((loop, e) for loop, e in self._loops(xs) if loop in inside)
        attrs = (("eps", self.eps), ("count", self._count(xs)))
        return (
            self._kernel("sums", xs, (x0,), (sums,), 3),
            Kernel("sample_norm_moments", loops, (sums,), (moments,), attrs),
            self._kernel("apply", xs, (x0, moments, *self._vectors(xs, "weight", "bias")), (y,), 2),
        )

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        x0, dy, moments = self._tensor("x0", xs), self._tensor("dy", xs), self._statistic("moments", 3, xs)
        dsums, scale = self._statistic("dsums", 2, xs), self._vectors(xs, "weight")
        reads = (x0, dy, moments)
        first = self._kernel("backward_sums", xs, (*reads, *scale), (dsums, *self._vectors(xs, "dweight", "dbias")), 4)
        if "dx0" not in wanted:
            return (first,)
        dx = self._tensor("dx0", xs)
        return first, self._kernel("backward_data", xs, (*reads, dsums, *scale), (dx,), 5, count=self._count(xs))


@dataclass(frozen=True)
class InstanceNorm(SampleNorm):
    """Statistics per sample and channel, over space."""

    options: ClassVar[type[Layer]] = layers.InstanceNorm

    def infer(self, xs: Sequence[Shape]) -> Shape:
        if len(xs[0]) < 3 or prod(xs[0][1:-1]) < 2:
            raise GraphError(
                f"instance_norm: got an input of shape {xs[0]}, expected more than one position per channel; "
                "choose group_norm or layer_norm."
            )
        return xs[0]

    def statistics(self, shape: Shape) -> tuple[Index, ...]:
        return Index(shape[0], ("N",)), Index(shape[-1], ("C",))


@dataclass(frozen=True)
class GroupNorm(SampleNorm):
    """Statistics per sample and group of neighbouring channels, over space and the group's channels."""

    groups: int
    options: ClassVar[type[Layer]] = layers.GroupNorm
    sample: ClassVar[Mapping[str, Any] | None] = {"groups": 8}
    channels: ClassVar[tuple[str, ...]] = ("G", "C")

    def infer(self, xs: Sequence[Shape]) -> Shape:
        if xs[0][-1] % self.groups:
            raise GraphError(f"group_norm: groups={self.groups} must divide the channels ({xs[0][-1]}).")
        return xs[0]

    def _loops(self, xs: Sequence[Shape]) -> Loops:
        *rest, (_, c) = tensor_loops(xs[0])
        return (*rest, ("G", self.groups), ("C", c // self.groups))

    def splits(self, xs: Sequence[Shape]) -> dict[str, bool]:
        return {loop: loop == "G" for loop in self.loops(xs) if loop != "C"}

    def statistics(self, shape: Shape) -> tuple[Index, ...]:
        return Index(shape[0], ("N",)), Index(self.groups, ("G",))


@dataclass(frozen=True)
class LayerNorm(SampleNorm):
    """Statistics per sample and position, over the channels (as ConvNeXt's, and PyTorch's of features)."""

    options: ClassVar[type[Layer]] = layers.LayerNorm

    def statistics(self, shape: Shape) -> tuple[Index, ...]:
        return plain(shape)[:-1]
