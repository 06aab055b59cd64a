"""Pooling and matrix products: primitives for one shape and geometry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lbpar.engine.base import Window
from lbpar.engine.onednn import cdef
from lbpar.engine.onednn.conv import Geometry
from lbpar.engine.onednn.library import Context, Description, Primitive, Refused
from lbpar.engine.windows import first_tap


class Pooling:
    """Forward and backward primitives of one pooling; ``workspace`` is the size in bytes of what links the two."""

    def __init__(
        self,
        context: Context,
        algorithm: int,
        x_shape: Sequence[int],
        y_shape: Sequence[int],
        win: Window,
        in_spatial: Sequence[int],
        geometry: Geometry,
    ) -> None:
        for dim, n_in, n_out in zip(win, in_spatial, y_shape[1:-1], strict=True):
            if (first_tap(dim, n_in, n_out) < 0).any():
                raise Refused("a pooling window lies outside the input")
        x, y = context.activation(x_shape), context.activation(y_shape)
        shape = [
            list(geometry.strides),
            [dim.kernel for dim in win],
            list(geometry.dilates),
            list(geometry.before),
            list(geometry.after),
        ]
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


def matmul(
    context: Context,
    sizes: tuple[int, int, int],
    left: tuple[int, int],
    right: tuple[int, int],
    bias: bool,
    fpmath: int,
) -> Primitive:
    """(m, k) @ (k, n) with the given strides [+ a row]: addresses left, right, result[, row]."""
    m, k, n = sizes
    a, b = context.desc((m, k), left), context.desc((k, n), right)
    c, row = context.rows((m, n)), context.rows((1, n)) if bias else context.null
    memories = [(cdef.ARG_SRC, a), (cdef.ARG_WEIGHTS, b), (cdef.ARG_DST, c)]
    return Primitive(
        context,
        "matmul",
        (a, b, row, c, context.attributes(fpmath=fpmath)),
        [*memories, (cdef.ARG_BIAS, row)] if bias else memories,
    )


def avg_factors(win: Window, divisors: Sequence[npt.NDArray[np.float64]]) -> list[npt.NDArray[np.float32]] | None:
    """Per dimension kernel/divisor (0 where that is 0), shaped to broadcast over (*out, C); None where all are 1."""
    factors = []
    for axis, (dim, divisor) in enumerate(zip(win, divisors, strict=True)):
        divisor = np.asarray(divisor, dtype=np.float64)
        if np.all(divisor == dim.kernel):
            continue
        ratio = np.divide(dim.kernel, divisor, out=np.zeros_like(divisor), where=divisor != 0)
        factors.append(ratio.astype(np.float32).reshape(-1, *([1] * (len(win) - axis))))
    return factors or None
