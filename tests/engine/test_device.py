from __future__ import annotations

import numpy as np
import pytest

INDEX = {
    "slices": (slice(1, 3), slice(None), slice(0, 5, 2)),
    "columns": (slice(None), slice(None), slice(1, 3)),
    "seven columns": (slice(None), slice(None), slice(0, 7)),
    "one array": (slice(None), np.array([3, 0, 2]), slice(1, 4)),
    "array last": (slice(0, 2), slice(None), np.array([4, 1])),
    "two arrays": (np.array([2, 0]), slice(1, 3), np.array([0, 3, 4])),
    "all arrays": (np.array([1]), np.array([0, 3]), np.array([2, 1, 0])),
    "empty slice": (slice(1, 1), slice(None), slice(None)),
    "empty array": (slice(None), np.array([], dtype=np.int64), slice(None)),
}


def rows(index, shape):
    return [np.arange(n)[i] for i, n in zip(index, shape, strict=True)]


@pytest.mark.parametrize("index", INDEX.values(), ids=INDEX.keys())
def test_pack_and_unpack_select_outer_products(engine, dtype, index):
    a = np.arange(60, dtype=dtype).reshape(3, 4, 5)
    chosen = rows(index, a.shape)
    want = np.array([[[a[i, j, k] for k in chosen[2]] for j in chosen[1]] for i in chosen[0]], dtype=dtype)
    want = want.reshape([len(c) for c in chosen])
    packed = engine.pack(a, index)
    assert packed.flags.c_contiguous and not np.shares_memory(packed, a)
    np.testing.assert_array_equal(packed, want)

    stored, added = a.copy(), a.copy()
    engine.unpack(-packed.reshape(-1), stored, index)
    engine.unpack(packed, added, index, accumulate=True)
    for at in np.ndindex(*a.shape):
        hit = all(i in c for i, c in zip(at, chosen, strict=True))
        assert stored[at] == (-a[at] if hit else a[at])
        assert added[at] == (2 * a[at] if hit else a[at])


def test_accumulate_adds_repeated_rows(engine, dtype):
    a = np.zeros((3, 2), dtype=dtype)
    engine.unpack(np.ones((3, 2), dtype=dtype), a, (np.array([1, 1, 2]), slice(None)), accumulate=True)
    np.testing.assert_array_equal(a, [[0, 0], [2, 2], [1, 1]])


def test_pack_of_everything_is_a_copy(engine, dtype):
    a = np.arange(6, dtype=dtype).reshape(2, 3)
    packed = engine.pack(a, (slice(None), slice(None)))
    assert not np.shares_memory(packed, a)
    np.testing.assert_array_equal(packed, a)


def test_arrays_go_to_the_device_and_back(engine, dtype):
    a = np.arange(12, dtype=dtype).reshape(3, 4)
    np.testing.assert_array_equal(engine.to_host(engine.from_host(a.T)), a.T)
    assert engine.from_host(a.T).flags.c_contiguous
    made = engine.empty([2, 0, 3])
    assert made.shape == (2, 0, 3) and made.dtype == dtype
    assert engine.empty((2,), np.int64).dtype == np.int64


def test_pack_into_a_place(engine, dtype):
    a, flat = np.arange(60, dtype=dtype).reshape(3, 4, 5), np.zeros(40, dtype)
    for index in ((slice(None), slice(1, 3), slice(0, 5, 2)), (slice(None), slice(None), slice(1, 3))):
        want = a[index].reshape(-1)
        place = flat[7 : 7 + want.size]
        assert engine.pack(a, index, place) is place
        np.testing.assert_array_equal(place, want)
    assert not flat[:7].any() and not flat[31:].any()


def test_copies_and_zeros(engine, dtype):
    a = np.arange(12, dtype=dtype).reshape(3, 4)
    turned = engine.copy(a.T)
    assert turned.flags.c_contiguous and turned.dtype == dtype and not np.shares_memory(turned, a)
    np.testing.assert_array_equal(turned, a.T)
    assert engine.copy(a, np.float64).dtype == np.float64
    place = np.zeros((2, 3, 4), dtype)
    engine.copy(a, out=place[1])
    np.testing.assert_array_equal(place, [np.zeros((3, 4)), a])
    big = engine.empty((1 << 16,))  # of memory that is reused
    big.fill(1)
    del big
    zeros = engine.zeros((1 << 16,))
    assert zeros.dtype == dtype and not zeros.any()


def test_host_memory_needs_no_waiting_and_has_a_clock(engine):
    if engine.name == "cupy":
        pytest.skip("not host memory")
    assert engine.host and engine.record() is None
    engine.wait(None)
    engine.synchronize()
    start = engine.mark()
    assert engine.elapsed(start, engine.mark()) >= 0
    a = engine.zeros((3,))
    assert engine.fetch(a)() is engine.to_host(a)
