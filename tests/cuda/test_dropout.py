"""kernels/dropout.cu: the bits of the CPU, however the tensor is split."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.random import uniform32
from tests.cuda.emulator import EmulationError, Emulator, compiler_found
from tests.cuda.kinds import KINDS, assert_close, normal, wide

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
ENGINE = NumpyEngine(np.float64)
PLACES = np.dtype([("of", "u8", 5), ("extent", "i8", 5)])
KEY = 0xFEDCBA9876543210


@pytest.fixture(scope="module")
def dropout() -> Emulator:
    return Emulator("dropout.cu", [f"dropout<{t}, i32>" for t in KINDS] + ["dropout<float, i64>"])


def run(module: Emulator, name: str, x: np.ndarray, rate: float, index: Sequence[np.ndarray]) -> np.ndarray:
    y, places = np.full_like(x, 99), np.zeros((), PLACES)
    places["extent"] = [1] * (5 - x.ndim) + list(x.shape)
    places["of"][5 - x.ndim :] = [i.ctypes.data for i in index]
    module.launch(name, (3,), (64,), [y, x, np.float64(rate), np.uint64(KEY), 0, places])
    return y


def block(shape: Sequence[int], start: Sequence[int], whole: Sequence[int]) -> list[np.ndarray]:
    """Indices of a block of a tensor, per dimension."""
    steps = [int(np.prod(whole[d + 1 :], dtype=np.int64)) for d in range(len(whole))]
    return [(np.arange(n, dtype=np.int64) + s) * step for n, s, step in zip(shape, start, steps, strict=True)]


@pytest.mark.parametrize("rate", [0.0, 1e-12, 0.1, 0.5, 0.75, 1 - 2.0**-33, 1.0])
def test_same_bits_as_on_the_cpu(dropout: Emulator, rate: float) -> None:
    shape, whole = (3, 5, 4, 6), (9, 50, 1 << 20, 1 << 12)
    x, index = normal(0, shape), block(shape, (2, 40, 3, 2), whole)
    y = run(dropout, "dropout<float, i32>", x, rate, index)
    np.testing.assert_array_equal(y, ENGINE.dropout(x, rate, KEY, index))


def test_edge_of_the_rate(dropout: Emulator) -> None:
    """Rates beside the very numbers that are drawn."""
    index = [np.arange(8, dtype=np.int64)]
    x = np.ones(8, np.float32)

    for u in uniform32(KEY, index[0]):
        for rate in (u, np.nextafter(u, 0), np.nextafter(u, 1)):
            y = run(dropout, "dropout<float, i32>", x, float(rate), index)
            np.testing.assert_array_equal(y, ENGINE.dropout(x, float(rate), KEY, index))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(7, 9), (5, 8), (3, 1), (2, 2, 2, 3, 5), (11,), (4, 0), (0, 4)])
def test_shapes_and_types(dropout: Emulator, kind: str, shape: tuple[int, ...]) -> None:
    x, index = normal(0, shape, kind), block(shape, [1] * len(shape), [n + 3 for n in shape])
    if x.size:
        x.reshape(-1)[0] = np.nan
    y = run(dropout, f"dropout<{kind}, i32>", x, 0.4, index)
    expected = ENGINE.dropout(wide(x), 0.4, KEY, index)
    assert_close(y, expected, kind, 1.5)
    np.testing.assert_array_equal(y == 0, expected == 0)


def test_a_split_tensor_is_the_whole(dropout: Emulator) -> None:
    whole = (4, 6, 10)
    x = normal(0, whole)
    y = run(dropout, "dropout<float, i32>", x, 0.5, block(whole, (0, 0, 0), whole))
    part = np.ascontiguousarray(x[1:3, 2:, 3:8])
    cut = run(dropout, "dropout<float, i32>", part, 0.5, block(part.shape, (1, 2, 3), whole))
    np.testing.assert_array_equal(cut, y[1:3, 2:, 3:8])


def test_the_key_may_lie_on_the_device(dropout: Emulator) -> None:
    x, index = normal(0, (5, 6)), block((5, 6), (0, 0), (5, 6))
    y, places = np.full_like(x, 99), np.zeros((), PLACES)
    places["extent"], places["of"][3:] = [1, 1, 1, 5, 6], [i.ctypes.data for i in index]
    args = [y, x, np.float64(0.5), np.uint64(1), np.array([KEY], np.uint64), places]
    dropout.launch("dropout<float, i32>", (3,), (64,), args)
    np.testing.assert_array_equal(y, ENGINE.dropout(x, 0.5, KEY, index))


def test_beyond_the_limit_of_32_bits() -> None:
    module = Emulator(
        "dropout.cu", [f"dropout<float, {i}>" for i in ("i32", "i64")], defines={"EMULATED_INT_LIMIT": 1000}
    )
    shape = (300, 5, 6)
    x, index = normal(0, shape), block(shape, (0, 0, 0), shape)
    y = run(module, "dropout<float, i64>", x, 0.5, index)
    np.testing.assert_array_equal(y, ENGINE.dropout(x, 0.5, KEY, index))
    with pytest.raises(EmulationError, match="32-bit arithmetic"):
        run(module, "dropout<float, i32>", x, 0.5, index)
