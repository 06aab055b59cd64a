"""One loss that is the sum of several: of several outputs on targets of their own, or on those of a finer output (deep supervision)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lbpar.errors import GraphError
from lbpar.graph.loops import Kernel, Operand, Shape, Window
from lbpar.graph.ops.losses import F64, MEASURED, Loss
from lbpar.graph.ops.windows import through

RANKED = ("softmax_rank", "count_hits", "count_known_hits")
"""Kernels of what is counted of an output that is measured."""


@dataclass(frozen=True)
class Part:
    """A loss, times its factor, of the input ``x`` of a joint loss on its input ``target``.

    ``name``: under which it is measured; empty where the joint loss has no other that is; None if it is not.
    """

    loss: Loss
    x: int
    target: int
    name: str | None = None


@dataclass(frozen=True)
class Joint(Loss):
    """The sum of several losses. The first on a target is that of its finest output; a coarser one has every second, fourth, ... target."""

    parts: tuple[Part, ...]

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The kinds of its parts."""
        return " + ".join(dict.fromkeys(p.loss.kind for p in self.parts))

    @property
    def labels(self) -> bool:  # type: ignore[override]
        """As of the first."""
        return self.parts[0].loss.labels

    @property
    def limits(self) -> tuple[float, float]:  # type: ignore[override]
        """As of the first."""
        return self.parts[0].loss.limits

    @property
    def measures(self) -> Mapping[str, str]:  # type: ignore[override]
        """As of the first."""
        return self.parts[0].loss.measures

    @property
    def ignore_index(self) -> int | None:
        """As of the first."""
        return getattr(self.parts[0].loss, "ignore_index", None)

    @property
    def no_grad(self) -> frozenset[int]:  # type: ignore[override]
        """All targets."""
        return frozenset(p.target for p in self.parts)

    @property
    def results(self) -> Mapping[str, str]:
        named = {j: p.name for j, p in enumerate(self.parts) if p.name}
        each = {_of(v, j): f"{v}/{name}" for j, name in named.items() for v in MEASURED}
        return {**super().results, **each, **{f"y_{j}": f"loss/{name}" for j, name in named.items()}}

    def target_shape(self, output: Shape) -> Shape:
        return self.parts[0].loss.target_shape(output)

    def infer(self, xs: Sequence[Shape]) -> Shape:
        for part in self.parts:
            full = self._finest(part, xs)
            part.loss.infer((full, xs[part.target]))
            if xs[part.x] != full:
                self.strides(full, xs[part.x])
        return ()

    def loops(self, xs: Sequence[Shape]) -> dict[str, int]:
        return {n: e for p in reversed(self.parts) for n, e in p.loss.loops((xs[p.x],)).items()}

    def _finest(self, part: Part, xs: Sequence[Shape]) -> Shape:
        """Of the outputs that are compared with the same target, the one that has all of it."""
        return xs[next(p.x for p in self.parts if p.target == part.target)]

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

    def _each(self, xs: Sequence[Shape]) -> list[tuple[int, Part, Loss, tuple[Shape, Shape]]]:
        """Number, part, its loss and the shapes of what it compares."""
        return [
            (j, p, replace(p.loss, factor=self.factor * p.loss.factor), (xs[p.x], p.loss.target_shape(xs[p.x])))
            for j, p in enumerate(self.parts)
        ]

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        kernels: list[Kernel] = []
        for j, part, loss, shapes in self._each(xs):
            own = [k for k in loss.forward(shapes, training) if part.name is not None or k.name not in RANKED]
            full = self._finest(part, xs)
            if xs[part.x] != full:
                kernels.append(self._thin(xs, j, own, self.strides(full, xs[part.x])))
            kernels += [self._renamed(k, j, xs) for k in own]
        sums = tuple(Operand(f"y_{j}", (), dtype=F64) for j in range(len(self.parts)))
        return (*kernels, Kernel("add", (), sums, (Operand("y", (), dtype=F64),)))

    def _thin(self, xs: Sequence[Shape], j: int, kernels: Sequence[Kernel], strides: tuple[int, ...]) -> Kernel:
        """Takes the targets of part j out of all."""
        part = self.parts[j]
        kernel, target = next((k, o) for k in kernels for o in k.reads if o.value == "x1")
        dims = tuple(replace(i, extent=e) for i, e in zip(target.dims, xs[part.target], strict=True))
        padded = Operand(
            f"x{part.target}", (*dims, *dims[:1]) if part.loss.labels else dims, dtype=target.dtype
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
            self._renamed(k, j, xs)
            for j, part, loss, own in self._each(xs)
            if f"dx{part.x}" in wanted
            for k in loss.backward(own, frozenset({"dx0"}))
        )

    def _renamed(self, kernel: Kernel, j: int, xs: Sequence[Shape]) -> Kernel:
        """A kernel of part j, with values of its own."""
        part = self.parts[j]
        target = f"x{part.target}" if xs[part.x] == self._finest(part, xs) else f"thin_{j}"
        known = {"x0": f"x{part.x}", "dx0": f"dx{part.x}", "x1": target, "y": f"y_{j}"}

        def named(o: Operand) -> Operand:
            return replace(o, value=known.get(o.value, _of(o.value, j)))

        return replace(kernel, reads=tuple(map(named, kernel.reads)), writes=tuple(map(named, kernel.writes)))


def _of(value: str, j: int) -> str:
    """A value of part j; those of the first keep their names."""
    return f"{value}_{j}" if j else value
