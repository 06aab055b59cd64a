"""Memory that a GPU lacks, because it is small or others use it. That is no fault of what is checked: it is tried with fewer samples, or left out."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

LITTLE = 1 << 30
"""Free bytes beside which the small networks always fit."""

_SAID = "does not fit the GPU", "out of memory", "OutOfMemory", "OUT_OF_MEMORY", "ALLOC_FAILED", "ALLOCATION_FAILED"
"""By us, CUDA and PyTorch, CuPy, the driver, and by cuBLAS and cuDNN, whose errors have no class of their own."""


def no_room(error: BaseException | None) -> bool:
    """Whether memory was missing, for this or for what raised it."""
    while error is not None:
        if isinstance(error, MemoryError) or says_no_room(f"{type(error).__name__} {error}"):
            return True
        error = error.__cause__
    return False


def says_no_room(text: str) -> bool:
    """Whether a program that ended with this had too little memory."""
    return any(said in text for said in _SAID)


def crowded() -> bool:
    """Whether so little of the GPU is free that even small networks may not fit. Where much is, they asked for too much."""
    try:
        from cupy.cuda import runtime

        return bool(runtime.memGetInfo()[0] < LITTLE)
    except Exception:  # noqa: BLE001  not even that can be asked for without memory
        return "cupy" in sys.modules


def left_out(error: object) -> dict[str, Any]:
    """What is found out without memory."""
    return {"found": f"left out: {(str(error).splitlines() or ['no memory'])[0]}", "left out": True}


def fitting(batch: int, run: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """What ``run`` finds with so many samples; where they do not fit, with half as many, and so on: then ``batch`` says how many."""
    asked = batch
    while True:
        try:
            found = run(batch)
        except Exception as error:
            if batch == 1 or not no_room(error):
                raise
        else:
            if batch == asked:
                return found
            return found | {"found": f"{found['found']}; batch {batch}, since {asked} did not fit", "batch": batch}
        gc.collect()  # of engines, which have the memory
        batch //= 2
