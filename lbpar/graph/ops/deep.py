"""Deep supervision: one loss of several outputs, coarser ones against every second, fourth, ... target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lbpar.errors import GraphError
from lbpar.graph.loops import Kernel, Operand, Shape, Window
from lbpar.graph.ops.losses import F64, Loss
from lbpar.graph.ops.windows import through

RANKED = ("softmax_rank", "count_hits", "count_known_hits")
"""Kernels of what is counted of the first output only."""


@dataclass(frozen=True)
class Deep(Loss):
    """The weighted sum of a loss of the output and of further ones, ``x2``, ``x3``, ...

    Parameters
    ----------
    of : Loss
        The loss of each.
    weights : tuple of float
        Of the output, then of the others.
    """

    of: Loss
    weights: tuple[float, ...]

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The loss of each."""
        return self.of.kind

    @property
    def labels(self) -> bool:  # type: ignore[override]
        """As of each."""
        return self.of.labels

    @property
    def limits(self) -> tuple[float, float]:  # type: ignore[override]
        """As of each."""
        return self.of.limits

    @property
    def measures(self) -> Mapping[str, str]:  # type: ignore[override]
        """As of each; of the first output it is measured."""
        return self.of.measures

    @property
    def ignore_index(self) -> int | None:
        """As of each."""
        return getattr(self.of, "ignore_index", None)

    def target_shape(self, output: Shape) -> Shape:
        return self.of.target_shape(output)

    def infer(self, xs: Sequence[Shape]) -> Shape:
        for shape in xs[2:]:
            self.strides(xs[0], shape)
        return self.of.infer(xs[:2])

    def strides(self, full: Shape, shape: Shape) -> tuple[int, ...]:
        """Of which targets an output is: of every s-th along each dimension, a power of 2 where that gives its extent."""
        out = []
        for whole, part in zip(full[1:-1], shape[1:-1], strict=False):
            fits = [
                s for s in (*(2**i for i in range(whole.bit_length())), -(-whole // part)) if -(-whole // s) == part
            ]
            out += fits[:1]
        if len(full) != len(shape) or full[-1] != shape[-1] or len(out) < len(full) - 2:
            raise GraphError(
                f"{self.kind}: got a further output of shape {shape} beside one of shape {full}, expected the same channels and extents "
                "that are a half, a quarter, ... of it, rounded up."
            )
        return tuple(out)

    def _each(self, xs: Sequence[Shape]) -> list[tuple[int, Loss, tuple[Shape, Shape]]]:
        """Number, loss and shapes of what each output is compared with."""
        return [
            (
                j,
                replace(self.of, factor=self.factor * self.of.factor * weight, metrics=() if j else self.metrics),
                (shape, self.target_shape(shape)),
            )
            for j, (shape, weight) in enumerate(zip((xs[0], *xs[2:]), self.weights, strict=True))
        ]

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        kernels: list[Kernel] = []
        for j, loss, (shape, target) in self._each(xs):
            own = [k for k in loss.forward((shape, target), training) if not j or k.name not in RANKED]
            if j:
                kernels.append(self._thin(xs, j, own, self.strides(xs[0], shape)))
            kernels += [_renamed(k, j) for k in own]
        parts = tuple(Operand(f"y_{j}", (), dtype=F64) for j in range(len(self.weights)))
        return (*kernels, Kernel("add", (), parts, (Operand("y", (), dtype=F64),)))

    def _thin(self, xs: Sequence[Shape], j: int, kernels: Sequence[Kernel], strides: tuple[int, ...]) -> Kernel:
        """Takes the targets of output j out of all."""
        kernel, target = next((k, o) for k in kernels for o in k.reads if o.value == "x1")
        dims = tuple(replace(i, extent=e) for i, e in zip(target.dims, xs[1], strict=True))
        padded = Operand(
            "x1", (*dims, *dims[:1]) if self.labels else dims, dtype=target.dtype
        )  # `through` skips the last
        read = through(padded, [Window(1, s) for s in strides])
        read = replace(read, dims=read.dims[: len(dims)])
        own = {loop for i in dims for loop in i.loops}
        loops = tuple((loop, e) for loop, e in kernel.loops if loop in own)
        return Kernel(
            "thin", loops, (read,), (Operand(f"thin_{j}", target.dims, dtype=target.dtype),), (("strides", strides),)
        )

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        return tuple(
            _renamed(k, j)
            for j, loss, own in self._each(xs)
            if (f"dx{j + 1}" if j else "dx0") in wanted
            for k in loss.backward(own, frozenset({"dx0"}))
        )


def _renamed(kernel: Kernel, j: int) -> Kernel:
    """A kernel of output j, with values of its own."""
    known = {"x0": f"x{j + 1}", "dx0": f"dx{j + 1}", "x1": f"thin_{j}"} if j else {"y": "y_0"}

    def named(o: Operand) -> Operand:
        return replace(o, value=known.get(o.value, f"{o.value}_{j}" if j else o.value))

    return replace(kernel, reads=tuple(map(named, kernel.reads)), writes=tuple(map(named, kernel.writes)))
