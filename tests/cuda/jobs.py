"""Jobs of `lbpar.engine.cupy.tiles` on the emulation: arrays by name in, the same arrays written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from lbpar.engine.cupy.tiles import MATHS, Job
from tests.cuda.emulator import SANITIZE, Emulator

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


SHARED = ("float16", "float32")
"""Element types that most tests use: their usual kernels are compiled together, once for all tests."""


def _compiled_together(name: str) -> list[str]:
    """A name expression and the others of its file that differ in the pass, the transpositions or the copied vectors only."""
    kernel, _, rest = name.rstrip(">").partition("<")
    arguments = rest.split(", ")
    math = next((MATHS[m] for m in SHARED if MATHS[m].name == arguments[0]), None)
    if math is None or arguments[1:2] != ["i32"] or not kernel.startswith(("gemm", "conv_forward", "conv_backward")):
        return [name]
    head, tile = ", ".join(arguments[:2]), ", ".join(arguments[-6:-2])
    vectors = [f"{a}, {b}" for a in (1, 16 // math.element_bytes) for b in (1, 16 // math.element_bytes)]
    if kernel == "gemm":
        variants = [(kernel, f"{head}, {flags}") for flags in ("true, true", "true, false", "false, false")]
    else:
        variants = [(f"conv_{which}", head) for which in ("forward", "backward_data", "backward_weights")]
    return [name, *(f"{k}<{h}, {tile}, {v}>" for k, h in variants for v in vectors)]


def run(cases: Sequence[tuple[Job, Mapping[str, np.ndarray]]], order: int | None = None, **options: Any) -> None:
    """Run jobs; what they need is compiled together. Options: of `Emulator`."""
    if options.get("defines") == {"EMULATED_ARCH": 800}:  # the default
        del options["defines"]
    names: dict[str, dict[str, None]] = {}
    for job, _ in cases:
        for launch in job.launches:
            alone = options or SANITIZE in os.environ
            more = [launch.name] if alone else _compiled_together(launch.name)
            names.setdefault(launch.source, {}).update(dict.fromkeys(more))
    modules = {source: Emulator(source, sorted(wanted), **options) for source, wanted in names.items()}
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
