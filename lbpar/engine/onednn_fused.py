"""Fused forms of neighbouring kernels of the oneDNN engine. They go beyond the interface of `lbpar.engine.base`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lbpar.engine.base import Array, Float64Array, Window
from lbpar.engine.onednn import SMALL, OneDnnEngine, is_float32


class FusedOneDnnEngine(OneDnnEngine):
    """The oneDNN engine with fused methods. Each equals the composition that its docstring names."""

    def conv_relu_forward(
        self, x: Array, w: Array, b: Array | None, win: Window, groups: int, out_spatial: Sequence[int]
    ) -> Array:
        """``relu_forward(conv_forward(...))``, the former in place. (oneDNN's fused relu would turn NaN into 0.)"""
        y = self._conv(x, w, b, win, groups, tuple(out_spatial))
        if y is None:
            return self.relu_forward(super().conv_forward(x, w, b, win, groups, out_spatial))
        return self._relu(y, y)

    def conv_backward_weights_bias(self, x: Array, dy: Array, win: Window, groups: int) -> tuple[Array, Array]:
        """``conv_backward_weights(...)`` and ``bias_backward(dy)`` in one kernel; the latter is summed in float32."""
        dw, db = self._conv_weights(x, dy, win, groups, bias=True)
        return dw, self.bias_backward(dy) if db is None else db

    def norm_relu_forward(
        self,
        x: Array,
        mean: Array,
        invstd: Array,
        scale: Array | None,
        bias: Array | None,
        residual: Array | None = None,
    ) -> Array:
        """``relu_forward(add([norm_apply(...), residual]))`` in one kernel, the sum only where residual is given.

        oneDNN's relu turns NaN into 0, so statistics that are not finite (as any NaN or infinity in x makes them) take the
        unfused way; only a NaN that the statistics or the residual do not know of is hidden.
        """
        y = None
        if not np.isfinite(mean + invstd).all():
            pass
        elif residual is None:
            y = self._norm_apply(x, mean, invstd, scale, bias, relu=True)
        else:
            y = self._norm_add_relu(x, mean, invstd, scale, bias, residual)
        if y is not None:
            return y
        y = super().norm_apply(x, mean, invstd, scale, bias)
        return self.relu_forward(y if residual is None else self.add([y, residual]))

    def norm_relu_backward_sums(
        self, x: Array, y: Array, dy: Array, mean: Array, invstd: Array
    ) -> tuple[Float64Array, Array]:
        """``norm_backward_sums(x, g, ...)`` with ``g = relu_backward(y, dy)``, and g, in one pass over memory.

        g is also the gradient of `norm_relu_forward`'s residual; `norm_backward_data` takes it as dy.
        """
        if is_float32(x, y, dy) and x.size > SMALL:
            masked = self._new(dy.shape)
            sums = self._backward_sums(x, dy, mean, y, masked)
            # An infinite dy where relu is shut becomes NaN in oneDNN, 0 in the reference.
            if sums is not None and not np.isnan(sums).any():
                sums[1] *= invstd
                return sums, masked
        masked = self.relu_backward(y, dy)
        return self.norm_backward_sums(x, masked, mean, invstd), masked
