"""Pooling: primitives for one shape and geometry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lbpar.engine.base import Array, Float64Array, Window
from lbpar.engine.onednn import cdef
from lbpar.engine.onednn.conv import Geometry
from lbpar.engine.onednn.library import Description, DnnlContext, Primitive, Refused
from lbpar.engine.pooling import factors
from lbpar.engine.windows import first_tap


class Pooling:
    """Forward and backward primitives of one pooling.

    Attributes
    ----------
    crop : the part of x that windows read, or None for all of it; calls take (or write) that part
    x_shape : its shape
    workspace : bytes of what links the two primitives
    """

    def __init__(
        self,
        context: DnnlContext,
        algorithm: int,
        whole: tuple[int, ...],
        y_shape: tuple[int, ...],
        win: Window,
        stored: int = cdef.F32,
    ) -> None:
        geometry = Geometry(win, whole[1:-1], y_shape[1:-1])
        self.crop, self.x_shape = geometry.crop, (whole[0], *geometry.spatial, whole[-1])
        for dim, n_in, n_out in zip(win, whole[1:-1], y_shape[1:-1], strict=True):
            if (first_tap(dim, n_in, n_out) < 0).any():
                raise Refused("a pooling window lies outside the input")
        x, y = context.activation(self.x_shape, stored), context.activation(y_shape, stored)
        strides, *others = geometry.tail
        shape = [strides, [dim.kernel for dim in win], *others]
        forward = (cdef.FORWARD_TRAINING, algorithm, x, y, *shape, context.attributes())
        hint = Description(context, "pooling_forward", forward)
        self.workspace = hint.size(cdef.QUERY_WORKSPACE)
        extra: list[tuple[int, Any]] = [(cdef.ARG_WORKSPACE, cdef.QUERY_WORKSPACE)] if self.workspace else []
        self.forward = Primitive(context, "pooling_forward", forward, [(cdef.ARG_SRC, x), (cdef.ARG_DST, y), *extra])
        self.backward = Primitive(
            context,
            "pooling_backward",
            (algorithm, x, y, *shape, hint.descriptor, context.attributes()),
            [(cdef.ARG_DIFF_DST, y), (cdef.ARG_DIFF_SRC, x), *extra],
        )


def avg_factors(win: Window, divisors: Sequence[Float64Array], like: Array) -> list[Array]:
    """kernel/divisor (0 where that is 0), shaped to broadcast over (*out, C), for each dimension where it is not 1."""
    pairs = enumerate(zip(win, divisors, strict=True), start=1)
    return [factors(d / dim.kernel, axis, like) for axis, (dim, d) in pairs if not np.all(d == dim.kernel)]
