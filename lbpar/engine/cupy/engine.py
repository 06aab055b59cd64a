"""The engine `cupy`: all local kernels on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from lbpar.engine.base import Engine
from lbpar.engine.cupy.updates import Updates


class CupyEngine(Updates, Engine):
    """Local kernels on the current CUDA device.

    Parameters
    ----------
    dtype : numpy dtype or its name
    threads : int, optional
        Ignored.
    tf32 : bool
        Multiply float32 in TF32.

    Raises
    ------
    EngineError
        CuPy, its driver or a device is missing.
    """

    name = "cupy"
    accelerated = frozenset({"float32", "float64"})

    def __init__(self, dtype: npt.DTypeLike = np.float32, threads: int | None = None, tf32: bool = False) -> None:
        Engine.__init__(self, dtype, threads)
        Updates.__init__(self)
        self._device = self.cupy.cuda.Device()
        self.tf32 = tf32

    @contextmanager
    def running(self) -> Iterator[None]:
        """In this block the engine's device is the calling thread's."""
        self._device.use()
        yield
