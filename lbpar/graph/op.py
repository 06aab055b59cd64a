"""What every op offers: shape inference, parameters, loops, and its kernels forward and backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from lbpar.config.layers import LAYERS, Layer
from lbpar.graph.loops import Kernel, Param, Shape, tensor_loops

Attrs = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Op(ABC):
    """An op with one output. Shapes are global and channels-last: (N, [D, H, W], C)."""

    #: Its options as users give them: defaults, ranges and documentation. The fields of the op have the same names, and an
    #: entry per spatial dimension where users may give one for all. A loss or an input has none.
    options: ClassVar[type[Layer]]
    kind: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "options" in vars(cls):
            cls.kind = LAYERS.kind(cls.options)

    @classmethod
    def make(cls, **options: Any) -> Op:
        """The op with these options; where an option follows from others, it is worked out here."""
        return cls(**options)

    def infer(self, xs: Sequence[Shape]) -> Shape:
        """Shape of the output from the shapes of the inputs (the same, unless an op says otherwise); raises GraphError if they do not fit."""
        (shape,) = xs
        return shape

    def loops(self, xs: Sequence[Shape]) -> dict[str, int]:
        """Loops that a grid may split, and their extents: the dimensions of the output, unless an op says otherwise."""
        return dict(tensor_loops(self.infer(xs)))

    def attrs(self) -> Attrs:
        """The options as attributes of a kernel."""
        return tuple((f.name, getattr(self, f.name)) for f in fields(self))

    def splits(self, xs: Sequence[Shape]) -> dict[str, bool]:
        """Loops that a planner may split, and whether only into equal parts."""
        return dict.fromkeys(self.loops(xs), False)

    def trains(self, xs: Sequence[Shape], ways: Mapping[str, int]) -> bool:
        """Whether training makes sense with loops split into so many parts."""
        return True

    def params(self, xs: Sequence[Shape]) -> dict[str, Param]:
        """Parameters and running statistics by short name."""
        return {}

    @abstractmethod
    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        """Kernels of the forward pass, in order; together they read ``x0, x1, ...`` and write ``y``."""

    @abstractmethod
    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        """Kernels of the backward pass that write the ``wanted`` gradients (``dx0``, ``dweight``, ...) from ``dy``."""

    def update(self, xs: Sequence[Shape]) -> tuple[Kernel, ...]:
        """Kernels that run after the backward pass (running statistics)."""
        return ()

    #: Whether it multiplies by a matrix of weights: what named strategies are rules for.
    weighted: ClassVar[bool] = False
    #: Whether element i of the output depends on elements i of the inputs only.
    elementwise: ClassVar[bool] = False
    #: Options with which calibration runs it alone, for kernels whose speed is that of memory; None for products of matrices,
    #: and for what others' samples show.
    sample: ClassVar[Mapping[str, Any] | None] = None
    #: Inputs that carry no gradient (labels).
    no_grad: ClassVar[frozenset[int]] = frozenset()


@dataclass(frozen=True)
class Input(Op):
    """A tensor fed from outside: the samples, or the loss' target."""

    shape: Shape = ()
    dtype: str | None = None
    kind: ClassVar[str] = "input"

    def infer(self, xs: Sequence[Shape]) -> Shape:
        raise NotImplementedError  # the graph supplies the batch

    def loops(self, xs: Sequence[Shape]) -> dict[str, int]:
        return {}

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        return ()

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        return ()
