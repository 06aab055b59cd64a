"""CuPy and its device, or a message that says what is missing and how to get it."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from lbpar.errors import EngineError
from lbpar.threads import local_rank

log = logging.getLogger(__name__)

CACHE = "CUPY_CACHE_DIR"

OLDEST = 14
"""First CuPy that has arrays of bfloat16 and runs CUDA 12 and 13."""

TURING, CUDA_13 = 75, 13000
"""Oldest GPUs, by ten times their compute capability, that CUDA 13 compiles for."""

_INSTALL = (
    "pip install 'lbpar[cuda13]', or 'lbpar[cuda12]' where nvidia-smi shows CUDA 12 or the GPU is older than Turing"
)
_ELSE = "or choose engine.name: onednn or numpy"


def load() -> Any:
    """The module `cupy`, with this rank's device as the current one: ranks of a node take turns among those that are visible.

    Raises
    ------
    EngineError
        CuPy, its driver or a device is missing, or the device is too old for CuPy's CUDA.
    """
    try:
        cupy = _import()
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
    if cupy.cuda.runtime.runtimeGetVersion() >= CUDA_13 and int(cupy.cuda.Device().compute_capability) < TURING:
        raise EngineError(
            f"engine.name: cupy: {device_name(cupy)} is older than Turing (sm_{TURING}), for which CUDA 13 compiles nothing: pip uninstall "
            f"cupy-cuda13x, pip install 'lbpar[cuda12]', {_ELSE}."
        )
    return cupy


def _import() -> Any:
    """CuPy, which keeps what it compiles in memory where its folder cannot be written: it makes one as it is loaded, and would fail."""
    if "cupy" in sys.modules or importlib.util.find_spec("cupy") is None:
        return importlib.import_module("cupy")
    given = os.environ.get(CACHE)
    try:
        folder = Path(given) if given else Path.home() / ".cupy" / "kernel_cache"
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody's home
        log.warning(
            "engine: kernels are compiled anew in each run, since they cannot be kept (%s): set %s to a folder that can be written",
            error,
            CACHE,
        )
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
        with TemporaryDirectory() as there:
            os.environ[CACHE] = there
            try:
                return importlib.import_module("cupy")
            finally:
                os.environ.pop(CACHE) if given is None else os.environ.update({CACHE: given})
    return importlib.import_module("cupy")


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
            "or choose engine: {cudnn: auto}, which leaves its part to lbpar's own kernels."
        ) from error
    warn_once(f"engine: lbpar's own kernels convolve and normalise, because cuDNN cannot be used ({error}): {_INSTALL}")


@cache
def warn_once(text: str) -> None:
    """Say something once in a process: a run makes several engines."""
    log.warning("%s", text)


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
