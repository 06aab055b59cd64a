"""Where optimizers find compiled passes for their float32 blocks."""

from __future__ import annotations

import os
from functools import cache

from lbpar.engine.native.passes import SWITCH, Native, is_dense, native
from lbpar.runtime.optim.blocks import Array


def passes(*arrays: Array) -> Native | None:
    """The compiled passes if they take such blocks, else None; they use as many threads as OpenMP gives this thread."""
    return _native(os.environ.get(SWITCH, "1")) if is_dense(*arrays) else None


@cache
def _native(switch: str) -> Native | None:
    return native()
