"""Bind a program's kernels to one rank's blocks: from global loop declarations to local engine calls.

``BINDERS[kernel.name](bound)`` returns a function of (engine, context, *arrays) that returns the arrays the kernel writes.
Everything that depends on the rank (local windows, offsets, counts) is worked out once, when binding.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from lbpar.engine.base import Engine, LocalWindow
from lbpar.graph.loops import Kernel, Window
from lbpar.layout.layout import Dim, Layout
from lbpar.layout.runs import Box, Runs, box_shape, index_parts, indices, length
from lbpar.program.plan import OpGrid
from lbpar.program.steps import Compute, Program
from lbpar.random import fold

Array = Any


@dataclass
class Context:
    """What changes from step to step.

    ``seed`` and ``step`` (counting micro-batches) fix dropout; ``weight`` is the share of a micro-batch in its update.
    """

    seed: int = 0
    step: int = 0
    weight: float = 1.0


Call = Callable[..., tuple[Array, ...]]


@dataclass(frozen=True)
class Bound:
    """A kernel with the blocks that one rank holds of its operands."""

    node: str
    kernel: Kernel
    op_grid: OpGrid
    rank: int
    reads: tuple[Box, ...]
    writes: tuple[Box, ...]
    written: tuple[Layout, ...]

    @classmethod
    def of(cls, step: Compute, program: Program, rank: int) -> Bound:
        """Bind a compute step to a rank."""
        layouts = [program.buffers[b].layout for b in (*step.reads, *step.writes)]
        boxes = [layout.box(rank) for layout in layouts]
        n = len(step.reads)
        grid = program.plan[step.node]
        return cls(step.node, step.kernel, grid, rank, tuple(boxes[:n]), tuple(boxes[n:]), tuple(layouts[n:]))

    def attr(self, name: str) -> Any:
        """An attribute of the kernel."""
        return self.kernel.attr(name)

    @property
    def lead(self) -> bool:
        """Whether this rank is the first of those whose partial results are summed; it alone adds the bias."""
        layout = self.written[0]
        coords = layout.grid.coords(self.rank)
        return all(coords[a] == 0 for a in layout.partial)

    def windows(self, inside: Box, outside: Box) -> tuple[LocalWindow, ...]:
        """Local windows between the block ``inside`` that is read through them and the block ``outside`` that reads."""
        out = []
        for w, i, o in zip(self.attr("windows"), inside[1:-1], outside[1:-1], strict=True):
            out.append(LocalWindow(w.kernel, w.stride, w.dilation, w.pad + start(i) - start(o) * w.stride))
        return tuple(out)

    def local(self, loop: str, extent: int) -> int:
        """Extent of a loop on this rank."""
        grid = self.written[0].grid
        dim = Dim(extent, (extent,), (tuple(self.op_grid.get(loop, ())),))
        return length(dim.runs(grid, grid.coords(self.rank)))

    def count(self, varying: Sequence[str]) -> int:
        """Number of values behind one process group's statistics, when ``varying`` loops are not merged."""
        shape = self.attr("shape")
        names = ("N", *("D", "H", "W")[5 - len(shape) :])
        parts = (self.local(n, e) if n in varying else e for n, e in zip(names, shape[:-1], strict=True))
        return max(prod(parts), 1)


def start(runs: Runs) -> int:
    """First index of a block; 0 if it is empty."""
    return runs[0][0] if runs else 0


def spatial(box: Box) -> tuple[int, ...]:
    """Local spatial extents of an activation."""
    return box_shape(box)[1:-1]


def _groups(b: Bound, channels: int, per_group: int) -> int:
    """Local number of groups of a grouped convolution."""
    return max(1, channels // max(1, per_group)) if "G" in dict(b.kernel.loops) else 1


# Convolution. The names of the engine's arguments say which side of the window an array is on.


def _conv_forward(b: Bound) -> Call:
    x, w, y = b.reads[0], b.reads[1], b.writes[0]
    win, out = b.windows(x, y), spatial(y)
    groups = _groups(b, length(x[-1]), length(w[-1]))
    biased = len(b.reads) == 3 and b.lead

    def call(e: Engine, _: Context, x: Array, w: Array, *bias: Array) -> tuple[Array, ...]:
        return (e.conv_forward(x, w, bias[0] if biased else None, win, groups, out),)

    return call


def _conv_relu_forward(b: Bound) -> Call:
    x, w, y = b.reads[0], b.reads[1], b.writes[0]
    win, out = b.windows(x, y), spatial(y)
    groups = _groups(b, length(x[-1]), length(w[-1]))
    return lambda e, _, x, w, *bias: (e.conv_relu_forward(x, w, bias[0] if bias else None, win, groups, out),)


def _conv_backward_data(b: Bound) -> Call:
    dy, w, dx = b.reads[0], b.reads[1], b.writes[0]
    win, out = b.windows(dx, dy), spatial(dx)
    groups = _groups(b, length(dx[-1]), length(w[-1]))
    return lambda e, _, dy, w: (e.conv_backward_data(dy, w, win, groups, out),)


def _conv_backward_weights(b: Bound) -> Call:
    x, dy, dw = b.reads[0], b.reads[1], b.writes[0]
    win, groups = b.windows(x, dy), _groups(b, length(x[-1]), length(dw[-1]))
    return lambda e, _, x, dy, out=None: (e.conv_backward_weights(x, dy, win, groups, out),)


def _conv_backward_weights_bias(b: Bound) -> Call:
    x, dy, dw = b.reads[0], b.reads[1], b.writes[0]
    win, groups = b.windows(x, dy), _groups(b, length(x[-1]), length(dw[-1]))
    return lambda e, _, x, dy, out=None: e.conv_backward_weights_bias(x, dy, win, groups, out)


def _conv_transpose_forward(b: Bound) -> Call:
    x, w, y = b.reads[0], b.reads[1], b.writes[0]
    win, out = b.windows(y, x), spatial(y)
    groups = _groups(b, length(y[-1]), length(w[-1]))
    biased = len(b.reads) == 3 and b.lead

    def call(e: Engine, _: Context, x: Array, w: Array, *bias: Array) -> tuple[Array, ...]:
        y = e.conv_backward_data(x, w, win, groups, out)
        return (e.bias_add(y, bias[0]) if biased else y,)

    return call


def _conv_transpose_backward_data(b: Bound) -> Call:
    dy, w, dx = b.reads[0], b.reads[1], b.writes[0]
    win, out = b.windows(dy, dx), spatial(dx)
    groups = _groups(b, length(dy[-1]), length(w[-1]))
    return lambda e, _, dy, w: (e.conv_forward(dy, w, None, win, groups, out),)


def _conv_transpose_backward_weights(b: Bound) -> Call:
    x, dy, dw = b.reads[0], b.reads[1], b.writes[0]
    win, groups = b.windows(dy, x), _groups(b, length(dy[-1]), length(dw[-1]))
    return lambda e, _, x, dy, out=None: (e.conv_backward_weights(dy, x, win, groups, out),)


def _linear_backward_weights(b: Bound) -> Call:
    return lambda e, _, x, dy, out=None: (e.linear_backward_weights(x, dy, out),)


# Linear.


def _linear_forward(b: Bound) -> Call:
    biased = len(b.reads) == 3 and b.lead
    return lambda e, _, x, w, *bias: (e.linear_forward(x, w, bias[0] if biased else None),)


# Pooling.


def _max_pool_forward(b: Bound) -> Call:
    win, out = b.windows(b.reads[0], b.writes[0]), spatial(b.writes[0])
    return lambda e, _, x: e.max_pool_forward(x, win, out)


def _max_pool_backward(b: Bound) -> Call:
    win, out = b.windows(b.writes[0], b.reads[0]), spatial(b.writes[0])
    return lambda e, _, dy, arg: (e.max_pool_backward(dy, arg, win, out),)


def _divisors(b: Bound, y: Box) -> tuple[np.ndarray, ...]:
    """Per spatial dimension, how many taps of each output's window lie where they count."""
    out = []
    for w, (lo, hi), runs in zip(b.attr("windows"), b.attr("counted"), y[1:-1], strict=True):
        first = indices(runs) * w.stride - w.pad
        before = np.clip(-((first - lo) // w.dilation), 0, w.kernel)  # taps that lie before lo
        after = np.clip(-((first - hi) // w.dilation), 0, w.kernel)
        out.append((after - before).astype(np.float64))
    return tuple(out)


def _avg_pool_forward(b: Bound) -> Call:
    x, y = b.reads[0], b.writes[0]
    win, out, div = b.windows(x, y), spatial(y), _divisors(b, y)
    return lambda e, _, x: (e.avg_pool_forward(x, win, out, div),)


def _avg_pool_backward(b: Bound) -> Call:
    dy, dx = b.reads[0], b.writes[0]
    win, out, div = b.windows(dx, dy), spatial(dx), _divisors(b, dy)
    return lambda e, _, dy: (e.avg_pool_backward(dy, win, out, div),)


def _spatial_sum(b: Bound) -> Call:
    scale = b.attr("scale")
    return lambda e, _, x: (e.spatial_sum(x, scale),)


def _spatial_broadcast(b: Bound) -> Call:
    scale, out = b.attr("scale"), spatial(b.writes[0])
    return lambda e, _, dy: (e.spatial_broadcast(dy, out, scale),)


# Normalisation.


def _norm_moments(b: Bound) -> Call:
    count, eps = b.count(b.kernel.writes[0].varying), b.attr("eps")
    return lambda e, _, sums, shift: (e.norm_moments(sums, shift, count, eps),)


def _norm_statistics(b: Bound) -> Call:
    count, eps = b.count(b.kernel.writes[1].varying), b.attr("eps")

    return lambda e, _, x, shift: e.norm_statistics(x, shift, count, eps)


def _norm_apply(b: Bound) -> Call:
    def call(e: Engine, _: Context, x: Array, moments: Array, *affine: Array) -> tuple[Array, ...]:
        scale, bias = affine or (None, None)
        return (e.norm_apply(x, moments[0], moments[1], scale, bias),)

    return call


def _norm_relu_forward(b: Bound) -> Call:
    def call(e: Engine, _: Context, x: Array, moments: Array, *affine: Array) -> tuple[Array, ...]:
        scale, bias = affine or (None, None)
        return (e.norm_relu_forward(x, moments[0], moments[1], scale, bias),)

    return call


def _norm_add_relu_forward(b: Bound) -> Call:
    def call(e: Engine, _: Context, x: Array, moments: Array, *more: Array) -> tuple[Array, ...]:
        scale, bias = more[:-1] or (None, None)
        return (e.norm_relu_forward(x, moments[0], moments[1], scale, bias, more[-1]),)

    return call


def _norm_inference(b: Bound) -> Call:
    eps = b.attr("eps")

    def call(e: Engine, _: Context, x: Array, mean: Array, var: Array, *affine: Array) -> tuple[Array, ...]:
        scale, bias = affine or (None, None)
        return (e.norm_inference(x, mean, var, scale, bias, eps),)

    return call


def _norm_backward_data(b: Bound) -> Call:
    count = b.count(b.kernel.reads[2].varying)

    def call(
        e: Engine, _: Context, x: Array, dy: Array, moments: Array, dsums: Array, *scale: Array
    ) -> tuple[Array, ...]:
        return (e.norm_backward_data(x, dy, moments[0], moments[1], scale[0] if scale else None, dsums, count),)

    return call


def _norm_backward_data_add(b: Bound) -> Call:
    count = b.count(b.kernel.reads[2].varying)

    def call(
        e: Engine, _: Context, x: Array, dy: Array, moments: Array, dsums: Array, *rest: Array
    ) -> tuple[Array, ...]:
        scale = rest[0] if len(rest) > 1 else None
        return (e.norm_backward_data_add(x, dy, moments[0], moments[1], scale, dsums, count, rest[-1]),)

    return call


def _norm_param_grads(b: Bound) -> Call:
    return lambda e, _, dsums: (e.copy(dsums[1], e.dtype), e.copy(dsums[0], e.dtype))


def _norm_running(b: Bound) -> Call:
    m, n = b.attr("momentum"), b.attr("count")

    def call(e: Engine, _: Context, sums: Array, mean: Array, var: Array) -> tuple[Array, ...]:
        e.norm_running(sums, mean, var, m, n)
        return mean, var

    return call


# Element-wise ops and moves.


def _dropout(b: Bound) -> Call:
    rate, name = b.attr("rate"), zlib.crc32(b.node.encode())
    index = index_parts(b.writes[0], b.written[0].shape)
    return lambda e, c, x: (e.dropout(x, rate, fold(c.seed, name, c.step), index),)


def _multiply_backward(b: Bound) -> Call:
    i = b.attr("i")
    return lambda e, _, dy, *xs: (e.multiply_backward(dy, xs, i),)


def _local_response_norm_forward(b: Bound) -> Call:
    size, alpha, beta, k = map(b.attr, ("size", "alpha", "beta", "k"))
    x, y = b.reads[0][-1], b.writes[0][-1]
    own, channels = start(y) - start(x), length(y)
    return lambda e, _, x: e.local_response_norm_forward(x, size, own, own - size // 2, channels, alpha, beta, k)


def _local_response_norm_backward(b: Bound) -> Call:
    size, alpha, beta = map(b.attr, ("size", "alpha", "beta"))
    # Windows that hold channel i begin at i - size + 1, ..., i; they belong to the outputs size // 2 further on.
    first = start(b.writes[0][-1]) - start(b.reads[3][-1]) + size // 2 - size + 1
    return lambda e, _, *arrays: (e.local_response_norm_backward(*arrays, size, first, alpha, beta),)


def _channel_shuffle(b: Bound) -> Call:
    rows, columns = (b.local(loop, b.kernel.extent(loop)) for loop in b.kernel.reads[0].dims[-1].loops)
    return lambda e, _, x: (e.channel_shuffle(x, rows, columns),)


def _cut(b: Bound) -> Call:
    window: Window = b.kernel.writes[0].dims[-1].window or Window(1)
    lo = start(b.writes[0][-1]) + window.pad - start(b.reads[0][-1])
    part = slice(lo, lo + length(b.writes[0][-1]))
    index = (slice(None),) * (len(b.writes[0]) - 1) + (part,)
    return lambda e, _, dy: (e.pack(dy, index),)


def _reshape(b: Bound) -> Call:
    shape = box_shape(b.writes[0])
    return lambda e, _, x: (x.reshape(shape),)


def _upsample_forward(b: Bound) -> Call:
    factors, y = b.attr("factors"), b.writes[0]
    sides = zip(factors, b.reads[0][1:-1], y[1:-1], strict=True)
    offsets = tuple(start(o) - start(i) * f for f, i, o in sides)
    return lambda e, _, x: (e.upsample_forward(x, factors, spatial(y), offsets),)


def _upsample_backward(b: Bound) -> Call:
    factors = b.attr("factors")
    return lambda e, _, dy: (e.upsample_backward(dy, factors),)


# Losses.


def _classes(method: str, *attrs: str) -> Callable[[Bound], Call]:
    """An engine call whose arrays are followed by the first local class and the named attributes."""

    def bind(b: Bound) -> Call:
        first = start(b.reads[0][-1])
        more = tuple(b.attr(a) for a in attrs)

        def call(e: Engine, _: Context, *arrays: Array) -> tuple[Array, ...]:
            return (getattr(e, method)(*arrays, first, *more),)

        return call

    return bind


def _dice_backward(b: Bound) -> Call:
    first, eps, classes = start(b.reads[0][-1]), b.attr("eps"), b.attr("classes")
    return lambda e, _, x, m, sums, t, dsums: e.dice_backward(x, m, sums, t, first, dsums, eps, classes)


def _plain(method: str, *attrs: str) -> Callable[[Bound], Call]:
    """An engine call whose arrays are followed by the named attributes."""

    def bind(b: Bound) -> Call:
        more = tuple(b.attr(a) for a in attrs)
        return lambda e, _, *arrays: (getattr(e, method)(*arrays, *more),)

    return bind


def register_kernel(name: str, function: Callable[..., Array], *attrs: str) -> None:
    """Let a function compute the kernels of a name: of this rank's blocks of what they read, then of the named attributes.

    For kernels that need to know more of their blocks than their shapes, put a binder into `BINDERS`. See docs/howto/add-an-op.md.
    """

    def bind(b: Bound) -> Call:
        more = tuple(b.attr(a) for a in attrs)
        return lambda e, _, *arrays: (function(*arrays, *more),)

    BINDERS[name] = bind


def _listed(method: str) -> Callable[[Bound], Call]:
    return lambda b: lambda e, _, *arrays: (getattr(e, method)(list(arrays)),)


def _norm_backward_sums(b: Bound) -> Call:
    return lambda e, _, x, dy, moments: (e.norm_backward_sums(x, dy, moments[0], moments[1]),)


def _norm_relu_backward_sums(b: Bound) -> Call:
    return lambda e, _, x, y, dy, m, *more: e.norm_relu_backward_sums(x, y, dy, m[0], m[1], *more)


BINDERS: dict[str, Callable[[Bound], Call]] = {
    "conv_forward": _conv_forward,
    "conv_relu_forward": _conv_relu_forward,
    "conv_backward_data": _conv_backward_data,
    "conv_backward_weights": _conv_backward_weights,
    "conv_backward_weights_bias": _conv_backward_weights_bias,
    "conv_transpose_forward": _conv_transpose_forward,
    "conv_transpose_backward_data": _conv_transpose_backward_data,
    "conv_transpose_backward_weights": _conv_transpose_backward_weights,
    "bias_backward": _plain("bias_backward"),
    "linear_forward": _linear_forward,
    "linear_backward_data": _plain("linear_backward_data"),
    "linear_backward_weights": _linear_backward_weights,
    "max_pool_forward": _max_pool_forward,
    "max_pool_backward": _max_pool_backward,
    "avg_pool_forward": _avg_pool_forward,
    "avg_pool_backward": _avg_pool_backward,
    "spatial_sum": _spatial_sum,
    "spatial_broadcast": _spatial_broadcast,
    "norm_sums": _plain("norm_sums"),
    "norm_moments": _norm_moments,
    "norm_statistics": _norm_statistics,
    "norm_apply": _norm_apply,
    "norm_relu_forward": _norm_relu_forward,
    "norm_add_relu_forward": _norm_add_relu_forward,
    "norm_inference": _norm_inference,
    "norm_backward_sums": _norm_backward_sums,
    "norm_relu_backward_sums": _norm_relu_backward_sums,
    "norm_backward_data": _norm_backward_data,
    "norm_backward_data_add": _norm_backward_data_add,
    "norm_param_grads": _norm_param_grads,
    "norm_running": _norm_running,
    "relu_forward": _plain("relu_forward"),
    "relu_backward": _plain("relu_backward"),
    "leaky_relu_forward": _plain("leaky_relu_forward", "slope"),
    "leaky_relu_backward": _plain("leaky_relu_backward", "slope"),
    "sigmoid_forward": _plain("sigmoid_forward"),
    "sigmoid_backward": _plain("sigmoid_backward"),
    "tanh_forward": _plain("tanh_forward", "scale"),
    "tanh_backward": _plain("tanh_backward", "scale"),
    "local_response_norm_forward": _local_response_norm_forward,
    "local_response_norm_ratio": _plain("local_response_norm_ratio"),
    "local_response_norm_backward": _local_response_norm_backward,
    "softmax_denominator": _plain("softmax_denominator"),
    "softmax_forward": _plain("softmax_forward"),
    "softmax_inner": _plain("softmax_inner"),
    "softmax_backward": _plain("softmax_backward"),
    "channel_shuffle": _channel_shuffle,
    "add": _listed("add"),
    "multiply": _listed("multiply"),
    "multiply_backward": _multiply_backward,
    "concat": _listed("concat"),
    "identity": lambda b: lambda e, _, x: (x,),
    "dropout": _dropout,
    "cut": _cut,
    "reshape": _reshape,
    "upsample_forward": _upsample_forward,
    "upsample_backward": _upsample_backward,
    "softmax_max": _plain("softmax_max"),
    "softmax_sums": _classes("softmax_sums"),
    "softmax_rank": _classes("softmax_rank"),
    "count_hits": _plain("count_hits", "tops"),
    "cross_entropy_loss": _plain("cross_entropy_loss", "smoothing", "classes", "scale"),
    "cross_entropy_backward": _classes("cross_entropy_backward", "smoothing", "classes", "scale"),
    "mse_loss": _plain("mse_loss", "scale"),
    "mse_backward": _plain("mse_backward", "scale"),
    "bce_loss": _plain("bce_loss", "scale"),
    "bce_backward": _plain("bce_backward", "scale"),
    "dice_sums": _classes("dice_sums"),
    "dice_loss": _plain("dice_loss", "eps", "classes"),
    "dice_backward": _dice_backward,
    "dice_backward_data": _plain("dice_backward_data"),
}


def bind(b: Bound) -> Call:
    """The call of a kernel on one rank's blocks; where all that it writes is empty, no call at all."""
    shapes = [box_shape(box) for box in b.writes]
    if all(0 in shape for shape in shapes):
        types = [None if o.dtype in (None, "opaque") else np.dtype(o.dtype) for o in b.kernel.writes]

        def nothing(e: Engine, _: Context, *arrays: Array) -> tuple[Array, ...]:
            return tuple(e.empty(s, t) for s, t in zip(shapes, types, strict=True))

        return nothing
    return BINDERS[b.kernel.name](b)
