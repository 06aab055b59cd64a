"""The engine `cupy`: all local kernels on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lbpar.config.engine import WORKSPACE
from lbpar.engine.base import Engine
from lbpar.engine.cupy.graphs import Graphs
from lbpar.engine.cupy.library import load_cudnn, without_cudnn
from lbpar.engine.cupy.through_host import ThroughHost
from lbpar.engine.cupy.updates import Updates
from lbpar.errors import EngineError


def half(name: str) -> np.dtype[Any]:
    """A half type by name: NumPy has no bfloat16 of its own."""
    if name == "float16":
        return np.dtype(np.float16)
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
    cudnn : True, False or "auto"
        Convolve by cuDNN; "auto" where it can be loaded.
    autotune : bool
        Time cuDNN's plans and our kernels, and take the fastest.
    workspace : int
        Most bytes that a convolution or product may take beside its operands.
    compute : "bfloat16" or "float16", optional
        Hold activations in this type and multiply in it. Sums, statistics, weights and their gradients stay float32, and a copy of the
        weights is rounded for each product.

    Raises
    ------
    EngineError
        CuPy, its driver or a device is missing; or cuDNN, where it is asked for.
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
        cudnn: bool | str = "auto",
        autotune: bool = False,
        workspace: int = WORKSPACE,
    ) -> None:
        Engine.__init__(self, dtype, threads)
        Updates.__init__(self)
        self._device = self.cupy.cuda.Device()
        self.tf32 = tf32
        self._card = replace(self._card, workspace=workspace)
        module = load_cudnn(cudnn)
        if module is not None:
            try:
                self.graphs = Graphs(self, module, tf32, autotune, workspace)
            except (ImportError, RuntimeError) as error:
                without_cudnn(cudnn, error)
        if compute is not None:
            self.activations = half(compute)

    @contextmanager
    def running(self) -> Iterator[None]:
        """In this block the engine's device is the calling thread's."""
        self._device.use()
        yield
