"""What has no CUDA kernel yet, by NumPy on copies in host memory: right, and slow."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from lbpar.engine.base import Engine
from lbpar.engine.cupy.device import CupyDevice
from lbpar.engine.numpy_engine import NumpyEngine


def _on_host(name: str) -> Callable[..., Any]:
    @wraps(getattr(Engine, name), updated=())  # but for the mark of abstract methods
    def method(self: ThroughHost, *args: Any) -> Any:
        return self.on_host(getattr(NumpyEngine(self.dtype), name), *args)

    return method


class ThroughHost(CupyDevice):
    """The part of the engine that runs on the host."""

    def on_host(self, function: Callable[..., Any], *args: Any) -> Any:
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
