"""A stand-in for CuPy's binding of cuBLAS beside that for CuPy: `gemmEx`, computed by NumPy from what it was told, late, in the current stream."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

from tests.util.fake_cudnn import _tf32
from tests.util.fake_cupy.runtime import _span
from tests.util.fake_cupy.streams import current

executed: list[str] = []
"""Types that products ran in."""

_DTYPES = {0: np.dtype("f4"), 1: np.dtype("f8"), 2: np.dtype("f2"), 14: np.dtype(ml_dtypes.bfloat16)}
_SUMS = {68: np.dtype("f4"), 70: np.dtype("f8"), 77: np.dtype("f4")}
_modes: dict[int, int] = {}


class CUBLASError(RuntimeError):
    """As in the package."""


def create() -> int:
    _modes[len(_modes) + 1] = 0
    return len(_modes)


def getVersion(handle: int) -> int:
    assert handle in _modes
    return 120900


def setMathMode(handle: int, mode: int) -> None:
    assert handle in _modes
    _modes[handle] = mode


def _scalar(pointer: int, kind: np.dtype[Any]) -> float:
    """It lies on the host, and is read before the call returns."""
    return float(np.frombuffer((ctypes.c_ubyte * kind.itemsize).from_address(pointer), kind)[0])


def gemmEx(
    handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, A: int, Atype: int, lda: int,
    B: int, Btype: int, ldb: int, beta: int, C: int, Ctype: int, ldc: int, computeType: int, algo: int,
) -> None:  # fmt: skip
    """``C = alpha * op(A)·op(B) + beta * C``, all matrices by columns."""
    assert all(type(v) is int for v in (handle, transa, transb, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc)), (
        "its Cython signature takes no other integers"
    )
    of, sums, mode = _DTYPES[Ctype], _SUMS[computeType], _modes[handle]
    shapes = {"A": (k, m) if transa else (m, k), "B": (n, k) if transb else (k, n), "C": (m, n)}
    leads = {"A": lda, "B": ldb, "C": ldc}
    if min(m, n, k) < 1 or Atype != Ctype or Btype != Ctype or (computeType == 70) != (Ctype == 1):
        raise CUBLASError("CUBLAS_STATUS_INVALID_VALUE")
    if any(lead < shapes[name][0] for name, lead in leads.items()):
        raise CUBLASError("CUBLAS_STATUS_INVALID_VALUE")
    factor, kept = _scalar(alpha, sums), _scalar(beta, sums)
    raws = {}
    for name, at in (("A", A), ("B", B), ("C", C)):
        (rows, columns), lead = shapes[name], leads[name]
        span = _span(at, ((columns - 1) * lead + rows) * of.itemsize, "device")
        assert span is not None
        raws[name] = np.lib.stride_tricks.as_strided(span.view(of), (rows, columns), (of.itemsize, lead * of.itemsize))

    def work() -> None:
        a, b = (raws[name].astype(np.float64) for name in "AB")
        if computeType == 77:
            a, b = _tf32(a).astype(np.float64), _tf32(b).astype(np.float64)
        total = (a.T if transa else a) @ (b.T if transb else b)
        if of.itemsize == 2 and not mode & 16:  # parts of a sum in the half type
            total = total.astype(of).astype(np.float64)
            total *= 1 + 2.0**-6
        before = kept * raws["C"].astype(np.float64) if kept else 0.0  # what is not added is not read
        raws["C"][...] = (factor * total + before).astype(sums).astype(of)
        executed.append(of.name)

    current().queue.put(work)
