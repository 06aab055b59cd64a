"""Jobs of `lbpar.engine.cupy.launch_conv` on the emulation: arrays by name in, the same arrays written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from lbpar.engine.cupy.launch_conv import MATHS, Job
from tests.cuda.emulator import Emulator

DTYPES: dict[str, Any] = {name: np.dtype(name) for name in ("float32", "float64", "float16")}
DTYPES |= {"tf32": np.dtype("float32"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
assert set(DTYPES) == set(MATHS)

ARCHITECTURES = {
    "float16": (800, 700),
    "bfloat16": (800, 700),
    "tf32": (800, 700),
    "float32": (800,),
    "float64": (800,),
}
"""That an element type has kernels of its own for."""


def run(cases: Sequence[tuple[Job, Mapping[str, np.ndarray]]], **options: Any) -> None:
    """Run jobs; what they need is compiled together. Options: of `Emulator`, and ``order``."""
    order = options.pop("order", None)
    names: dict[str, dict[str, None]] = {}
    for job, _ in cases:
        for launch in job.launches:
            names.setdefault(launch.source, {})[launch.name] = None
    modules = {source: Emulator(source, list(wanted), **options) for source, wanted in names.items()}
    for job, arrays in cases:
        # garbage in the workspace, of exactly its size, so that the sanitizers see what is written behind it
        arrays = {**arrays, "workspace": np.full(job.workspace_bytes // 4, np.nan, np.float32)}
        for launch in job.launches:
            args = [arrays[name] if name else 0 for name in launch.arrays]
            modules[launch.source].launch(
                launch.name, launch.grid, launch.block, [*args, launch.sizes], launch.shared_bytes, order
            )


def integers(rng: np.random.Generator, shape: Sequence[int], dtype: Any, most: int = 2) -> np.ndarray:
    """Small integers: their products and sums are exact in every type."""
    return rng.integers(-most, most + 1, tuple(shape)).astype(dtype)
