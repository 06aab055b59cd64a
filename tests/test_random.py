from __future__ import annotations

import math

import numpy as np
import pytest

from lbpar.random import BLOCK, bits, fold, integers, normal, philox4x32, uniform, uniform32

# Known answers for philox4x32-10, published with the reference implementation (Random123): counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result):
    low, high = words(key)
    got = philox4x32(np.array(words(counter), dtype=np.uint64)[:, None], low | high << 32)
    assert got[:, 0].tolist() == words(result)


def test_bits_use_index_as_counter():
    index = np.array([[0, 5], [2**33 + 7, 2**62]])
    got = bits(0xA4093822299F31D0, index)
    assert got.dtype == np.uint64 and got.shape == (2, 2)
    for at in np.ndindex(2, 2):
        low, high = int(index[at]) & 0xFFFFFFFF, int(index[at]) >> 32
        counter = np.array([[low], [high], [0], [0]], dtype=np.uint64)
        first, second = philox4x32(counter, 0xA4093822299F31D0)[:2, 0].tolist()
        assert got[at] == first << 32 | second
    first, second = words(KNOWN[0][2])[:2]
    assert bits(0, 0) == first << 32 | second


@pytest.mark.parametrize("draw", [bits, uniform, uniform32, normal])
def test_numbers_depend_on_key_and_index_alone(draw):
    index = np.arange(3 * BLOCK + 5)
    whole = draw(7, index)
    some = np.random.default_rng(0).permutation(index)[: BLOCK + 1]
    np.testing.assert_array_equal(draw(7, some), whole[some])
    np.testing.assert_array_equal(draw(7, index[2:6]), whole[2:6])
    np.testing.assert_array_equal(draw(7, index[4:12].reshape(2, 4)), whole[4:12].reshape(2, 4, *whole.shape[1:]))
    np.testing.assert_array_equal(draw(7, 3), whole[3])
    assert draw(7, index[:0]).shape == (0, *whole.shape[1:])
    assert not np.array_equal(draw(8, index), whole)


@pytest.mark.parametrize("draw", [uniform, uniform32])
def test_uniform(draw):
    u = draw(fold(1, 2), np.arange(100_000))
    assert u.dtype == np.float64 and u.min() > 0 and u.max() < 1
    counts = np.bincount((u * 50).astype(int), minlength=50)
    chi_square = ((counts - 2000) ** 2 / 2000).sum()
    assert chi_square < 49 + 5 * math.sqrt(2 * 49)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5 / math.sqrt(len(u))


def test_uniform_never_reaches_its_ends():
    from lbpar.random import _open_interval

    ends = _open_interval(np.array([0, 2**32 - 1], dtype=np.uint64), np.array([0, 2**32 - 1], dtype=np.uint64))
    assert ends[0] > 0 and ends[1] < 1


def test_integers():
    whole = integers(fold(1, 4), np.arange(1000), 5)
    assert whole.dtype == np.int64 and set(whole.tolist()) == set(range(5))


def test_normal():
    z = normal(fold(1, 3), np.arange(100_000))
    assert abs(z.mean()) < 5 / math.sqrt(len(z))
    assert abs(z.var() - 1) < 5 * math.sqrt(2 / len(z))
    inside = (np.abs(z) < 1).mean()
    assert abs(inside - math.erf(1 / math.sqrt(2))) < 0.01


def test_fold():
    assert fold(5, 1, 2) == fold(fold(5, 1), 2)
    assert fold(5) == 5
    keys = {fold(s, a, b) for s in range(3) for a in range(4) for b in (-1, 0, 1, 2**40)}
    assert len(keys) == 3 * 4 * 4
    assert all(0 <= key < 2**64 for key in keys)
    # a sub-key is not a number that an index would draw
    number = int(bits(5, 1))
    assert fold(5, 1) not in (number, number >> 32 | (number & 0xFFFFFFFF) << 32)
    assert fold(np.int64(5), np.int64(1)) == fold(5, 1)
    assert isinstance(fold(np.int64(5)), int)
    assert uniform(np.int64(5), 1) == uniform(5, 1)
