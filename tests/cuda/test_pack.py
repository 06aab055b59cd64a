"""kernels/pack.cu: boxes of any layout, in one launch, against NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lbpar.engine.cupy.names import GROUPS
from lbpar.engine.cupy.pieces import THREADS, Box, Launch, moves, rows, sums
from lbpar.engine.device import HOST
from tests.cuda.emulator import EmulationError, Emulator, compiler_found
from tests.cuda.kinds import KINDS, assert_close, normal, wide

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
NAMES = [name for group in GROUPS["pack.cu"] for name in group]
NAMES += [*(f"move_pieces<u32, i64, {n}>" for n in (1, 24)), "add_pieces<float, 1, i64, 1>"]


@pytest.fixture(scope="module")
def pack() -> Emulator:
    return Emulator("pack.cu", NAMES)


def box(to: np.ndarray, source: np.ndarray) -> Box:
    assert to.shape == source.shape
    return Box(to.ctypes.data, source.ctypes.data, to.shape, to.strides, source.strides)


def run(kernels: Emulator, launches: Sequence[Launch], names: set[str] | None = None) -> None:
    for name, grid, args in launches:
        kernels.launch(name, (grid,), (THREADS,), args)
        if names is not None:
            names.add(name)


CUTS: list[Any] = [
    np.s_[1:3, 2:7, 1:6, :, 0:5],
    np.s_[:, :, :, :, 4:8],
    np.s_[0:1, :, 3:4, ::2, 1:8:3],
    np.s_[2:2, :, :, :, :],
    np.s_[:, :, :, :, :],
    np.s_[:, -1:, 1:, :, :],
]


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("cut", CUTS)
def test_parts_go_to_a_buffer_and_back(pack: Emulator, dtype: type, cut: Any) -> None:
    a = np.arange(3 * 8 * 7 * 4 * 8, dtype=np.float64).reshape(3, 8, 7, 4, 8).astype(dtype)
    buffer = np.full(a[cut].shape, 99, dtype)
    run(pack, list(moves([box(buffer, a[cut])], a.itemsize)))
    np.testing.assert_array_equal(buffer, a[cut])
    back = np.zeros_like(a)
    run(pack, list(moves([box(back[cut], buffer)], a.itemsize)))
    expected = np.zeros_like(a)
    expected[cut] = a[cut]
    np.testing.assert_array_equal(back, expected)


@pytest.mark.parametrize(
    "dtype,channels,unit",
    [
        (np.float32, 8, "uint4"),
        (np.uint8, 7, "u8"),
        (np.float16, 7, "u16"),
        (np.float32, 7, "u32"),
        (np.float64, 7, "uint2"),
    ],
)
def test_all_pieces_of_a_move_in_one_launch(pack: Emulator, dtype: type, channels: int, unit: str) -> None:
    """The ghosts of a block's 26 neighbours: 24 pieces in a launch, units per alignment."""
    a = (50 * normal(0, (2, 6, 7, 8, channels))).astype(dtype)
    spans = (slice(0, 1), slice(1, -1), slice(-1, None))
    cuts = [(slice(None), x, y, z) for x in spans for y in spans for z in spans][:13]
    buffer = np.zeros(sum(a[c].size for c in cuts), a.dtype)
    boxes, at = [], 0
    for c in cuts:
        part = a[c]
        boxes.append(box(buffer[at : at + part.size].reshape(part.shape), part))
        at += part.size
    launches = list(moves(boxes, a.itemsize))
    assert [name for name, _, _ in launches] == [f"move_pieces<{unit}, i32, 24>"]
    run(pack, launches)
    np.testing.assert_array_equal(buffer, np.concatenate([a[c].reshape(-1) for c in cuts]))


def test_units_follow_alignment() -> None:
    a, b = np.zeros((6, 33), np.float16), np.zeros((6, 33), np.float16)
    a, b = a[:, :32], b[:, :32]
    assert a.ctypes.data % 16 == b.ctypes.data % 16 == 0
    assert next(moves([box(a[:1, :32], b[:1, :32])], 2))[0].startswith("move_pieces<uint4")
    assert next(moves([box(a[:1, 2:10], b[:1, 2:10])], 2))[0].startswith("move_pieces<u32")
    assert next(moves([box(a[:, :32], b[:, :32])], 2))[0].startswith("move_pieces<u16")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [np.s_[:, 1:4, :, 1:6], np.s_[:, 1:4]])
@pytest.mark.parametrize("pieces", [1, 2])
def test_sums(pack: Emulator, kind: str, cut: Any, pieces: int) -> None:
    """By elements, and by 16 bytes."""
    a, more = normal(1, (3, 5, 4, 8), kind), normal(2, (3, 5, 4, 8), kind)[cut].copy()
    expected = a.copy()
    expected[cut] += more
    parts = [slice(0, 3)] if pieces == 1 else [slice(0, 1), slice(1, 3)]
    run(pack, list(sums([box(a[cut][part], more[part]) for part in parts], kind, a.itemsize)))
    assert_close(a, expected, kind, 1)


ROWS = (np.array([4, 0, 0]), slice(1, 6, 2), np.array([2, 2, 5, 6]))


def listed(a: np.ndarray) -> list[np.ndarray]:
    return [
        np.array(range(*i.indices(n)) if isinstance(i, slice) else i, np.int64)
        for i, n in zip(ROWS, a.shape, strict=True)
    ]


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
def test_listed_rows(pack: Emulator, dtype: type) -> None:
    """As `Device.pack` with lists."""
    a = (50 * normal(3, (5, 6, 7))).astype(dtype)
    part, lists = HOST.pack(a, ROWS), listed(a)
    out = np.zeros_like(part)
    moved = Box(out.ctypes.data, a.ctypes.data, out.shape, out.strides, a.strides)
    run(pack, list(rows(moved, [i.ctypes.data for i in lists], False, None, a.itemsize)))
    np.testing.assert_array_equal(out, part)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_listed_rows(pack: Emulator, kind: str) -> None:
    """As `Device.unpack` with lists; rows that occur twice count twice."""
    a = normal(3, (5, 6, 7), kind)
    part, lists = HOST.pack(a, ROWS), listed(a)
    total, expected = a.copy(), wide(a)
    HOST.unpack(wide(part), expected, ROWS, accumulate=True)
    added = Box(total.ctypes.data, part.ctypes.data, part.shape, a.strides, part.strides)
    run(pack, list(rows(added, [i.ctypes.data for i in lists], True, kind, a.itemsize)))
    assert_close(total, expected, kind, 8)


def test_beyond_the_limit_of_32_bits() -> None:
    """With 1000 in the place of 2^31: the launch takes 64-bit indices, which hold; 32-bit ones would not."""
    pack = Emulator(
        "pack.cu",
        ["move_pieces<u32, i32, 1>", "move_pieces<u32, i64, 1>", "add_pieces<float, 1, i64, 1>"],
        defines={"EMULATED_INT_LIMIT": 1100},
    )
    a = normal(4, (5, 9, 31))
    out = np.zeros((5, 9, 30), np.float32)
    (launch,) = moves([box(out, a[:, :, :30])], 4, limit=1000)
    assert launch[0] == "move_pieces<u32, i64, 1>"
    run(pack, [launch])
    np.testing.assert_array_equal(out, a[:, :, :30])
    run(pack, list(sums([box(out, a[:, :, :30])], "float", 4, limit=1000)))
    np.testing.assert_array_equal(out, 2 * a[:, :, :30])
    (launch,) = moves([box(out, a[:, :, :30])], 4)
    with pytest.raises(EmulationError, match="32-bit arithmetic reached"):
        run(pack, [launch])
