"""`machine: auto`: the arithmetic and the memory of this machine, measured in about a second with NumPy.

Links are those of the shipped ``laptop``; a machine file measured on the cluster itself replaces both.
"""

from __future__ import annotations

from functools import lru_cache
from time import perf_counter

import numpy as np

from lbpar.config.machine_file import RateConfig
from lbpar.cost.machine import Machine, find_machine

#: Rows, columns, terms: from a tiny block to one at full speed.
SHAPES = ((16, 8, 16), (64, 16, 64), (256, 32, 144), (1024, 64, 288), (2048, 128, 576))
MATRIX_KERNELS = tuple(
    f"{op}_{pass_}"
    for op in ("conv", "conv_transpose", "linear")
    for pass_ in ("forward", "backward_data", "backward_weights")
)


@lru_cache(maxsize=1)
def measure(repeats: int = 3) -> Machine:
    """Measure matrix products and a copy; the best of ``repeats`` each."""
    base = find_machine("laptop").file
    rows = []
    for dtype in ("float32", "float64"):
        for m, n, k in SHAPES:
            a, b = np.ones((m, k), dtype), np.ones((k, n), dtype)
            rate = 2.0 * m * n * k / _best(lambda a=a, b=b: a @ b, repeats)
            rows += [RateConfig(kernel=name, m=m, n=n, k=k, dtype=dtype, rate=rate) for name in MATRIX_KERNELS]
    block = np.ones(1 << 22, np.float32)
    target = np.empty_like(block)
    speed = 2.0 * block.nbytes / _best(lambda: np.copyto(target, block), repeats)
    peak = {d: max(r.rate for r in rows if r.dtype == d) for d in ("float32", "float64")}
    compute = base.compute.model_copy(
        update={
            "peak": peak,
            "efficiency": 1.0,
            "memory_bandwidth": speed,
            "table": tuple(rows),
            "source": "measured: NumPy matrix products and a copy, just now",
        }
    )
    return Machine(base.model_copy(update={"name": "auto", "compute": compute}))


def _best(call: object, repeats: int) -> float:
    """Least seconds of one call, each sample at least 2 ms long."""
    assert callable(call)
    call()
    best, count = float("inf"), 1
    for _ in range(repeats):
        while True:
            start = perf_counter()
            for _ in range(count):
                call()
            spent = perf_counter() - start
            if spent > 2e-3:
                break
            count *= 2
        best = min(best, spent / count)
    return best
