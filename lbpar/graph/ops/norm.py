"""Batch normalisation with statistics merged by count over chosen groups of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from lbpar.config import layers
from lbpar.config.layers import Layer, NormStats
from lbpar.graph.loops import Index, Kernel, Operand, Param, Shape, spatial_letters, tensor, tensor_loops
from lbpar.graph.op import Op


@dataclass(frozen=True)
class Norm(Op):
    """Batch normalisation over all dimensions but the last.

    Parameters
    ----------
    eps : float
        Added to the variance.
    momentum : float
        PyTorch's convention: ``running = (1 - momentum) * running + momentum * batch``, with the unbiased variance.
    affine : bool
        Learn a scale and a shift per channel.
    stats : {"global", "sample", "local"}
        Over which processes the training statistics are merged: all ("global": the result does not depend on
        the grid), those that share the samples ("sample": merged over space only), or none ("local").
        Running statistics always merge all processes.
    """

    eps: float
    momentum: float
    affine: bool
    stats: NormStats
    options: ClassVar[type[Layer]] = layers.Norm
    sample: ClassVar[Mapping[str, Any] | None] = {}

    def params(self, xs: Sequence[Shape]) -> dict[str, Param]:
        c = (Index(xs[0][-1], ("C",)),)
        affine = {"weight": Param(c, "ones", "norm"), "bias": Param(c, "zeros", "norm")} if self.affine else {}
        return affine | {"running_mean": Param(c, "zeros", "statistic"), "running_var": Param(c, "ones", "statistic")}

    def varying(self, xs: Sequence[Shape]) -> tuple[str, ...]:
        """Loops over whose processes the training statistics stay separate."""
        spatial = spatial_letters(len(xs[0]) - 2)
        return {"global": (), "sample": ("N",), "local": ("N", *spatial)}[self.stats]

    def trains(self, xs: Sequence[Shape], ways: Mapping[str, int]) -> bool:
        return self.stats == "global" or self.fewest(xs, ways) > 1

    def fewest(self, xs: Sequence[Shape], ways: Mapping[str, int]) -> int:
        """Fewest values per channel behind the training statistics of a group of processes.

        Parameters
        ----------
        xs : shapes of the inputs
        ways : mapping
            Number of parts of each split loop.
        """
        apart = self.varying(xs)
        extents = tensor_loops(xs[0])[:-1]
        return prod(max(1, e // ways.get(loop, 1)) if loop in apart else e for loop, e in extents)

    def _stat(self, value: str, rows: int, c: int, varying: tuple[str, ...] = ()) -> Operand:
        return Operand(value, (Index(rows), Index(c, ("C",))), "sum", varying, "float64")

    def _vectors(self, c: int, *names: str) -> tuple[Operand, ...]:
        return tuple(Operand(n, (Index(c, ("C",)),), dtype="float64" if "running" in n else None) for n in names)

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        shape, c = xs[0], xs[0][-1]
        loops, n = tensor_loops(shape), prod(shape)
        x0, y = tensor("x0", shape), tensor("y", shape)
        affine = self._vectors(c, "weight", "bias") if self.affine else ()
        eps = (("eps", self.eps),)
        if not training:
            reads = (x0, *self._vectors(c, "running_mean", "running_var"), *affine)
            return (Kernel("norm_inference", loops, reads, (y,), eps, 2 * n),)
        var = self.varying(xs)
        inside = tuple((name, e) for name, e in loops if name == "C" or name in var)
        shift = self._vectors(c, "running_mean")
        moments = self._stat("moments", 3, c, var)
        sums = (self._stat("sums", 4, c, var), *shift)
        return (
            Kernel("norm_sums", loops, (x0, *shift), (self._stat("sums", 4, c),), (), 3 * n),
            Kernel("norm_moments", inside, sums, (moments,), (*eps, ("shape", shape))),
            Kernel("norm_apply", loops, (x0, moments, *affine), (y,), (), 2 * n),
        )

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        shape, c = xs[0], xs[0][-1]
        loops, n = tensor_loops(shape), prod(shape)
        var = self.varying(xs)
        x0, dy = tensor("x0", shape), tensor("dy", shape)
        moments = self._stat("moments", 3, c, var)
        out = [Kernel("norm_backward_sums", loops, (x0, dy, moments), (self._stat("dsums", 2, c),), (), 4 * n)]
        if "dx0" in wanted:
            scale = self._vectors(c, "weight") if self.affine else ()
            reads = (x0, dy, moments, self._stat("dsums", 2, c, var), *scale)
            writes = (tensor("dx0", shape),)
            out.append(Kernel("norm_backward_data", loops, reads, writes, (("shape", shape),), 5 * n))
        if self.affine and "dweight" in wanted:
            grads = self._vectors(c, "dweight", "dbias")
            # Of each group's own sums: what is left to sum over groups travels with the other weight gradients.
            inside = tuple((name, e) for name, e in loops if name == "C" or name in var)
            out.append(Kernel("norm_param_grads", inside, (self._stat("dsums", 2, c, var),), grads))
        return tuple(out)

    def update(self, xs: Sequence[Shape]) -> tuple[Kernel, ...]:
        c = xs[0][-1]
        count = prod(xs[0][:-1])
        running = self._vectors(c, "running_mean", "running_var")
        attrs = (("momentum", self.momentum), ("count", count))
        return (Kernel("norm_running", (("C", c),), (self._stat("sums", 4, c), *running), running, attrs),)
