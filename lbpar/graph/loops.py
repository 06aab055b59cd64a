"""How an op declares its loops: windows, indices, operands and local kernels.

An op is a short list of local kernels. Each kernel names its loops and says which of them index each
operand; legal grids, layouts, collectives, halos and local shapes follow from that (``lbpar.layout``,
``lbpar.program``). Nothing here knows how a kernel computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """A sliding window: output o reads inputs ``o*stride + k*dilation - pad`` for k in [0, kernel).

    ``pad`` is the padding before the first input; what follows the last input is implied by the output's extent.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    pad: int = 0

    @property
    def reach(self) -> int:
        """Distance from the first to the last tap."""
        return (self.kernel - 1) * self.dilation

    def image(self, lo: int, hi: int, extent: int) -> tuple[int, int]:
        """Inputs (a hull, clipped to [0, extent)) that outputs [lo, hi) read."""
        if hi <= lo:
            return (0, 0)
        first = max(0, lo * self.stride - self.pad)
        last = min(extent, (hi - 1) * self.stride - self.pad + self.reach + 1)
        return (first, last) if last > first else (0, 0)

    def preimage(self, lo: int, hi: int, extent: int) -> tuple[int, int]:
        """Outputs (a hull, clipped to [0, extent)) that read any of the inputs [lo, hi)."""
        if hi <= lo:
            return (0, 0)
        first = max(0, -((self.reach - lo - self.pad) // self.stride))
        last = min(extent, (hi - 1 + self.pad) // self.stride + 1)
        return (first, last) if last > first else (0, 0)


@dataclass(frozen=True)
class Index:
    """How one dimension of an operand is indexed.

    Parameters
    ----------
    extent : int
        Extent of the dimension in the global tensor.
    loops : tuple of str
        Loops that index it, major to minor; several for a dimension that is a product (a grouped
        convolution's channels are (G, C)); empty for a dimension that is never split.
    window : Window, optional
        The dimension is read through this window of the (single) loop.
    transposed : bool
        The loop runs over the window's *inputs* and the dimension over its *outputs*.
    """

    extent: int
    loops: tuple[str, ...] = ()
    window: Window | None = None
    transposed: bool = False


class _Indexed:
    dims: tuple[Index, ...]

    @property
    def shape(self) -> Shape:
        """Global shape."""
        return tuple(d.extent for d in self.dims)


@dataclass(frozen=True)
class Operand(_Indexed):
    """A value that a kernel reads or writes.

    Parameters
    ----------
    value : str
        Name within the op: ``x0``, ``weight``, ``y``, ``dy``, ``dx0``, ``dweight`` or an inner statistic.
    dims : tuple of Index
        One per dimension, in memory order.
    reduce : {"sum", "max"}
        How partial results of a written value are combined over the loops that do not index it.
    varying : tuple of str
        Loops over which the value deliberately differs from process to process and is *not* combined
        (per-group batch-norm statistics).
    dtype : str, optional
        "float64" for statistics, "int64" for labels, "opaque" for engine-private arrays, None for the network's type.
    """

    value: str
    dims: tuple[Index, ...]
    reduce: Literal["sum", "max"] = "sum"
    varying: tuple[str, ...] = ()
    dtype: str | None = None


Product = Literal["forward", "backward_data", "backward_weights"]


@dataclass(frozen=True)
class Kernel:
    """One local computation: the engine function ``name`` over ``loops``.

    ``attrs`` are passed to the engine call; ``flops`` counts the global floating-point operations (a
    multiply-add is two). ``push`` marks a kernel whose written gradient covers the ghosts of the operand
    it was read through, to be added into their owners afterwards. ``product`` says which pass of an op that multiplies by weights it is:
    its time is that of a matrix product, of other kernels that of their bytes.
    """

    name: str
    loops: tuple[tuple[str, int], ...]
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    flops: int = 0
    push: bool = False
    product: Product | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.loops, self.reads, self.writes, self.attrs))

    def extent(self, loop: str) -> int:
        """Extent of a loop."""
        return dict(self.loops)[loop]

    def attr(self, name: str) -> Any:
        """Value of an attribute."""
        return dict(self.attrs)[name]


@dataclass(frozen=True)
class Param(_Indexed):
    """A trainable tensor or a running statistic of an op.

    Parameters
    ----------
    dims : tuple of Index
        Global shape and the loops that index it, in memory order.
    init : {"he", "glorot", "zeros", "ones"} or float
        Initialisation rule, or the value of all elements.
    kind : {"weight", "bias", "norm", "statistic"}
        For per-kind optimizer settings; a "statistic" is not trained.
    fan_in, fan_out : int
        For the initialisation rules.
    """

    dims: tuple[Index, ...]
    init: Literal["he", "glorot", "zeros", "ones"] | float = "zeros"
    kind: Literal["weight", "bias", "norm", "statistic"] = "weight"
    fan_in: int = 1
    fan_out: int = 1

    @property
    def size(self) -> int:
        """Number of elements of the global tensor."""
        return prod(self.shape)


SPATIAL = ("D", "H", "W")


def spatial_letters(ndim: int) -> tuple[str, ...]:
    """Names of a tensor's spatial dimensions: (), ("W",), ("H", "W") or ("D", "H", "W")."""
    return SPATIAL[len(SPATIAL) - ndim :]


def plain(shape: Shape, channel: tuple[str, ...] = ("C",)) -> tuple[Index, ...]:
    """Indices of a channels-last tensor whose dimensions are the loops N, [D, H, W], channel."""
    letters = ("N", *spatial_letters(len(shape) - 2))
    return (*(Index(e, (s,)) for e, s in zip(shape, letters, strict=False)), Index(shape[-1], channel))


def tensor(value: str, shape: Shape) -> Operand:
    """A channels-last tensor indexed by its own dimensions."""
    return Operand(value, plain(shape))


def like(value: str, operand: Operand) -> Operand:
    """Another value with the indices of ``operand`` (a gradient, say)."""
    return replace(operand, value=value)


def tensor_loops(shape: Shape, channel: str = "C") -> tuple[tuple[str, int], ...]:
    """The loops of a tensor: its dimensions."""
    return tuple(zip(("N", *spatial_letters(len(shape) - 2), channel), shape, strict=True))
