"""Products of matrices by cuBLAS, through CuPy's binding of `cublasGemmEx`: linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lbpar.engine.cupy.kernels import address
from lbpar.engine.cupy.library import warn_once
from lbpar.engine.device import Array
from lbpar.errors import EngineError

if TYPE_CHECKING:
    from lbpar.engine.cupy.device import CupyDevice

# Numbers of NVIDIA's library_types.h and cublas_api.h.
TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
SUM_32, SUM_64, SUM_32_OF_TF32 = 68, 70, 77
PLAIN, TRANSPOSED = 0, 1
_NO_SUMS_IN_HALF_TYPES = 16
_ITS_OWN_CHOICE = -1

AMPERE = 80
"""First architecture with bfloat16."""

LONGEST = 2**31 - 1
"""Most rows and columns of a matrix."""


def load_cublas() -> Any:
    """CuPy's binding. ImportError, OSError or RuntimeError: the library is missing."""
    # Asked of the package, which first looks for the library where wheels put it; the module by its full name would not find it there.
    from cupy_backends.cuda.libs import cublas

    return cublas


class Blas:
    """cuBLAS on one device and stream.

    It chooses its kernels by itself, the same for the same shapes on cards of one kind. Float32 is multiplied as it is unless ``tf32`` allows
    TF32; sums are float32, also where it splits a product of half types in parts.

    Parameters
    ----------
    engine : CupyDevice
        Whose stream is used.
    cublas : module
        See `load_cublas`.
    tf32 : bool
    architecture : int
        The card's compute capability times ten.

    Raises
    ------
    EngineError
        In `multiply`: cuBLAS refuses, or finds no memory.
    """

    def __init__(self, engine: CupyDevice, cublas: Any, tf32: bool, architecture: int) -> None:
        self._engine, self._cublas, self._tf32 = engine, cublas, tf32
        self._modern = architecture >= AMPERE
        self._handle: int = cublas.create()
        cublas.setMathMode(self._handle, _NO_SUMS_IN_HALF_TYPES)
        self._factors = {n: np.array([0, 1], n) for n in ("float32", "float64")}

    def takes(self, *arrays: Array) -> bool:
        """Whether there is something to multiply, of a type that the card has in hardware, with sizes that can be counted."""
        known = self._modern or arrays[0].dtype.name != "bfloat16"
        return known and all(min(a.shape) > 0 and max(a.shape) <= LONGEST for a in arrays)

    def multiply(self, out: Array, a: Array, b: Array, of_a: int = PLAIN, of_b: int = PLAIN, add: bool = False) -> None:
        """``out = A·B``, or added to what is there: dense matrices of one type, ``a`` and ``b`` as they are or `TRANSPOSED`."""
        kind = out.dtype.name
        rounded = kind == "float32" and self._tf32
        sums = SUM_64 if kind == "float64" else SUM_32_OF_TF32 if rounded else SUM_32
        factors = self._factors["float64" if sums == SUM_64 else "float32"]
        zero, one = factors.ctypes.data, factors.ctypes.data + factors.itemsize
        (rows, columns), depth, of = out.shape, a.shape[0 if of_a else 1], TYPES[kind]
        try:
            with self._engine.stream:
                # It takes matrices by columns: what lies here by rows is transposed for it, and so outᵀ = Bᵀ·Aᵀ.
                self._cublas.gemmEx(
                    self._handle, of_b, of_a, columns, rows, depth,
                    one, address(b), of, b.shape[1], address(a), of, a.shape[1],
                    one if add else zero, address(out), of, columns, sums, _ITS_OWN_CHOICE,
                )  # fmt: skip
        except self._cublas.CUBLASError as error:
            raise EngineError(
                f"engine: cuBLAS cannot multiply {rows} x {depth} and {depth} x {columns} matrices of {kind} ({error}); where memory is short, "
                "use a smaller batch, else choose engine: {cudnn: false}, which leaves products to lbpar's own kernels."
            ) from error


def cublas_of(engine: CupyDevice, tf32: bool, architecture: int) -> Blas | None:
    """cuBLAS for an engine; None, with a word in the log, where it cannot be used."""
    try:
        return Blas(engine, load_cublas(), tf32, architecture)
    except (ImportError, OSError, RuntimeError) as error:
        warn_once(f"engine: lbpar's own kernels multiply matrices, because cuBLAS cannot be used ({error})")
        return None
