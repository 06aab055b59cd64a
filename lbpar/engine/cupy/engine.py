"""The engine `cupy`: all local kernels on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lbpar.config.engine import WORKSPACE
from lbpar.engine.base import Engine
from lbpar.engine.cupy.blas import cublas_of
from lbpar.engine.cupy.graphs import Graphs
from lbpar.engine.cupy.library import load_cudnn, warn_once, without_cudnn
from lbpar.engine.cupy.plans import refusals
from lbpar.engine.cupy.through_host import ThroughHost
from lbpar.engine.cupy.updates import Updates
from lbpar.engine.half import half


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
        Convolve by cuDNN; "auto" where it can be loaded. Unless it is False, cuBLAS multiplies matrices where it can be loaded.
    autotune : bool
        Time cuDNN's plans and our kernels when a convolution is first computed, and from `agree` on take the fastest.
    workspace : int
        Most bytes that a convolution or product may take beside its operands.
    graphs : bool
        Let steps of one process be recorded. Then our kernels multiply matrices.
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
    volume_copies = False
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
        graphs: bool = False,
    ) -> None:
        Engine.__init__(self, dtype, threads)
        Updates.__init__(self)
        self._device = self.cupy.cuda.Device()
        self.tf32, self._autotune, self.captures = tf32, autotune, graphs
        self._card = replace(self._card, workspace=workspace)
        module = load_cudnn(cudnn if self.dtype != np.float64 else False)  # of which it has nothing
        if module is not None:
            missing: tuple[type[Exception], ...] = (ImportError, AttributeError, *refusals(module))
            try:
                self.graphs = Graphs(self, module, tf32, autotune, workspace)
                self.whole_norms = True
            except missing as error:
                without_cudnn(cudnn, error)
        if autotune and self.graphs is None:
            warn_once(
                "engine.autotune: true changes nothing here: it times plans of cuDNN, which cannot be used, and lbpar's own kernels convolve "
                "instead. pip install 'lbpar[cuda13]' or 'lbpar[cuda12]' brings cuDNN, engine: {cudnn: true} says what is wrong with it."
            )
        # What it takes for itself would be taken anew in each step that is recorded.
        if cudnn is not False and not graphs:
            self.blas = cublas_of(self, tf32, self._card.architecture)
        self.libraries = tuple(n for n, used in (("cuDNN", self.graphs), ("cuBLAS", self.blas)) if used is not None)
        if compute is not None:
            self.activations = half(compute)

    def agree(self, exchange: Callable[[Any], Sequence[Any]]) -> None:
        if self._autotune:  # which is the same on all ranks; what libraries they have need not be
            found = exchange({} if self.graphs is None else self.graphs.times)
            if self.graphs is not None:
                self.graphs.choose(found)

    @contextmanager
    def running(self) -> Iterator[None]:
        """In this block the engine's device is the calling thread's."""
        self._device.use()
        yield
