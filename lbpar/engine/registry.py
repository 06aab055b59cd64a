"""Engines by name."""

from __future__ import annotations

import logging
from typing import Any

import numpy.typing as npt

from lbpar.config.engine import EngineConfig
from lbpar.engine.base import Engine
from lbpar.engine.half import NumpyHalves
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.errors import ConfigError, EngineError
from lbpar.text import nearest
from lbpar.threads import share

log = logging.getLogger(__name__)

BFLOAT16, FLOAT16 = "bfloat16", "float16"
HALF_TYPES = (BFLOAT16, FLOAT16)
NAMES = ("auto", "numpy", "onednn", "cupy")
OF_GPU = ("tf32", "cudnn", "autotune", "workspace", "graphs")
_NEEDS = {"tf32": "tensor cores", "cudnn": "a GPU", "autotune": "a GPU", "graphs": "a GPU"}


def get_engine(
    name: str = "auto", dtype: npt.DTypeLike = "float32", threads: int | None = None, **of_gpu: Any
) -> Engine:
    """Make an engine.

    Parameters
    ----------
    name : "numpy", "onednn", "cupy" or "auto"
        auto takes onednn where its library loads, else numpy, and logs one line that says so.
    dtype : element type of activations and weights
        "bfloat16" means activations and products of bfloat16 beside weights, sums and statistics of float32; with numpy it is the
        reference, slow. "float16" is the same with cupy, in float16.
    threads : threads for kernels; None leaves the library's default
    **of_gpu : tf32, cudnn, autotune, workspace, graphs, of `lbpar.config.engine.EngineConfig`

    Raises
    ------
    ConfigError
        Unknown name.
    EngineError
        The named engine's library is missing or unusable, or cannot compute in bfloat16 on this processor.
    """
    if name == "cupy":
        return _cupy(dtype, threads, of_gpu)
    for option, needs in _NEEDS.items():
        if of_gpu.get(option) is True:
            raise ConfigError(
                f"engine.{option}: true needs {needs}, but engine.name is {name}; choose engine.name: cupy."
            )
    if name == "numpy":
        return _numpy(dtype, threads)
    if name == "onednn":
        return _onednn(dtype, threads)
    if name == "auto":
        try:
            return _onednn(dtype, threads)
        except EngineError as error:
            if dtype in HALF_TYPES:
                raise
            log.warning("engine: numpy, because onednn cannot be used (%s)", error)
            return NumpyEngine(dtype, threads)
    raise ConfigError(f"engine.name: got {name!r}, {nearest(name, NAMES)}expected one of {', '.join(NAMES)}.")


def build_engine(config: EngineConfig, dtype: str | None = None) -> Engine:
    """The engine of a run file."""
    threads = share() if config.threads == "auto" else int(config.threads)
    if config.name != "cupy" and config.transport in ("nccl", "mpi"):
        raise ConfigError(
            f"engine.transport: {config.transport} moves arrays of GPUs, but engine.name is {config.name}; choose engine.name: cupy, or leave it "
            "out."
        )
    of_gpu = {name: getattr(config, name) for name in OF_GPU}
    return get_engine(config.name, dtype or config.dtype, threads, **of_gpu)


def _numpy(dtype: npt.DTypeLike, threads: int | None) -> Engine:
    if dtype == FLOAT16:
        raise ConfigError(
            f"engine.dtype: {dtype} is not available on engine.name: numpy; choose engine.name: cupy, or float32 or float64."
        )
    return NumpyHalves(BFLOAT16, threads) if dtype == BFLOAT16 else NumpyEngine(dtype, threads)


def _onednn(dtype: npt.DTypeLike, threads: int | None) -> Engine:
    # The library is large and may be missing: load it only when this engine is asked for.
    try:
        from lbpar.engine.onednn.engine import OneDnnEngine
    except ImportError as error:
        raise EngineError(
            f"engine.name: onednn cannot be loaded: {error}. Install onednn-cpu-gomp, or choose engine.name: numpy."
        ) from error
    if dtype == "float16":
        raise ConfigError(
            "engine.dtype: float16 is not available on engine.name: onednn; choose engine.name: cupy, or bfloat16 or float32."
        )
    if dtype == BFLOAT16:
        return OneDnnEngine("float32", threads, compute=BFLOAT16)
    return OneDnnEngine(dtype, threads)


def _cupy(dtype: npt.DTypeLike, threads: int | None, of_gpu: dict[str, Any]) -> Engine:
    # What would change nothing is a mistake.
    if of_gpu.get("tf32") and dtype != "float32":
        raise ConfigError(
            f"engine.tf32: true is how float32 is multiplied, but engine.dtype is {dtype}; leave out one of them."
        )
    for option in ("cudnn", "autotune"):
        if of_gpu.get(option) is True and dtype == "float64":
            raise ConfigError(
                f"engine.{option}: true asks for cuDNN, which has nothing in float64, but engine.dtype is float64; leave out one of them."
            )
    if of_gpu.get("autotune") and of_gpu.get("cudnn") is False:
        raise ConfigError(
            "engine.autotune: true times plans of cuDNN, but engine.cudnn is false; leave out one of them."
        )
    from lbpar.engine.cupy.engine import CupyEngine  # which loads CuPy, for a device

    if dtype in HALF_TYPES:
        return CupyEngine("float32", threads, compute=str(dtype), **of_gpu)
    return CupyEngine(dtype, threads, **of_gpu)
