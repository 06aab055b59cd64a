"""Losses, as means over the global batch. The class dimension may be split: its maximum and sums are inner statistics.

Each loss reads ``x0`` (the network's output) and ``x1`` (the target) and writes the scalar ``y``; its gradient is seeded
with one. Losses over classes also write ``hits``: how many positions have the target in the top 1, and in the top 5 of more than 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, prod
from typing import ClassVar, TypeVar

from lbpar.config import training
from lbpar.errors import GraphError
from lbpar.graph.loops import Index, Kernel, Operand, Shape, like, plain, tensor_loops
from lbpar.graph.op import Attrs, Op

F64 = "float64"
L = TypeVar("L", bound="type[Loss]")


@dataclass(frozen=True)
class Loss(Op):
    """A scalar loss of an output and a target."""

    no_grad: ClassVar[frozenset[int]] = frozenset({1})
    labels: ClassVar[bool] = False
    #: Smallest and largest of real targets.
    limits: ClassVar[tuple[float, float]] = (-inf, inf)

    def target_shape(self, output: Shape) -> Shape:
        """Shape of the target that fits an output of the given shape."""
        return output[:-1] if self.labels else output

    def infer(self, xs: Sequence[Shape]) -> Shape:
        x, t = xs
        if t != self.target_shape(x):
            raise GraphError(
                f"{self.kind}: got a target of shape {t} for an output of shape {x}, expected {self.target_shape(x)}."
            )
        return ()

    def loops(self, xs: Sequence[Shape]) -> dict[str, int]:
        return dict(_loops(xs[0]))


_loops = partial(tensor_loops, channel="F")


@dataclass(frozen=True)
class _Classes(Loss):
    """Shared parts of the losses over a softmax: labels (N, [D, H, W]) of int64, logits (N, [D, H, W], F)."""

    labels: ClassVar[bool] = True

    def _common(self, shape: Shape) -> tuple[Operand, Operand, Operand, Operand]:
        """Logits, labels, and per position the maximum and the sums of the softmax."""
        positions = plain(shape)[:-1]
        x0, labels = Operand("x0", plain(shape, ("F",))), Operand("x1", positions, dtype="int64")
        return x0, labels, Operand("peak", positions, "max"), Operand("sums", (Index(3), *positions), dtype=F64)

    def _softmax(self, shape: Shape) -> tuple[Kernel, ...]:
        x0, t, peak, sums = self._common(shape)
        loops, n = _loops(shape), prod(shape)
        rank = Operand("rank", t.dims, dtype=F64)
        tops = (1, 5) if shape[-1] > 5 else (1,)
        hits = Operand("hits", (Index(len(tops)),), dtype=F64)
        return (
            Kernel("softmax_max", loops, (x0,), (peak,), (), n),
            Kernel("softmax_sums", loops, (x0, peak, t), (sums,), (), 4 * n),
            Kernel("softmax_rank", loops, (x0, peak, sums, t), (rank,), (), n),
            Kernel("count_hits", loops[:-1], (rank,), (hits,), (("tops", tops),)),
        )


@dataclass(frozen=True)
class CrossEntropy(_Classes):
    """Softmax cross-entropy, mean over samples (and voxels), with label smoothing."""

    smoothing: float = 0.0
    kind: ClassVar[str] = "cross_entropy"

    def _attrs(self, shape: Shape) -> Attrs:
        return (("smoothing", self.smoothing), ("classes", shape[-1]), ("scale", 1.0 / prod(shape[:-1])))

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        sums, y = self._common(xs[0])[3], Operand("y", (), dtype=F64)
        loss = Kernel("cross_entropy_loss", _loops(xs[0])[:-1], (sums,), (y,), self._attrs(xs[0]))
        return (*self._softmax(xs[0]), loss)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        x0, t, peak, sums = self._common(xs[0])
        reads, writes, flops = (x0, peak, sums, t), (like("dx0", x0),), 4 * prod(xs[0])
        return (Kernel("cross_entropy_backward", _loops(xs[0]), reads, writes, self._attrs(xs[0]), flops),)


@dataclass(frozen=True)
class Dice(_Classes):
    """Soft Dice over softmax probabilities: mean over classes of 1 - (2 sum p t + eps) / (sum p + sum t + eps).

    The sums run over all samples and voxels of the batch.
    """

    eps: float = 1.0
    kind: ClassVar[str] = "dice"

    def _dsums(self, shape: Shape) -> Operand:
        return Operand("dsums", (Index(3), Index(shape[-1], ("F",))), dtype=F64)

    def _attrs(self, shape: Shape) -> Attrs:
        return (("eps", self.eps), ("classes", shape[-1]))

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        x0, t, peak, sums = self._common(xs[0])
        loops, dsums = _loops(xs[0]), self._dsums(xs[0])
        return (
            *self._softmax(xs[0]),
            Kernel("dice_sums", loops, (x0, peak, sums, t), (dsums,), (), 6 * prod(xs[0])),
            Kernel("dice_loss", loops[-1:], (dsums,), (Operand("y", (), dtype=F64),), self._attrs(xs[0])),
        )

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        x0, t, peak, sums = self._common(xs[0])
        loops, n = _loops(xs[0]), prod(xs[0])
        g, inner = Operand("g", x0.dims), Operand("inner", t.dims, dtype=F64)
        first = (x0, peak, sums, t, self._dsums(xs[0]))
        return (
            Kernel("dice_backward", loops, first, (g, inner), self._attrs(xs[0]), 6 * n),
            Kernel("dice_backward_data", loops, (x0, peak, sums, g, inner), (Operand("dx0", x0.dims),), (), 3 * n),
        )


@dataclass(frozen=True)
class Elementwise(Loss):
    """A mean over all elements of a function of output and target."""

    def _kernel(self, name: str, shape: Shape, write: Operand, operations: int) -> tuple[Kernel, ...]:
        reads, n = tuple(Operand(v, plain(shape, ("F",))) for v in ("x0", "x1")), prod(shape)
        return (Kernel(f"{self.kind}_{name}", _loops(shape), reads, (write,), (("scale", 1.0 / n),), operations * n),)

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        return self._kernel("loss", xs[0], Operand("y", (), dtype=F64), 3)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        return self._kernel("backward", xs[0], Operand("dx0", plain(xs[0], ("F",))), 2)


@dataclass(frozen=True)
class Mse(Elementwise):
    """Mean squared error."""

    kind: ClassVar[str] = "mse"


@dataclass(frozen=True)
class L1(Elementwise):
    """Mean absolute error."""

    kind: ClassVar[str] = "l1"


@dataclass(frozen=True)
class Huber(Elementwise):
    """Mean of d²/2 where the error d is at most 1, of |d| - 1/2 elsewhere."""

    kind: ClassVar[str] = "huber"


@dataclass(frozen=True)
class Bce(Elementwise):
    """Binary cross-entropy of logits, in its stable form."""

    kind: ClassVar[str] = "bce"
    limits: ClassVar[tuple[float, float]] = (0, 1)


LOSSES: dict[str, type[Loss]] = {c.kind: c for c in (CrossEntropy, Dice, Mse, L1, Huber, Bce)}


def register_loss(cls: L) -> L:
    """Make a loss known to run files and to `make_loss`; a decorator. See docs/howto/add-an-op.md."""
    LOSSES[cls.kind] = cls
    training.LOSSES[cls.kind] = (cls.__doc__ or cls.kind).split("\n")[0]
    return cls


def make_loss(kind: str, smoothing: float = 0.0) -> Loss:
    """A loss by name (a key of `LOSSES`); label smoothing counts for the cross-entropy only."""
    return CrossEntropy(smoothing) if kind == CrossEntropy.kind else LOSSES[kind]()
