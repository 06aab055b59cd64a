"""Functions of somebody's own, by NumPy on copies in host memory: right, and slow. Those of lbpar have kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from lbpar.engine.base import Engine
from lbpar.engine.cupy.device import CupyDevice
from lbpar.engine.host import label_losses as losses
from lbpar.engine.host import prelu
from lbpar.engine.host.lines import along_lines, thinned
from lbpar.engine.numpy_engine import NumpyEngine


def _on_host(name: str) -> Callable[..., Any]:
    @wraps(getattr(Engine, name), updated=())  # but for the mark of abstract methods
    def method(self: ThroughHost, *args: Any) -> Any:
        return self.on_host(getattr(NumpyEngine(self.dtype), name), *args)

    return method


_HERE = frozenset(
    (
        along_lines, thinned, prelu.prelu_forward, prelu.prelu_backward_data, prelu.prelu_slope_sums, losses.label_factors,
        losses.class_spread, losses.weighed_entropy_loss, losses.smoothed_entropy_loss, losses.weighed_entropy_backward,
        losses.region_sums, losses.region_loss, losses.region_backward, losses.count_known_hits, losses.softmax_first,
        losses.class_counts, losses.class_confusion, losses.error_sums,
        losses.sample_counts, losses.dice_of_samples,
    )
)  # fmt: skip
"""Functions that the engine has methods for, of the same names."""


class ThroughHost(CupyDevice):
    """The part of the engine that runs on the host."""

    def on_host(self, function: Callable[..., Any], *args: Any) -> Any:
        if function in _HERE:
            return getattr(self, function.__name__)(*args)
        made = function(*(self.to_host(a) if isinstance(a, self._ndarray) else a for a in args))
        kind = next(a.dtype for a in args if isinstance(a, self._ndarray))

        def back(a: Any) -> Any:
            """On the device; in the half type that was widened on the way to the host."""
            found = self.from_host(a)
            widened = a.dtype == np.float32 and kind == self.activations and not function.__name__.endswith("_sums")
            return self.copy(found, kind) if widened else found

        return tuple(map(back, made)) if isinstance(made, tuple) else back(made)

    activation_forward = _on_host("activation_forward")
    activation_backward = _on_host("activation_backward")
    error_loss = _on_host("error_loss")
    error_backward = _on_host("error_backward")
