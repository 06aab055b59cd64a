"""Element types of the kernels' tests."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

KINDS = {"float": np.float32, "double": np.float64, "__half": np.float16, "__nv_bfloat16": ml_dtypes.bfloat16}
"""Name in CUDA C++ to NumPy type."""

ALL_KINDS = ["float", "__nv_bfloat16", *(pytest.param(k, marks=pytest.mark.slow) for k in ("double", "__half"))]
"""Parameters of fixtures: those that differ in how they are stored and added up first."""

ROUNDING = {"float": 2.0**-24, "double": 2.0**-53, "__half": 2.0**-11, "__nv_bfloat16": 2.0**-8}
"""Largest relative error of rounding to a type."""


def normal(seed: int, shape: tuple[int, ...], kind: str = "float", scale: float = 1.0) -> np.ndarray:
    """Standard normal numbers of a type, the same in each run."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(KINDS[kind])


def wide(a: np.ndarray) -> np.ndarray:
    """float64 of any type."""
    return a.astype(np.float64)


def assert_close(
    actual: np.ndarray, expected: np.ndarray, kind: str, factor: float = 4.0, scale: float | None = None
) -> None:
    """Within ``factor`` roundings of the type (of arithmetic: float at best) relative to each value and to ``scale``."""
    unit = ROUNDING[kind]
    expected = wide(expected)
    atol = factor * unit * (float(np.abs(expected[np.isfinite(expected)]).max(initial=0)) if scale is None else scale)
    np.testing.assert_allclose(wide(actual), expected, rtol=factor * unit, atol=atol)
