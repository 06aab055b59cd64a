"""kernels/activations.cu against the NumPy engine in float64."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.activations import ACTIVATIONS as TABLE
from lbpar.engine.cupy.names import ACTIVATIONS
from lbpar.engine.numpy_engine import NumpyEngine
from tests.cuda.emulator import Emulator, compiler_found
from tests.cuda.kinds import assert_close, normal, wide

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
ENGINE = NumpyEngine(np.float64)
OPTIONS = {"elu": 0.7, "softplus": 1.5, "hardsigmoid": 0.2}
FROM_Y = ("elu", "softplus", "hardsigmoid")


def names(kind: str) -> list[str]:
    return [f"activation_{way}<{kind}, {f}>" for f in ACTIVATIONS.values() for way in ("forward", "backward")]


@pytest.fixture(
    scope="module",
    params=["float", "__nv_bfloat16", *(pytest.param(k, marks=pytest.mark.slow) for k in ("double", "__half"))],
)
def kernels(request: pytest.FixtureRequest) -> tuple[str, Emulator]:
    return request.param, Emulator("activations.cu", names(request.param))


def test_every_activation_has_a_kernel() -> None:
    assert {name.removesuffix(" tanh") for name in ACTIVATIONS} == set(TABLE)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("n,at", [(1003, 0), (1000, 3), (5, 0), (0, 0)])
def test_functions_and_slopes(kernels: tuple[str, Emulator], name: str, n: int, at: int) -> None:
    """Also from addresses that allow no 16-byte steps; infinities and NaN included."""
    (kind, module), (op, _, tanh) = kernels, name.partition(" ")
    x, dy = normal(0, (n + at,), kind, 3)[at:], normal(1, (n,), kind)
    x[1:4] = [np.nan, np.inf, -np.inf][: max(0, min(3, n - 1))]
    options: tuple[float | str, ...] = ("tanh",) if tanh else ("none",) if op == "gelu" else ()
    options = (OPTIONS[op],) if op in OPTIONS else options
    y, dx, option = np.zeros_like(x), np.zeros_like(x), np.float64(OPTIONS.get(op, 0.0))
    with np.errstate(invalid="ignore", over="ignore"):
        module.launch(f"activation_forward<{kind}, {ACTIVATIONS[name]}>", (3,), (64,), [y, x, option, np.int64(n)])
        assert_close(y, ENGINE.activation_forward(op, wide(x), *options), kind, scale=4)
        kept = y if op in FROM_Y else x
        args = [dx, kept, dy, option, np.int64(n)]
        module.launch(f"activation_backward<{kind}, {ACTIVATIONS[name]}>", (2,), (64,), args)
        # 1 - tanh(...)^2 has lost digits, in either engine, before it is multiplied by x (1 + 3 c x^2).
        scale = 32 if tanh else 4
        assert_close(dx, ENGINE.activation_backward(op, wide(kept), wide(dy), *options), kind, scale=scale)
