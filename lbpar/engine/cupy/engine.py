"""The engine `cupy`: all local kernels on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from lbpar.engine.base import Engine
from lbpar.engine.cupy.through_host import ThroughHost
from lbpar.engine.cupy.updates import Updates
from lbpar.errors import EngineError


def half(name: str) -> np.dtype[Any]:
    """A half type by name: NumPy has no bfloat16 of its own."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise EngineError(
            f"engine.dtype: {name} needs the package ml-dtypes ({error}): pip install 'lbpar[cuda13]' or 'lbpar[cuda12]', or choose float32."
        ) from error
    return np.dtype(getattr(ml_dtypes, name))


class CupyEngine(Updates, ThroughHost, Engine):
    """Local kernels on the current CUDA device.

    Parameters
    ----------
    dtype : numpy dtype or its name
    threads : int, optional
        Ignored.
    tf32 : bool
        Multiply float32 in TF32.
    compute : "bfloat16", optional
        Hold activations in this type and multiply in it. Sums, statistics, weights and their gradients stay float32, and a copy of the
        weights is rounded for each product.

    Raises
    ------
    EngineError
        CuPy, its driver or a device is missing.
    """

    name = "cupy"
    rims = True
    accelerated = frozenset({"float32", "float64"})

    def __init__(
        self,
        dtype: npt.DTypeLike = np.float32,
        threads: int | None = None,
        tf32: bool = False,
        compute: str | None = None,
    ) -> None:
        Engine.__init__(self, dtype, threads)
        Updates.__init__(self)
        self._device = self.cupy.cuda.Device()
        self.tf32 = tf32
        if compute is not None:
            self.activations = half(compute)

    @contextmanager
    def running(self) -> Iterator[None]:
        """In this block the engine's device is the calling thread's."""
        self._device.use()
        yield
