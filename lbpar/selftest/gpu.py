"""What a GPU has and does: versions, kernels that compile, and speeds beside what the card can do. A part that fails is reported, and the next begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lbpar.engine.base import Engine, LocalWindow
from lbpar.engine.cupy import library
from lbpar.engine.cupy.names import GROUPS
from lbpar.engine.registry import get_engine
from lbpar.text import human_bytes
from lbpar.transport.nccl import load_nccl

TYPES = {"float32": ("float32", False), "TF32": ("float32", True), "bfloat16": ("bfloat16", False)}
TRIES = 5


def report(quick: bool = False, size: int = 4096, images: int = 64) -> dict[str, Any]:
    """All parts: what each found, or why it failed.

    Parameters
    ----------
    quick : bool
        Leave out speeds.
    size : int
        Rows of the matrices that are multiplied; memory that is copied follows from it.
    images : int
        Of 56 by 56 positions and 64 channels, which are convolved.
    """
    parts: list[dict[str, Any]] = []

    def part(name: str, find: Callable[[], Any]) -> None:
        start, failed, found = time.perf_counter(), False, ""
        try:
            found = find()
        except Exception as error:  # noqa: BLE001  whatever it is, the other parts go on
            found, failed = f"{type(error).__name__}: {error}", True
        parts.append({"part": name, "found": found, "seconds": time.perf_counter() - start, "failed": failed})

    part("versions", _versions)
    part("NCCL", lambda: f"version {load_nccl().get_version()}")
    part("kernels", _kernels)
    if not quick:
        part("copy", lambda: _copy(get_engine("cupy", "float32"), size * size))
        for name, kind in TYPES.items():
            part(f"product, {name}", lambda kind=kind: _product(_engine(*kind), size))  # type: ignore[misc]
            part(f"convolution 3x3, {name}", lambda kind=kind: _convolution(_engine(*kind), images))  # type: ignore[misc]
    return {"parts": parts}


def _engine(dtype: str, tf32: bool) -> Engine:
    return get_engine("cupy", dtype, tf32=tf32)


def _versions() -> str:
    cupy = library.load()
    runtime = cupy.cuda.runtime
    free, total = runtime.memGetInfo()
    return (
        f"{library.device_name(cupy)}, {human_bytes(free)} of {human_bytes(total)} free; CuPy {cupy.__version__}, CUDA {runtime.runtimeGetVersion()}, "
        f"driver {runtime.driverGetVersion()}"
    )


def _kernels() -> str:
    """Compile and load all kernels that are launched by default."""
    engine: Any = get_engine("cupy", "float32")
    count = 0
    for file, groups in GROUPS.items():
        for group in groups:
            engine.kernels.function(file, group[0])
            count += len(group)
    return f"{count} in {len(GROUPS)} files compiled and loaded"


def _copy(engine: Engine, elements: int) -> str:
    a = engine.zeros((elements,))
    seconds = _timed(engine, lambda: engine.relu_forward(a))
    return f"{2 * a.nbytes / seconds / 1e9:.0f} GB/s read and written"


def _product(engine: Engine, n: int) -> str:
    a, b = (engine.zeros((n, n), engine.activations) for _ in range(2))
    seconds = _timed(engine, lambda: engine.linear_forward(a, b, None))
    return f"{2 * n**3 / seconds / 1e12:.1f} TFLOP/s, {n} x {n}"


def _convolution(engine: Engine, images: int) -> str:
    side, channels = 56, 64
    x = engine.zeros((images, side, side, channels), engine.activations)
    w, window = engine.zeros((channels, 3, 3, channels), engine.activations), (LocalWindow(3, pad=1),) * 2
    passes: dict[str, Callable[[], Any]] = {
        "forward": lambda: engine.conv_forward(x, w, None, window, 1, (side, side)),
        "data": lambda: engine.conv_backward_data(x, w, window, 1, (side, side)),
        "weights": lambda: engine.conv_backward_weights(x, x, window, 1),
    }
    flops = 2 * images * side * side * channels * channels * 9
    return ", ".join(f"{name} {flops / _timed(engine, run) / 1e12:.1f}" for name, run in passes.items()) + " TFLOP/s"


def _timed(engine: Engine, run: Callable[[], Any]) -> float:
    """Seconds of the fastest of some runs, after one that compiles."""
    run()
    seconds = []
    for _ in range(TRIES):
        start = engine.mark()
        run()
        seconds.append(engine.elapsed(start, engine.mark()))
    return float(np.min(seconds))
