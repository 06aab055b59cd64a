"""Losses, as means over the global batch. The class dimension may be split: its maximum and sums are inner statistics.

Each loss reads ``x0`` (the network's output) and ``x1`` (the target) and writes the scalar ``y``; its gradient is seeded
with one. Losses over classes also write ``hits``: how many positions have the target in the top 1, and in the top 5 of more than 5;
and in evaluation, if metrics follow from them, ``counts`` (3, F), per class how many positions are of it and found, taken for it, of it,
``confusion`` (F, F), and ``volumes`` (2, F), per class the sum of the Dice of each sample that has one, and how many have. Losses of errors then write ``errors``: the sums of |x0 - x1| and of its square.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from math import inf, prod
from typing import ClassVar, TypeVar

from lbpar.config import losses
from lbpar.errors import ConfigError, GraphError
from lbpar.graph.loops import Index, Kernel, Operand, Shape, like, plain, tensor_loops
from lbpar.graph.op import Attrs, Op

F64 = "float64"
MEASURED = ("hits", "counts", "confusion", "volumes", "errors")
"""What losses measure beside themselves."""
L = TypeVar("L", bound="type[Loss]")


@dataclass(frozen=True)
class Loss(Op):
    """A scalar loss of an output and a target, times a factor. ``metrics`` are measured beside it in evaluation."""

    metrics: tuple[str, ...] = field(default=(), kw_only=True)
    factor: float = field(default=1.0, kw_only=True)

    no_grad: ClassVar[frozenset[int]] = frozenset({1})
    labels: ClassVar[bool] = False
    #: Smallest and largest of real targets.
    limits: ClassVar[tuple[float, float]] = (-inf, inf)
    #: The metrics that it can measure, and the value each follows from.
    measures: ClassVar[Mapping[str, str]] = {}

    @property
    def results(self) -> Mapping[str, str]:
        """Values that every rank is told, and what they are called."""
        return {"y": "loss", **{v: v for v in MEASURED}}

    @property
    def measured(self) -> frozenset[str]:
        """Values from which its metrics follow."""
        return frozenset(self.measures[m] for m in self.metrics)

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
    """Losses over a softmax: labels (N, [D, H, W]) of int64, logits (N, [D, H, W], F).

    The loss is the sum of its terms: a cross-entropy with a factor per position (of its class, 0 where it is ignored, with
    ``gamma`` also of its probability), and a Dice over regions. Where neither is asked for more than its plain form, kernels
    are those of the plain form, which every engine has; others run on NumPy's.
    """

    class_weights: tuple[float, ...] | None = field(default=None, kw_only=True)
    ignore_index: int | None = field(default=None, kw_only=True)

    labels: ClassVar[bool] = True
    measures: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("dice", "iou", "balanced_accuracy"), "counts"),
        "confusion": "confusion",
        "dice_per_volume": "volumes",
    }

    def infer(self, xs: Sequence[Shape]) -> Shape:
        shape, weights = super().infer(xs), self.class_weights
        if weights is not None and (len(weights) != xs[0][-1] or not any(weights)):
            raise GraphError(
                f"{self.kind}: got the class weights {list(weights)}, expected {xs[0][-1]}, one per class, not all 0."
            )
        return shape

    @abstractmethod
    def _terms(self, shape: Shape) -> tuple[_Term, ...]:
        """What the loss is the sum of."""

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        shape, terms = xs[0], self._terms(xs[0])
        values = ["y"] if len(terms) == 1 else [t.name for t in terms]
        parts = tuple(Operand(v, (), dtype=F64) for v in values)
        own = tuple(k for t, y in zip(terms, parts, strict=True) for k in t.forward(shape, y))
        total = () if len(terms) == 1 else (Kernel("add", (), parts, (Operand("y", (), dtype=F64),)),)
        return (*self._softmax(shape), *own, *total, *(() if training else self._measure(shape)))

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        return tuple(k for t in self._terms(xs[0]) for k in t.backward(xs[0]))

    def _softmax(self, shape: Shape) -> tuple[Kernel, ...]:
        x0, t, peak, sums = _common(shape)
        loops, n = _loops(shape), prod(shape)
        rank = Operand("rank", t.dims, dtype=F64)
        tops = (1, 5) if shape[-1] > 5 else (1,)
        known = self.ignore_index is not None  # then their number comes last
        hits = Operand("hits", (Index(len(tops) + known),), dtype=F64)
        if known:
            attrs = (("tops", tops), ("ignore", self.ignore_index))
            count = Kernel("count_known_hits", loops[:-1], (rank, t), (hits,), attrs)
        else:
            count = Kernel("count_hits", loops[:-1], (rank,), (hits,), (("tops", tops),))
        return (
            Kernel("softmax_max", loops, (x0,), (peak,), (), n),
            Kernel("softmax_sums", loops, (x0, peak, t), (sums,), (), 4 * n),
            Kernel("softmax_rank", loops, (x0, peak, sums, t), (rank,), (), n),
            count,
        )

    def _measure(self, shape: Shape) -> tuple[Kernel, ...]:
        """Which class is the largest, and how often it is the target: what metrics follow from."""
        if not self.measured:
            return ()
        (x0, t, peak, _), loops, classes = _common(shape), _loops(shape), shape[-1]
        first = Operand("first", t.dims, "max", dtype=F64)
        shapes = {"counts": (3, classes), "confusion": (classes, classes)}
        attrs = (("classes", classes), ("ignore", self.ignore_index))
        each = Operand("each", (Index(shape[0], ("N",)), *_whole((3, classes))), dtype=F64)
        volumes = (
            Kernel("sample_counts", loops[:-1], (first, t), (each,), attrs),
            Kernel("dice_of_samples", loops[:1], (each,), (Operand("volumes", _whole((2, classes)), dtype=F64),)),
        )
        return (
            Kernel("softmax_first", loops, (x0, peak), (first,), (), prod(shape)),
            *(
                Kernel(f"class_{v}", loops[:-1], (first, t), (Operand(v, _whole(shapes[v]), dtype=F64),), attrs)
                for v in sorted(self.measured & shapes.keys())
            ),
            *(volumes if "volumes" in self.measured else ()),
        )


def _whole(shape: Shape) -> tuple[Index, ...]:
    """Dimensions that are never split."""
    return tuple(map(Index, shape))


def _common(shape: Shape) -> tuple[Operand, Operand, Operand, Operand]:
    """Logits, labels, and per position the maximum and the sums of the softmax."""
    positions = plain(shape)[:-1]
    x0, labels = Operand("x0", plain(shape, ("F",))), Operand("x1", positions, dtype="int64")
    return x0, labels, Operand("peak", positions, "max"), Operand("sums", (Index(3), *positions), dtype=F64)


@dataclass(frozen=True)
class _Term:
    """One of the terms that a loss over a softmax is the sum of, times a factor."""

    of: _Classes
    factor: float = 1.0
    name: ClassVar[str] = ""

    @abstractmethod
    def forward(self, shape: Shape, y: Operand) -> tuple[Kernel, ...]:
        """Kernels that write the term to ``y``."""

    @abstractmethod
    def backward(self, shape: Shape) -> tuple[Kernel, ...]:
        """Kernels that write its gradient, ``dx0``."""


@dataclass(frozen=True)
class _CrossEntropy(_Term):
    smoothing: float = 0.0
    gamma: float = 0.0
    name: ClassVar[str] = "entropy"

    @property
    def _plain(self) -> bool:
        return self.of.class_weights is None and self.of.ignore_index is None and not self.gamma

    def _attrs(self, shape: Shape) -> Attrs:
        if self._plain:
            scale = self.factor / prod(shape[:-1])
            return (("smoothing", self.smoothing), ("classes", shape[-1]), ("scale", scale))
        weights = self.of.class_weights or (1.0,) * shape[-1]
        return (
            ("smoothing", self.smoothing),
            ("gamma", self.gamma),
            ("class_weights", weights),
            ("scale", self.factor),
        )

    def _weighed(self, shape: Shape) -> tuple[Operand, ...]:
        """Per position its factor, all factors together, and per position the sum for smoothing if there is some."""
        positions = _common(shape)[1].dims
        smooth = (Operand("spread", positions, dtype=F64),) if self.smoothing else ()
        return Operand("factors", positions, dtype=F64), Operand("total", (), dtype=F64), *smooth

    def forward(self, shape: Shape, y: Operand) -> tuple[Kernel, ...]:
        x0, t, peak, sums = _common(shape)
        loops, n = _loops(shape), prod(shape)
        if self._plain:
            return (Kernel("cross_entropy_loss", loops[:-1], (sums,), (y,), self._attrs(shape)),)
        own, attrs = self._weighed(shape), self._attrs(shape)
        which = (("class_weights", dict(attrs)["class_weights"]), ("ignore", self.of.ignore_index))
        spread = (Kernel("class_spread", loops, (x0, peak), own[2:], which[:1], 2 * n),) if own[2:] else ()
        return (
            Kernel("label_factors", loops[:-1], (t,), own[:2], which),
            *spread,
            Kernel(
                "smoothed_entropy_loss" if spread else "weighed_entropy_loss", loops[:-1], (sums, *own), (y,), attrs
            ),
        )

    def backward(self, shape: Shape) -> tuple[Kernel, ...]:
        x0, t, peak, sums = _common(shape)
        name = "cross_entropy_backward" if self._plain else "weighed_entropy_backward"
        reads = (x0, peak, sums, t, *(() if self._plain else self._weighed(shape)[:2]))
        return (Kernel(name, _loops(shape), reads, (like("dx0", x0),), self._attrs(shape), 4 * prod(shape)),)


@dataclass(frozen=True)
class _Dice(_Term):
    eps: float = 1.0
    background: bool = True
    per_sample: bool = False
    name: ClassVar[str] = "overlap"

    @property
    def _plain(self) -> bool:
        return (
            self.of.class_weights is None and self.of.ignore_index is None and self.background and not self.per_sample
        )

    def _dsums(self, shape: Shape) -> Operand:
        samples = (Index(shape[0], ("N",)),) if self.per_sample else ()
        return Operand("dsums", (Index(3), *samples, Index(shape[-1], ("F",))), dtype=F64)

    def _attrs(self, shape: Shape) -> Attrs:
        classes = shape[-1]
        if self._plain:
            return (("eps", self.eps), ("classes", classes / self.factor))
        weights = list(self.of.class_weights or (1.0,) * classes)
        if not self.background:
            weights[0] = 0.0
        if not sum(weights):
            raise GraphError(f"{self.of.kind}: without class 0 no class with a weight above 0 is left, expected one.")
        total = sum(weights) * (shape[0] if self.per_sample else 1) / self.factor
        return (("eps", self.eps), ("factors", tuple(w / total for w in weights)), ("ignore", self.of.ignore_index))

    def forward(self, shape: Shape, y: Operand) -> tuple[Kernel, ...]:
        x0, t, peak, sums = _common(shape)
        loops, dsums, attrs, n = _loops(shape), self._dsums(shape), self._attrs(shape), prod(shape)
        first = (x0, peak, sums, t)
        if self._plain:
            return (
                Kernel("dice_sums", loops, first, (dsums,), (), 6 * n),
                Kernel("dice_loss", loops[-1:], (dsums,), (y,), attrs),
            )
        samples = loops[:1] if self.per_sample else ()
        which = (("ignore", self.of.ignore_index), ("per_sample", self.per_sample))
        return (
            Kernel("region_sums", loops, first, (dsums,), which, 6 * n),
            Kernel("region_loss", (*samples, loops[-1]), (dsums,), (y,), attrs),
        )

    def backward(self, shape: Shape) -> tuple[Kernel, ...]:
        x0, t, peak, sums = _common(shape)
        loops, n = _loops(shape), prod(shape)
        g, inner = Operand("g", x0.dims), Operand("inner", t.dims, dtype=F64)
        first, name = (x0, peak, sums, t, self._dsums(shape)), "dice_backward" if self._plain else "region_backward"
        return (
            Kernel(name, loops, first, (g, inner), self._attrs(shape), 6 * n),
            Kernel("dice_backward_data", loops, (x0, peak, sums, g, inner), (Operand("dx0", x0.dims),), (), 3 * n),
        )


@dataclass(frozen=True)
class CrossEntropy(_Classes):
    """Softmax cross-entropy, mean over samples (and voxels), with label smoothing."""

    smoothing: float = 0.0
    kind: ClassVar[str] = "cross_entropy"

    def _terms(self, shape: Shape) -> tuple[_Term, ...]:
        return (_CrossEntropy(self, self.factor, self.smoothing),)


@dataclass(frozen=True)
class Focal(_Classes):
    """Cross-entropy times (1 - p)^gamma, with p the probability of the target."""

    gamma: float = 2.0
    kind: ClassVar[str] = "focal"

    def _terms(self, shape: Shape) -> tuple[_Term, ...]:
        return (_CrossEntropy(self, self.factor, gamma=self.gamma),)


@dataclass(frozen=True)
class Dice(_Classes):
    """Soft Dice over softmax probabilities: mean over classes of 1 - (2 sum p t + eps) / (sum p + sum t + eps).

    The sums run over all samples and voxels of the batch, or over those of each sample.
    """

    eps: float = 1.0
    background: bool = True
    per_sample: bool = False
    kind: ClassVar[str] = "dice"

    def _terms(self, shape: Shape) -> tuple[_Term, ...]:
        return (_Dice(self, self.factor, self.eps, self.background, self.per_sample),)


@dataclass(frozen=True)
class DiceCrossEntropy(_Classes):
    """The weighted sum of Dice and cross-entropy (or, with ``gamma``, focal loss)."""

    dice: float = 1.0
    cross_entropy: float = 1.0
    gamma: float = 0.0
    smoothing: float = 0.0
    eps: float = 1.0
    background: bool = True
    per_sample: bool = False
    kind: ClassVar[str] = "dice_cross_entropy"

    def _terms(self, shape: Shape) -> tuple[_Term, ...]:
        return (
            _CrossEntropy(self, self.factor * self.cross_entropy, self.smoothing, self.gamma),
            _Dice(self, self.factor * self.dice, self.eps, self.background, self.per_sample),
        )


@dataclass(frozen=True)
class Elementwise(Loss):
    """A mean over all elements of a function of output and target."""

    measures: ClassVar[Mapping[str, str]] = {"mae": "errors", "rmse": "errors"}

    def _kernel(self, name: str, shape: Shape, write: Operand, operations: int) -> tuple[Kernel, ...]:
        reads, n = tuple(Operand(v, plain(shape, ("F",))) for v in ("x0", "x1")), prod(shape)
        return (
            Kernel(
                f"{self.kind}_{name}", _loops(shape), reads, (write,), (("scale", self.factor / n),), operations * n
            ),
        )

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        loss = self._kernel("loss", xs[0], Operand("y", (), dtype=F64), 3)
        if training or not self.measured:
            return loss
        errors = Operand("errors", (Index(2),), dtype=F64)
        return (*loss, Kernel("error_sums", _loops(xs[0]), loss[0].reads, (errors,), (), 4 * prod(xs[0])))

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
    measures: ClassVar[Mapping[str, str]] = {}


_OWN = (CrossEntropy, Focal, Dice, DiceCrossEntropy, Mse, L1, Huber, Bce)
LOSSES: dict[str, type[Loss]] = {c.kind: c for c in _OWN}


def register_loss(cls: L) -> L:
    """Make a loss known to run files and to `make_loss`; a decorator. See docs/howto/add-an-op.md."""
    LOSSES[cls.kind] = cls
    losses.register_options(cls.kind, (cls.__doc__ or cls.kind).split("\n")[0])
    return cls


def make_loss(options: losses.Loss, smoothing: float = 0.0, metrics: tuple[str, ...] = ()) -> Loss:
    """The loss of a run file, with label smoothing and the metrics that are measured beside it.

    Raises
    ------
    ConfigError
        The loss has no smoothing, or does not measure one of the metrics.
    """
    cls, given = LOSSES[options.kind], options.options()
    if smoothing and "smoothing" not in {f.name for f in fields(cls)}:
        raise ConfigError(
            f"train.label_smoothing: got {smoothing} with loss {cls.kind}; it needs cross_entropy or dice_cross_entropy."
        )
    for metric in metrics:
        if metric not in cls.measures:
            known = ", ".join(cls.measures) or "none"
            raise ConfigError(f"train.evaluate.metrics: got {metric} with loss {cls.kind}, expected some of: {known}.")
    if smoothing:
        given["smoothing"] = smoothing
    return cls(metrics=tuple(metrics), **given)
