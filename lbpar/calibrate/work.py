"""Work between two measurements: they find other things in the caches than their own, as steps of a large network do."""

from __future__ import annotations

import numpy as np

from lbpar.engine.base import Engine

#: Elements that it goes through: more than a core's own caches hold.
WORK = 1 << 19


class Work:
    """Work of an engine, done when it is called."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._block = engine, engine.copy(engine.from_host(np.ones(WORK, np.float32)))

    def __call__(self) -> None:
        self._engine.relu_forward(self._block)
