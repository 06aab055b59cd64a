"""The emulation itself: it computes what a device would, and refuses what a device does not allow."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.cuda.emulator import EmulationError, Emulator, compiler_found, sanitized

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
PROBE = Path(__file__).parent / "emulation" / "probe.cu"
NAMES = {"float32": "float", "float64": "double", "float16": "__half", "bfloat16": "__nv_bfloat16"}
EXPRESSIONS = [f"double_all<{t}>" for t in NAMES.values()] + [
    "there_and_back<__half>", "there_and_back<__nv_bfloat16>",
    "sum_of<64>", "sum_of<128>", "reverse<true>", "reverse<false>", "through_shared<true>", "through_shared<false>",
    "barrier_left_out", "unwritten_shared", "votes", "by_index<i32>", "by_index<i64>", "struct_by_value",
]  # fmt: skip


@pytest.fixture(scope="module")
def probe() -> Emulator:
    return Emulator(PROBE, EXPRESSIONS)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("shape", [(1, 32), (3, 64), (7, 1)])
def test_grid_stride(probe: Emulator, dtype: str, shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).standard_normal(1001).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    y = np.zeros_like(x)
    probe.launch(f"double_all<{NAMES[dtype]}>", shape[:1], shape[1:], [y, x, np.int64(1001)])
    np.testing.assert_array_equal(y, 2 * x)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_types_round_as_numpy(probe: Emulator, dtype: type) -> None:
    """Every number of the type, the middles between them and what lies beside those."""
    with np.errstate(all="ignore"):
        numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
        middles = (numbers + np.roll(numbers, -1)) / 2
        x = np.concatenate([numbers, middles, np.nextafter(middles, np.inf), np.nextafter(middles, -np.inf)])
        expected = x.astype(dtype)
    y, back = np.zeros(x.size, dtype), np.zeros_like(x)
    name = f"there_and_back<{NAMES[np.dtype(dtype).name]}>"
    probe.launch(name, (x.size // 1024,), (1024,), [y, back, x, np.int64(x.size)])
    np.testing.assert_array_equal(back, expected.astype(np.float32))


@pytest.mark.parametrize("order", [0, 1, 5])
@pytest.mark.parametrize("threads", [64, 128])
def test_block_reduction(probe: Emulator, threads: int, order: int) -> None:
    x, y = np.arange(1000, dtype=np.float32), np.zeros(1, np.float32)
    probe.launch(f"sum_of<{threads}>", (1,), (threads,), [y, x, np.int64(1000)], order=order)
    assert y[0] == 999 * 500


@pytest.mark.parametrize("order", [0, 1, 5])
def test_shared_memory_and_barrier(probe: Emulator, order: int) -> None:
    x, y = np.arange(96, dtype=np.int32), np.zeros(96, np.int32)
    probe.launch("reverse<true>", (1,), (96,), [y, x], shared_bytes=4 * 96, order=order)
    np.testing.assert_array_equal(y, x[::-1])
    probe.launch("reverse<false>", (1,), (96,), [y, x], shared_bytes=4 * 96, order=order)
    assert (y != x[::-1]).any(), "a missing barrier shows"


def test_asynchronous_copies_happen_when_waited_for(probe: Emulator) -> None:
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    probe.launch("through_shared<true>", (1,), (32,), [y, x])
    np.testing.assert_array_equal(y, x[::-1])
    probe.launch("through_shared<false>", (1,), (32,), [y, x])
    assert np.isnan(y).any()


def test_unwritten_shared_memory_is_nan(probe: Emulator) -> None:
    y = np.zeros(32, np.float32)
    probe.launch("unwritten_shared", (1,), (32,), [y])
    assert np.isnan(y[31])


def test_barrier_left_out_is_an_error(probe: Emulator) -> None:
    y = np.zeros(64, np.int32)
    for _ in range(2):
        with pytest.raises(EmulationError, match="4 of 64 threads wait at the barrier"):
            probe.launch("barrier_left_out", (1,), (64,), [y])
    probe.launch("barrier_left_out", (1,), (4,), [y])
    np.testing.assert_array_equal(y[:5], [1, 1, 1, 1, 0])


def test_votes_and_shuffles(probe: Emulator) -> None:
    y = np.zeros(64, np.uint32)
    probe.launch("votes", (1,), (64,), [y])
    bits = sum(1 << i for i in range(0, 32, 3))
    np.testing.assert_array_equal(y, np.array([bits + min(i + 1, 31) for i in range(32)] * 2, np.uint32))


def test_small_limit_finds_narrow_arithmetic() -> None:
    probe = Emulator(PROBE, ["by_index<i32>", "by_index<i64>"], defines={"EMULATED_INT_LIMIT": 1000})
    y = np.zeros(30 * 40, np.float32)
    with pytest.raises(EmulationError, match="32-bit arithmetic reached 1200"):
        probe.launch("by_index<i32>", (3,), (64,), [y, np.int64(30), np.int64(40)])
    probe.launch("by_index<i64>", (3,), (64,), [y, np.int64(30), np.int64(40)])
    assert y.all()


def test_arguments_are_checked(probe: Emulator) -> None:
    y, sizes = np.zeros(10, np.int32), np.array((10, 3), np.dtype([("n", "i8"), ("step", "i4")], align=True))
    probe.launch("struct_by_value", (1,), (32,), [y, sizes])
    np.testing.assert_array_equal(y, np.arange(10) * 3)
    with pytest.raises(EmulationError, match="argument 1: 8 bytes, expected a value of 16 bytes"):
        probe.launch("struct_by_value", (1,), (32,), [y, np.int64(3)])
    with pytest.raises(EmulationError, match="takes 2 arguments, 1 were given"):
        probe.launch("struct_by_value", (1,), (32,), [y])
    with pytest.raises(EmulationError, match="no device takes"):
        probe.launch("struct_by_value", (1,), (2048,), [y, sizes])


def test_sanitizers_see_a_step_outside() -> None:
    """In a child process: one element too many written, and the same with room for it."""
    code = (
        "import sys, numpy as np; from tests.cuda.emulator import Emulator; n = int(sys.argv[1]);"
        f"Emulator({str(PROBE)!r}, ['double_all<float>', 'sum_of<64>'])"
        ".launch('double_all<float>', (2,), (64,), [np.zeros(n, 'f4'), np.ones(n, 'f4'), np.int64(1000)])"
    )
    assert (done := sanitized([sys.executable, "-c", code, "1000"])).returncode == 0, done.stderr
    done = sanitized([sys.executable, "-c", code, "999"])
    assert done.returncode and "heap-buffer-overflow" in done.stderr, done.stderr


def test_switches_of_the_c_library_do_as_well() -> None:
    """What other processors than x86-64 get."""
    module = Emulator(PROBE, ["sum_of<128>", "reverse<true>", "barrier_left_out"], defines={"EMULATED_SWITCH": 0})
    test_block_reduction(module, 128, 1)
    test_barrier_left_out_is_an_error(module)
