"""Bind a program's kernels to one rank's blocks: from global loop declarations to local engine calls.

``BINDERS[kernel.name](bound)`` returns a function of (engine, micro_batch, *arrays) that returns the arrays the kernel writes.
Everything that depends on the rank (local windows, offsets, counts) is worked out once, when binding.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from lbpar.engine.activations import ACTIVATIONS
from lbpar.engine.base import Engine, LocalWindow
from lbpar.engine.host import label_losses, prelu
from lbpar.engine.host.lines import along_lines, taps, thinned, turned
from lbpar.engine.losses import ERRORS
from lbpar.graph.loops import Kernel, Window
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.interior import interior, rims
from lbpar.layout.layout import Dim, Layout
from lbpar.layout.runs import Box, Runs, box_shape, index_parts, indices, length
from lbpar.program.plan import OpGrid
from lbpar.program.rims import KERNELS as RIMS
from lbpar.program.steps import Compute, Program
from lbpar.random import fold

Array = Any


@dataclass
class MicroBatch:
    """Which micro-batch a program runs on.

    ``seed`` and ``number``, counted from the start of training, fix dropout; ``weight`` is its share in the update, ``loss_scale`` what
    gradients are multiplied by on their way back. ``keys`` has those of dropout that lie on the device, by node.
    """

    seed: int = 0
    number: int = 0
    weight: float = 1.0
    loss_scale: float = 1.0
    keys: Mapping[str, Array] = field(default_factory=dict)

    def key(self, node: str) -> Any:
        """Of a node's dropout: an integer, or an array of one on the device."""
        held = self.keys.get(node)
        return fold(self.seed, zlib.crc32(node.encode()), self.number) if held is None else held


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
    first: int = 0

    @classmethod
    def of(cls, step: Compute, program: Program, rank: int) -> Bound:
        """Bind a compute step to a rank."""
        layouts = [program.buffers[b].layout for b in (*step.reads, *step.writes)]
        boxes = [layout.box(rank) for layout in layouts]
        n = len(step.reads)
        grid = program.plan[step.node]
        first = program.buffers[step.writes[0]].first
        return cls(step.node, step.kernel, grid, rank, tuple(boxes[:n]), tuple(boxes[n:]), tuple(layouts[n:]), first)

    def attr(self, name: str) -> Any:
        """An attribute of the kernel."""
        return self.kernel.attr(name)

    @property
    def lead(self) -> bool:
        """Whether this rank is the first of those whose partial results are summed; it alone adds the bias."""
        layout = self.written[0]
        coords = layout.grid.coords(self.rank)
        return all(coords[a] == 0 for a in layout.partial)

    @property
    def biased(self) -> bool:
        """Whether there is a bias, behind two other operands, that this rank adds."""
        return len(self.reads) == 3 and self.lead

    def box(self, place: int) -> Box:
        """This rank's block of an operand: 0, 1, ... of those that are read, ~0, ~1, ... of those that are written."""
        return self.reads[place] if place >= 0 else self.writes[~place]

    def attrs(self, *names: str) -> tuple[Any, ...]:
        """Attributes of the kernel."""
        return tuple(map(self.kernel.attr, names))

    def windows(self, inside: Box, outside: Box) -> tuple[LocalWindow, ...]:
        """Local windows between the block ``inside`` that is read through them and the block ``outside`` that reads."""
        out = []
        for w, i, o in zip(self.attr("windows"), inside[1:-1], outside[1:-1], strict=True):
            out.append(LocalWindow(w.kernel, w.stride, w.dilation, w.pad + start(i) - start(o) * w.stride))
        return tuple(out)

    def groups(self, inside: Box, filters: int = 1) -> int:
        """Groups of a convolution of the channels of a block by the filters in some place."""
        channels, per_group = length(inside[-1]), length(self.box(filters)[-1])
        return max(1, channels // max(1, per_group)) if "G" in dict(self.kernel.loops) else 1

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


Binder = Callable[[Bound], Call]


def _method(
    name: str,
    *attrs: str,
    more: Callable[[Bound], tuple[Any, ...]] = lambda b: (),
    arrange: Callable[..., tuple[Any, ...]] | None = None,
) -> Binder:
    """An engine's method, of the arrays (as ``arrange`` gives them), then of ``more``, then of the named attributes."""

    def bind(b: Bound) -> Call:
        last, several = (*more(b), *b.attrs(*attrs)), len(b.kernel.writes) > 1

        def call(e: Engine, _: MicroBatch, *arrays: Array, **placed: Array) -> tuple[Array, ...]:
            result = getattr(e, name)(*(arrays if arrange is None else arrange(*arrays)), *last, **placed)
            return result if several else (result,)

        return call

    return bind


def _none(b: Bound) -> tuple[Any, ...]:
    return ()


def _on_host(function: Callable[..., Any], *attrs: str, more: Callable[[Bound], tuple[Any, ...]] = _none) -> Binder:
    """A NumPy function, of the arrays, then of ``more``, then of the named attributes (`Engine.on_host`)."""

    def bind(b: Bound) -> Call:
        last, several = (*more(b), *b.attrs(*attrs)), len(b.kernel.writes) > 1

        def call(e: Engine, _: MicroBatch, *arrays: Array) -> tuple[Array, ...]:
            result = e.on_host(function, *arrays, *last)
            return tuple(result) if several else (result,)

        return call

    return bind


# Convolution and pooling.


def _conv(name: str, x: int, w: int, y: int, arrange: Callable[..., tuple[Any, ...]] | None = None) -> Binder:
    """A method of the engine's convolution ``y = conv(x, w)``, of which each operand has its place among the kernel's (`Bound.box`)."""

    def more(b: Bound) -> tuple[Any, ...]:
        inside, outside = b.box(x), b.box(y)
        sizes = [spatial(b.box(place)) for place in (x, y) if place == ~0]
        return b.windows(inside, outside), b.groups(inside, w), *sizes

    return _method(name, more=more, arrange=arrange)


def _biased(binder: Binder) -> Binder:
    """With a third array: the bias, or None where there is none or another rank adds it."""

    def bind(b: Bound) -> Call:
        call, biased = binder(b), b.biased
        return lambda e, c, x, w, *bias: call(e, c, x, w, bias[0] if biased else None)

    return bind


def _conv_transpose_forward(b: Bound) -> Call:
    call, biased = _conv("conv_backward_data", ~0, 1, 0)(b), b.biased

    def run(e: Engine, c: MicroBatch, x: Array, w: Array, *bias: Array) -> tuple[Array, ...]:
        (y,) = call(e, c, x, w)
        return (e.bias_add(y, bias[0]) if biased else y,)

    return run


def _part(name: str) -> Binder:
    """The interior or the rims of a convolution (`lbpar.program.rims`): some boxes of ``y``, which the interior makes."""
    plain, _, part = name.rpartition("_")
    adjoint = plain in ("conv_backward_data", "conv_transpose_forward")

    def bind(b: Bound) -> Call:
        whole = [(start(r), start(r) + length(r)) for r in b.writes[0][1:-1]]
        core = [side or all_ for side, all_ in zip(interior(b.attr("halo"), b.rank)[1:-1], whole, strict=True)]
        if not prod(hi - lo for lo, hi in core):
            if part == "interior":
                return lambda e, _, x, *others: (e.empty((0,), x.dtype),)
            call = BINDERS[plain](replace(b, reads=b.reads[:-1]))
            return lambda e, c, *arrays: call(e, c, *arrays[:-1])
        boxes = [core] if part == "interior" else rims(core, whole)
        places = [[(lo - o, hi - o) for (lo, hi), (o, _) in zip(box, whole, strict=True)] for box in boxes]
        x, y, shape = b.reads[0], b.writes[0], box_shape(b.writes[0])
        windows, groups = (b.windows(y, x), b.groups(y)) if adjoint else (b.windows(x, y), b.groups(x))
        biased = replace(b, reads=b.reads[: len(b.reads) - (part == "rims")]).biased

        relu, inner = plain == "conv_relu_forward", shape[1:-1]

        def inside(e: Engine, _: MicroBatch, x: Array, w: Array, *bias: Array) -> tuple[Array, ...]:
            if adjoint:
                return (e.conv_backward_data_inside(x, w, windows, groups, inner, places[0]),)
            b = bias[0] if biased else None
            return (e.conv_forward_inside(x, w, b, windows, groups, inner, places[0], relu),)

        def around(e: Engine, _: MicroBatch, x: Array, w: Array, *more: Array) -> tuple[Array, ...]:
            bias, y = more[0] if biased else None, more[-1]
            if adjoint:
                e.conv_backward_data_parts(x, w, windows, groups, y, places)
                return (y if bias is None else e.bias_add(y, bias),)
            e.conv_forward_parts(x, w, bias, windows, groups, y, places, relu)
            return (y,)

        return inside if part == "interior" else around

    return bind


def _pool(name: str, x: int, y: int, more: Callable[[Bound], tuple[Any, ...]] = lambda b: ()) -> Binder:
    """A pooling of x into y, or its gradient."""
    return _method(name, more=lambda b: (b.windows(b.box(x), b.box(y)), spatial(b.writes[0]), *more(b)))


def _divisors(b: Bound, y: Box) -> tuple[np.ndarray, ...]:
    """Per spatial dimension, how many taps of each output's window lie where they count."""
    out = []
    for w, (lo, hi), runs in zip(b.attr("windows"), b.attr("counted"), y[1:-1], strict=True):
        first = indices(runs) * w.stride - w.pad
        before = np.clip(-((first - lo) // w.dilation), 0, w.kernel)  # taps that lie before lo
        after = np.clip(-((first - hi) // w.dilation), 0, w.kernel)
        out.append((after - before).astype(np.float64))
    return tuple(out)


# Normalisation. Of moments, kernels take the mean and the inverse standard deviation; scale and bias are left out together.


def _affine(x: Array, moments: Array, *affine: Array) -> tuple[Any, ...]:
    return x, moments[0], moments[1], *(affine or (None, None))


def _affine_and_residual(x: Array, moments: Array, *more: Array) -> tuple[Any, ...]:
    return *_affine(x, moments, *more[:-1]), more[-1]


def _inference(x: Array, mean: Array, var: Array, *affine: Array) -> tuple[Any, ...]:
    return x, mean, var, *(affine or (None, None))


def _norm_forward(b: Bound) -> Call:
    (eps, relu, added), count = b.attrs("eps", "relu", "added"), b.count(b.kernel.writes[1].varying)

    def call(e: Engine, _: MicroBatch, x: Array, shift: Array, *more: Array) -> tuple[Array, ...]:
        affine, residual = (more[:-1], more[-1]) if added else (more, None)
        scale, bias = affine or (None, None)
        return e.norm_forward(x, shift, scale, bias, residual, relu, count, eps)

    return call


def _norm_backward_data(b: Bound) -> Call:
    count, added = b.count(b.kernel.reads[2].varying), b.kernel.name.endswith("_add")

    def call(e: Engine, _: MicroBatch, x: Array, dy: Array, m: Array, dsums: Array, *rest: Array) -> tuple[Array, ...]:
        scale = rest[0] if len(rest) > added else None
        if added:
            return (e.norm_backward_data_add(x, dy, m[0], m[1], scale, dsums, count, rest[-1]),)
        return (e.norm_backward_data(x, dy, m[0], m[1], scale, dsums, count),)

    return call


def _norm_running(b: Bound) -> Call:
    momentum, count = b.attrs("momentum", "count")

    def call(e: Engine, _: MicroBatch, sums: Array, mean: Array, var: Array) -> tuple[Array, ...]:
        e.norm_running(sums, mean, var, momentum, count)
        return mean, var

    return call


def _sample_norm_forms(b: Bound) -> list[tuple[int, ...]]:
    """Shapes in which engines see the blocks that are read: activations as (rows, positions, groups, channels of a group)."""
    own, (*lead, channels) = b.attr("own"), box_shape(b.reads[0])
    of_rows = sum(not {"G", "C"}.intersection(loops) for loops in own)  # samples, or samples and positions
    rows, positions = prod(lead[:of_rows]), prod(lead[of_rows:])
    groups = channels if ("C",) in own else b.local("G", b.kernel.extent("G")) if ("G",) in own else 1
    tensor, vector = (rows, positions, groups, channels // max(groups, 1)), (groups, channels // max(groups, 1))
    forms = {"moments": (3, rows, groups), "dsums": (2, rows, groups), "weight": vector, "bias": vector}
    return [forms.get(o.value, tensor) for o in b.kernel.reads]


def _sample_norm(b: Bound) -> Call:
    """Normalisation within samples, on blocks as of `_sample_norm_forms`."""
    name = b.kernel.name
    reads = [(o.value == "moments", form) for o, form in zip(b.kernel.reads, _sample_norm_forms(b), strict=True)]
    shapes = [box_shape(box) for box in b.writes]
    last = b.attrs("count") if name == "sample_norm_backward_data" else ()

    def call(e: Engine, _: MicroBatch, *arrays: Array) -> tuple[Array, ...]:
        args: list[Any] = []
        for (moments, form), array in zip(reads, arrays, strict=True):
            shaped = array.reshape(form)
            args += [shaped[0], shaped[1]] if moments else [shaped]
        made = getattr(e, name)(*last, *args)
        made = made if isinstance(made, tuple) else (made,)
        return tuple(
            a.reshape(shape) for a, shape in zip(made, shapes, strict=False)
        )  # gradients of no scale are left out

    return call


def _sample_norm_forward(b: Bound) -> Call:
    (eps, count), forms, shapes = b.attrs("eps", "count"), _sample_norm_forms(b), [box_shape(box) for box in b.writes]

    def call(e: Engine, _: MicroBatch, *arrays: Array) -> tuple[Array, ...]:
        x, *affine = (a.reshape(form) for a, form in zip(arrays, forms, strict=True))
        scale, bias = affine or (None, None)
        moments, y = e.sample_norm_forward(x, scale, bias, count, eps)
        return moments.reshape(shapes[0]), y.reshape(shapes[1])

    return call


def _sample_norm_moments(b: Bound) -> Call:
    (eps, count), shape = b.attrs("eps", "count"), box_shape(b.writes[0])

    def call(e: Engine, _: MicroBatch, sums: Array) -> tuple[Array, ...]:
        return (e.sample_norm_moments(sums, count, eps).reshape(shape),)

    return call


# Element-wise ops and moves.


def _listed(*arrays: Array) -> tuple[Any, ...]:
    return (list(arrays),)


def _activation(kind: str, method: str) -> Binder:
    def bind(b: Bound) -> Call:
        options = [value for _, value in b.kernel.attrs]
        return lambda e, _, *arrays: (getattr(e, method)(kind, *arrays, *options),)

    return bind


def _dropout(b: Bound) -> Call:
    rate, node = b.attr("rate"), b.node
    samples, *rest = index_parts(b.writes[0], b.written[0].shape)
    index = (samples + b.first * prod(b.written[0].shape[1:]), *rest)  # in the whole mini-batch
    return lambda e, c, x: (e.dropout(x, rate, c.key(node), index),)


def _local_response_norm_forward(b: Bound) -> tuple[Any, ...]:
    size, x, y = b.attr("size"), b.reads[0][-1], b.writes[0][-1]
    own = start(y) - start(x)
    return size, own, own - size // 2, length(y)


def _local_response_norm_backward(b: Bound) -> tuple[Any, ...]:
    # Windows that hold channel i begin at i - size + 1, ..., i; they belong to the outputs size // 2 further on.
    size = b.attr("size")
    return size, start(b.writes[0][-1]) - start(b.reads[3][-1]) + size // 2 - size + 1


def _cut(b: Bound) -> tuple[Any, ...]:
    window: Window = b.kernel.writes[0].dims[-1].window or Window(1)
    lo = start(b.writes[0][-1]) + window.pad - start(b.reads[0][-1])
    part = slice(lo, lo + length(b.writes[0][-1]))
    return ((slice(None),) * (len(b.writes[0]) - 1) + (part,),)


def _reshape(b: Bound) -> Call:
    shape = box_shape(b.writes[0])
    return lambda e, _, x: (x.reshape(shape),)


def _shift(b: Bound) -> Call:
    """What a block of x has of a block of y, zeros around it."""
    x, y = b.reads[0], b.writes[0]
    places, source = [slice(None)], [slice(None)]
    for before, i, o in zip(b.attr("before"), x[1:-1], y[1:-1], strict=True):
        to = start(i) + before - start(o)  # where in y the block of x begins
        lo, hi = max(0, -to), min(length(i), length(o) - to)
        source.append(slice(lo, max(lo, hi)))
        places.append(slice(lo + to, max(lo, hi) + to))
    part, place, shape = (*source, slice(None)), (*places, slice(None)), box_shape(y)
    whole = all(s.stop - s.start == e for s, e in zip(places[1:], shape[1:-1], strict=True))

    def call(e: Engine, _: MicroBatch, a: Array) -> tuple[Array, ...]:
        inside = e.pack(a, part)
        if whole:
            return (inside,)
        out = e.zeros(shape, a.dtype)
        if inside.size:
            e.unpack(inside, out, place)
        return (out,)

    return call


def _upsample_forward(b: Bound) -> tuple[Any, ...]:
    factors, y = b.attr("factors"), b.writes[0]
    sides = zip(factors, b.reads[0][1:-1], y[1:-1], strict=True)
    return factors, spatial(y), tuple(start(o) - start(i) * f for f, i, o in sides)


def _lines(b: Bound) -> tuple[Any, ...]:
    """Per spatial dimension what this rank's outputs read of the block that it holds, or backward what its inputs receive."""
    out: list[Any] = []
    for line, read, write in zip(b.attr("lines"), b.reads[0][1:-1], b.writes[0][1:-1], strict=True):
        if line.rule == "shift":
            out.append(None)
            continue
        rule, at, backward = (
            (line.rule, line.inputs, line.outputs, line.before, line.factor),
            indices(write),
            "dy" in b.kernel.reads[0].value,
        )
        index, weight = turned(taps(*rule, np.arange(line.outputs)), at) if backward else taps(*rule, at)
        here = np.clip(index - start(read), 0, max(length(read) - 1, 0))
        assert (here == index - start(read))[weight != 0].all()
        out.append((here, weight))
    return (out,)


def _thinned(b: Bound) -> tuple[Any, ...]:
    """Where in this rank's block of targets those lie that a coarser output is compared with."""
    out = [slice(None)]
    for s, i, o in zip(b.attr("strides"), b.reads[0][1:], b.writes[0][1:], strict=False):
        first = start(o) * s - start(i)
        out.append(slice(first, first + length(o) * s, s))
    return (tuple(out),)


# Losses.


def _first_class(b: Bound) -> tuple[Any, ...]:
    """The number of the first class that this rank holds."""
    return (start(b.reads[0][-1]),)


def _named(kind: str) -> Callable[[Bound], tuple[Any, ...]]:
    return lambda b: (kind,)


def _dice_backward(b: Bound) -> Call:
    first, eps, classes = *_first_class(b), *b.attrs("eps", "classes")
    return lambda e, _, x, m, sums, t, dsums: e.dice_backward(x, m, sums, t, first, dsums, eps, classes)


def _of_classes(b: Bound, values: Sequence[float]) -> tuple[float, ...]:
    """Values of the classes that this rank holds."""
    (first,) = _first_class(b)
    return tuple(values[first : first + length(b.reads[0][-1])])


def register_kernel(name: str, function: Callable[..., Array], *attrs: str) -> None:
    """Let a function compute the kernels of a name: of this rank's blocks of what they read, then of the named attributes.

    For kernels that need to know more of their blocks than their shapes, put a binder into `BINDERS`. See docs/howto/add-an-op.md.
    """

    def bind(b: Bound) -> Call:
        more = b.attrs(*attrs)
        return lambda e, _, *arrays: (function(*arrays, *more),)

    BINDERS[name] = bind


BINDERS: dict[str, Binder] = {
    "conv_forward": _biased(_conv("conv_forward", 0, 1, ~0)),
    "conv_relu_forward": _biased(_conv("conv_relu_forward", 0, 1, ~0)),
    "conv_backward_data": _conv("conv_backward_data", ~0, 1, 0),
    "conv_backward_weights": _conv("conv_backward_weights", 0, ~0, 1),
    "conv_backward_weights_bias": _conv("conv_backward_weights_bias", 0, ~0, 1),
    "conv_transpose_forward": _conv_transpose_forward,
    "conv_transpose_backward_data": _conv("conv_forward", 0, 1, ~0, arrange=lambda dy, w: (dy, w, None)),
    "conv_transpose_backward_weights": _conv("conv_backward_weights", 1, ~0, 0, arrange=lambda x, dy: (dy, x)),
    **{f"{name}_{part}": _part(f"{name}_{part}") for name in RIMS for part in ("interior", "rims")},
    "bias_backward": _method("bias_backward"),
    "linear_forward": _biased(_method("linear_forward")),
    "linear_backward_data": _method("linear_backward_data"),
    "linear_backward_weights": _method("linear_backward_weights"),
    "max_pool_forward": _pool("max_pool_forward", 0, ~0),
    "max_pool_backward": _pool("max_pool_backward", ~0, 0),
    "avg_pool_forward": _pool("avg_pool_forward", 0, ~0, lambda b: (_divisors(b, b.writes[0]),)),
    "avg_pool_backward": _pool("avg_pool_backward", ~0, 0, lambda b: (_divisors(b, b.reads[0]),)),
    "spatial_sum": _method("spatial_sum", "scale"),
    "spatial_broadcast": _method("spatial_broadcast", "scale", more=lambda b: (spatial(b.writes[0]),)),
    "norm_sums": _method("norm_sums"),
    "norm_moments": _method("norm_moments", "eps", more=lambda b: (b.count(b.kernel.writes[0].varying),)),
    "norm_statistics": _method("norm_statistics", "eps", more=lambda b: (b.count(b.kernel.writes[1].varying),)),
    "norm_forward": _norm_forward,
    "norm_apply": _method("norm_apply", arrange=_affine),
    "norm_relu_forward": _method("norm_relu_forward", arrange=_affine),
    "norm_add_relu_forward": _method("norm_relu_forward", arrange=_affine_and_residual),
    "norm_inference": _method("norm_inference", "eps", arrange=_inference),
    "norm_backward_sums": _method("norm_backward_sums", arrange=lambda x, dy, m: (x, dy, m[0], m[1])),
    "norm_relu_backward_sums": _method(
        "norm_relu_backward_sums", arrange=lambda x, y, dy, m, *more: (x, y, dy, m[0], m[1], *more)
    ),
    "norm_backward_data": _norm_backward_data,
    "norm_backward_data_add": _norm_backward_data,
    "norm_param_grads": lambda b: lambda e, _, dsums: (e.parameter_gradient(dsums[1]), e.parameter_gradient(dsums[0])),
    "norm_running": _norm_running,
    **{f"sample_norm_{name}": _sample_norm for name in ("sums", "apply", "backward_sums", "backward_data")},
    "sample_norm_moments": _sample_norm_moments,
    "sample_norm_forward": _sample_norm_forward,
    "relu_forward": _method("relu_forward"),
    "relu_backward": _method("relu_backward"),
    "leaky_relu_forward": _method("leaky_relu_forward", "slope"),
    "leaky_relu_backward": _method("leaky_relu_backward", "slope"),
    "sigmoid_forward": _method("sigmoid_forward"),
    "sigmoid_backward": _method("sigmoid_backward"),
    "tanh_forward": _method("tanh_forward", "scale"),
    "tanh_backward": _method("tanh_backward", "scale"),
    **{
        f"{kind}_{way}": _activation(kind, f"activation_{way}")
        for kind in ACTIVATIONS
        for way in ("forward", "backward")
    },
    "local_response_norm_forward": _method(
        "local_response_norm_forward", "alpha", "beta", "k", more=_local_response_norm_forward
    ),
    "local_response_norm_ratio": _method("local_response_norm_ratio"),
    "local_response_norm_backward": _method(
        "local_response_norm_backward", "alpha", "beta", more=_local_response_norm_backward
    ),
    "softmax_denominator": _method("softmax_denominator"),
    "softmax_forward": _method("softmax_forward"),
    "softmax_inner": _method("softmax_inner"),
    "softmax_backward": _method("softmax_backward"),
    "channel_shuffle": _method(
        "channel_shuffle",
        more=lambda b: tuple(b.local(n, b.kernel.extent(n)) for n in b.kernel.reads[0].dims[-1].loops),
    ),
    "add": _method("add", arrange=_listed),
    "multiply": _method("multiply", arrange=_listed),
    "multiply_backward": _method("multiply_backward", "i", arrange=lambda dy, *xs: (dy, xs)),
    "concat": _method("concat", arrange=_listed),
    "identity": lambda b: lambda e, _, x: (x,),
    "dropout": _dropout,
    "cut": _method("pack", more=_cut),
    "reshape": _reshape,
    "shift": _shift,
    "upsample_forward": _method("upsample_forward", more=_upsample_forward),
    "upsample_backward": _method("upsample_backward", "factors"),
    "thin": _on_host(thinned, more=_thinned),
    "lines_forward": _on_host(along_lines, more=_lines),
    "lines_backward": _on_host(along_lines, more=_lines),
    "prelu_forward": _on_host(prelu.prelu_forward),
    "prelu_backward_data": _on_host(prelu.prelu_backward_data),
    "prelu_slope_sums": _on_host(prelu.prelu_slope_sums, "per_channel"),
    "softmax_max": _method("softmax_max"),
    "softmax_sums": _method("softmax_sums", more=_first_class),
    "softmax_rank": _method("softmax_rank", more=_first_class),
    "count_hits": _method("count_hits", "tops"),
    "cross_entropy_loss": _method("cross_entropy_loss", "smoothing", "classes", "scale"),
    "cross_entropy_backward": _method("cross_entropy_backward", "smoothing", "classes", "scale", more=_first_class),
    "mse_loss": _method("mse_loss", "scale"),
    "mse_backward": _method("mse_backward", "scale"),
    **{
        f"{k}_{part}": _method(f"error_{part}", "scale", more=_named(k))
        for k in ERRORS
        for part in ("loss", "backward")
    },
    "bce_loss": _method("bce_loss", "scale"),
    "bce_backward": _method("bce_backward", "scale"),
    "dice_sums": _method("dice_sums", more=_first_class),
    "dice_loss": _method("dice_loss", "eps", "classes"),
    "dice_backward": _dice_backward,
    "dice_backward_data": _method("dice_backward_data"),
    **{
        f.__name__: _on_host(f, *attrs, more=more)
        for f, more, *attrs in (
            (label_losses.label_factors, _none, "class_weights", "ignore"),
            (label_losses.class_spread, lambda b: (_of_classes(b, b.attr("class_weights")),)),
            (label_losses.weighed_entropy_loss, _none, "gamma", "scale"),
            (label_losses.smoothed_entropy_loss, _none, "gamma", "scale", "smoothing", "class_weights"),
            (label_losses.weighed_entropy_backward, _first_class, "gamma", "scale", "smoothing", "class_weights"),
            (label_losses.region_sums, _first_class, "ignore", "per_sample"),
            (label_losses.region_loss, lambda b: (_of_classes(b, b.attr("factors")),), "eps"),
            (
                label_losses.region_backward,
                lambda b: (*_first_class(b), _of_classes(b, b.attr("factors"))),
                "eps",
                "ignore",
            ),
            (label_losses.count_known_hits, _none, "tops", "ignore"),
            (label_losses.softmax_first, _first_class),
            (label_losses.class_counts, _none, "classes", "ignore"),
            (label_losses.class_confusion, _none, "classes", "ignore"),
            (label_losses.sample_counts, _none, "classes", "ignore"),
            (label_losses.dice_of_samples, _none),
            (label_losses.error_sums, _none),
        )
    },
}


_Multiply = Callable[[Any, float], Any]
_GRADIENTS: dict[str, tuple[str, _Multiply]] = {
    "cross_entropy_backward": ("scale", lambda scale, by: scale * by),
    "weighed_entropy_backward": ("scale", lambda scale, by: scale * by),
    "dice_backward": ("classes", lambda classes, by: classes / by),
    "region_backward": ("factors", lambda factors, by: tuple(f * by for f in factors)),
}


def loss_gradient(kernel: Kernel) -> tuple[str, _Multiply] | None:
    """Of a kernel that begins the way back from a loss, the attribute that its result is in proportion to, and how to multiply it.

    Of losses element by element it is ``scale``.
    """
    own = kernel.name.removesuffix("_backward") in LOSSES and "scale" in dict(kernel.attrs)
    return _GRADIENTS.get(kernel.name, _GRADIENTS["cross_entropy_backward"] if own else None)


def _scaled(b: Bound, name: str, multiply: _Multiply) -> Call:
    """The gradient of a loss, times the loss scale of a step."""
    calls: dict[float, Call] = {}

    def call(e: Engine, c: MicroBatch, *arrays: Array) -> tuple[Array, ...]:
        found = calls.get(c.loss_scale)
        if found is None:
            attrs = {**dict(b.kernel.attrs), name: multiply(b.attr(name), c.loss_scale)}
            kernel = replace(b.kernel, attrs=tuple(attrs.items()))
            found = calls[c.loss_scale] = BINDERS[b.kernel.name](replace(b, kernel=kernel))
        return found(e, c, *arrays)

    return call


def bind(b: Bound) -> Call:
    """The call of a kernel on one rank's blocks; where all that it writes is empty, no call at all."""
    shapes = [box_shape(box) for box in b.writes]
    if all(0 in shape for shape in shapes):
        # Gradients of parameters have the parameters' type, everything else that of activations.
        inner = [not o.value.startswith("d") or o.value.startswith(("dx", "dy")) for o in b.kernel.writes]
        types = [None if o.dtype in (None, "opaque") else np.dtype(o.dtype) for o in b.kernel.writes]

        def nothing(e: Engine, _: MicroBatch, *arrays: Array) -> tuple[Array, ...]:
            own = (t or (e.activations if x else e.dtype) for t, x in zip(types, inner, strict=True))
            return tuple(e.empty(s, t) for s, t in zip(shapes, own, strict=True))

        return nothing
    gradient = loss_gradient(b.kernel)
    return BINDERS[b.kernel.name](b) if gradient is None else _scaled(b, *gradient)
