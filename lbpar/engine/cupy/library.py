"""CuPy and its device, or a message that says what is missing and how to get it."""

from __future__ import annotations

import logging
import os
import platform
from typing import Any

from lbpar.errors import EngineError
from lbpar.threads import local_rank

log = logging.getLogger(__name__)

OLDEST = 14
"""First CuPy that has arrays of bfloat16 and runs CUDA 12 and 13."""

_INSTALL = "pip install 'lbpar[cuda13]', or 'lbpar[cuda12]' where nvidia-smi shows CUDA 12"
_ELSE = "or choose engine.name: onednn or numpy"


def load() -> Any:
    """The module `cupy`, with this rank's device as the current one: ranks of a node take turns among those that are visible.

    Raises
    ------
    EngineError
        CuPy, its driver or a device is missing.
    """
    try:
        import cupy

        version = int(cupy.__version__.split(".")[0])
    except Exception as error:
        # What is left of an old one, or does not go with NumPy's version, fails in ways of its own.
        raise EngineError(
            f"engine.name: cupy needs CuPy, which cannot be loaded ({error}): {_INSTALL}, {_ELSE}."
        ) from error
    if version < OLDEST:
        raise EngineError(
            f"engine.name: cupy: CuPy {cupy.__version__} is installed, expected {OLDEST} or newer: {_INSTALL}."
        )
    try:
        found = cupy.cuda.runtime.getDeviceCount()
        if not found:
            raise EngineError(_silent("no device"))
        cupy.cuda.Device(local_rank() % found).use()  # fails where another process has it for itself
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise EngineError(_silent(str(error))) from error
    return cupy


def load_cudnn(wanted: bool | str) -> Any:
    """The module `cudnn` of nvidia-cudnn-frontend, with cuDNN behind it; None if it is not ``wanted`` or, for "auto", not there.

    Raises
    ------
    EngineError
        It is wanted, and missing.
    """
    if wanted is False:
        return None
    try:
        import cudnn

        cudnn.backend_version()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        without_cudnn(wanted, error)
        return None
    return cudnn


def without_cudnn(wanted: bool | str, error: Exception) -> None:
    """Say that cuDNN cannot be used; raise if it must be."""
    if wanted is True:
        raise EngineError(
            f"engine.cudnn: true needs cuDNN and the package nvidia-cudnn-frontend, which cannot be used ({error}): {_INSTALL}, "
            "or choose engine: {cudnn: false}, which leaves convolutions to lbpar's own kernels."
        ) from error
    log.info("engine: lbpar's own kernels convolve, because cuDNN cannot be used (%s)", error)


def _silent(error: str) -> str:
    """Why no device answers."""
    if "InsufficientDriver" in error:
        return (
            f"engine.name: cupy: the NVIDIA driver is missing, or older than the CUDA that CuPy was built for ({error}): run on a node "
            f"with a GPU, install a newer driver, or CuPy for the driver's CUDA ({_INSTALL}), {_ELSE}."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
    return f"engine.name: cupy: no GPU can be used here ({error}{shown}): ask the batch system for one, {_ELSE}."


def place(cupy: Any) -> str:
    """Where the current device is: two ranks that say the same share it."""
    return f"{platform.node()} {cupy.cuda.Device().pci_bus_id}"


def device_name(cupy: Any) -> str:
    """The current device in words."""
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())
    return f"{properties['name'].decode()} (sm_{properties['major']}{properties['minor']})"
