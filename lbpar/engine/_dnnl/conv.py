"""Convolutions: primitives for one shape and geometry, with the weights' reorder where oneDNN prefers its own format.

Weights lie as (F, *K, C/groups). Kernels that read them so are one to two orders of magnitude slower than those on blocked
formats, and the reorder costs one pass over the weights (measured: 0.2 to 3 % of a ResNet layer at batch 16), so oneDNN
chooses the format and weights are reordered in every call. Nothing is remembered about their values between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lbpar.engine._dnnl import cdef
from lbpar.engine._dnnl.library import Context, Primitive, Refused
from lbpar.engine.base import Array, Window


@dataclass(frozen=True)
class Geometry:
    """A window in oneDNN's terms, on the part ``crop`` of the input (None where that is all of it)."""

    crop: tuple[slice, ...] | None
    spatial: tuple[int, ...]
    strides: tuple[int, ...]
    dilates: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, win: Window, in_spatial: Sequence[int], out_spatial: Sequence[int]) -> Geometry:
        """Translate; raise `Refused` where a dimension's windows see no input at all."""
        crop, spatial, before, after = [], [], [], []
        for dim, n_in, n_out in zip(win, in_spatial, out_spatial, strict=True):
            end = (n_out - 1) * dim.stride + (dim.kernel - 1) * dim.dilation + 1 - dim.pad  # one past the last read
            start = max(0, -dim.pad)
            # oneDNN takes inputs left over behind the last window up to, not including, one stride.
            stop = n_in if end > n_in - dim.stride else end
            if stop <= start:
                raise Refused("window outside the input")
            crop.append(slice(start, stop))
            spatial.append(stop - start)
            before.append(max(0, dim.pad))
            after.append(end - stop)
        whole = all(c.stop - c.start == n for c, n in zip(crop, in_spatial, strict=True))
        return cls(
            None if whole else (slice(None), *crop),
            tuple(spatial),
            tuple(dim.stride for dim in win),
            tuple(dim.dilation - 1 for dim in win),
            tuple(before),
            tuple(after),
        )

    @property
    def tail(self) -> list[list[int]]:
        """Strides, dilations and pads as oneDNN's create functions take them."""
        return [list(part) for part in (self.strides, self.dilates, self.before, self.after)]


class _Weights:
    """Moves weights between their plain layout and the one that a primitive chose."""

    def __init__(self, context: Context, shape: Sequence[int], groups: int, primitive: Primitive, what: int) -> None:
        self.context = context
        self.nbytes = primitive.size(what)
        self.reorder: Primitive | None = None
        plain, chosen = context.weights(shape, groups, plain=True), primitive.query(what)
        if not context.lib.dnnl_memory_desc_equal(plain, chosen):
            source, target = (plain, chosen) if what == cdef.QUERY_WEIGHTS else (chosen, plain)
            self.reorder = Primitive(
                context,
                "reorder",
                (source, context.engine, target, context.engine, context.attributes()),
                ((cdef.ARG_SRC, source), (cdef.ARG_DST, target)),
            )

    def staged(self) -> Any:
        return self.context.pointer(self.context.area("weights", self.nbytes))


class Forward:
    """y = conv(x, w) [+ b], all arrays of the shapes given here."""

    def __init__(
        self,
        context: Context,
        x_shape: Sequence[int],
        w_shape: Sequence[int],
        y_shape: Sequence[int],
        geometry: Geometry,
        groups: int,
        bias: bool,
        fpmath: int,
    ) -> None:
        x, y = context.activation(x_shape), context.activation(y_shape)
        b = context.rows((w_shape[0],)) if bias else context.null
        arguments = (
            cdef.FORWARD_TRAINING,
            cdef.CONV_DIRECT,
            x,
            context.weights(w_shape, groups, plain=False),
            b,
            y,
            *geometry.tail,
            context.attributes(fpmath=fpmath),
        )
        memories = [(cdef.ARG_SRC, x), (cdef.ARG_WEIGHTS, cdef.QUERY_WEIGHTS), (cdef.ARG_DST, y)]
        self.run = Primitive(
            context, "convolution_forward", arguments, [*memories, (cdef.ARG_BIAS, b)] if bias else memories
        )
        self.weights = _Weights(context, w_shape, groups, self.run, cdef.QUERY_WEIGHTS)

    def __call__(self, x: Array, w: Array, b: Array | None, y: Array) -> None:
        pointer = self.run.context.pointer
        weights = pointer(w)
        if self.weights.reorder is not None:
            staged = self.weights.staged()
            self.weights.reorder(weights, staged)
            weights = staged
        if b is None:
            self.run(pointer(x), weights, pointer(y))
        else:
            self.run(pointer(x), weights, pointer(y), pointer(b))


def _hint(context: Context, x: Any, w: Any, y: Any, geometry: Geometry, fpmath: int) -> Primitive:
    """A forward primitive, which backward ones ask for as a hint."""
    arguments = (cdef.FORWARD_TRAINING, cdef.CONV_DIRECT, x, w, context.null, y, *geometry.tail)
    return Primitive(context, "convolution_forward", (*arguments, context.attributes(fpmath=fpmath)), ())


class BackwardData:
    """dx from dy and w."""

    def __init__(
        self,
        context: Context,
        x_shape: Sequence[int],
        w_shape: Sequence[int],
        y_shape: Sequence[int],
        geometry: Geometry,
        groups: int,
        fpmath: int,
    ) -> None:
        dx, dy = context.activation(x_shape), context.activation(y_shape)
        w = context.weights(w_shape, groups, plain=False)
        hint = _hint(context, dx, w, dy, geometry, fpmath)
        self.run = Primitive(
            context,
            "convolution_backward_data",
            (cdef.CONV_DIRECT, dx, w, dy, *geometry.tail, hint.descriptor, context.attributes(fpmath=fpmath)),
            ((cdef.ARG_DIFF_DST, dy), (cdef.ARG_WEIGHTS, cdef.QUERY_WEIGHTS), (cdef.ARG_DIFF_SRC, dx)),
        )
        self.weights = _Weights(context, w_shape, groups, self.run, cdef.QUERY_WEIGHTS)

    def __call__(self, dy: Array, w: Array, dx: Array) -> None:
        pointer = self.run.context.pointer
        weights = pointer(w)
        if self.weights.reorder is not None:
            staged = self.weights.staged()
            self.weights.reorder(weights, staged)
            weights = staged
        self.run(pointer(dy), weights, pointer(dx))


class BackwardWeights:
    """dw, and db if wanted, from x and dy."""

    def __init__(
        self,
        context: Context,
        x_shape: Sequence[int],
        w_shape: Sequence[int],
        y_shape: Sequence[int],
        geometry: Geometry,
        groups: int,
        bias: bool,
        fpmath: int,
    ) -> None:
        x, dy = context.activation(x_shape), context.activation(y_shape)
        w = context.weights(w_shape, groups, plain=False)
        b = context.rows((w_shape[0],)) if bias else context.null
        hint = _hint(context, x, w, dy, geometry, fpmath)
        memories = [(cdef.ARG_SRC, x), (cdef.ARG_DIFF_DST, dy), (cdef.ARG_DIFF_WEIGHTS, cdef.QUERY_DIFF_WEIGHTS)]
        self.run = Primitive(
            context,
            "convolution_backward_weights",
            (cdef.CONV_DIRECT, x, w, b, dy, *geometry.tail, hint.descriptor, context.attributes(fpmath=fpmath)),
            [*memories, (cdef.ARG_DIFF_BIAS, b)] if bias else memories,
        )
        self.weights = _Weights(context, w_shape, groups, self.run, cdef.QUERY_DIFF_WEIGHTS)

    def __call__(self, x: Array, dy: Array, dw: Array, db: Array | None) -> None:
        pointer, reorder = self.run.context.pointer, self.weights.reorder
        target = pointer(dw) if reorder is None else self.weights.staged()
        extra = () if db is None else (pointer(db),)
        self.run(pointer(x), pointer(dy), target, *extra)
        if reorder is not None:
            reorder(target, pointer(dw))
