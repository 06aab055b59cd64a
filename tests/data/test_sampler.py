"""The order of samples."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.data.sampler import Sampler, epoch_order


def test_order_is_a_fixed_permutation() -> None:
    order = epoch_order(1, 0, 1000)
    assert sorted(order) == list(range(1000))
    # A change of these numbers changes every training run.
    assert epoch_order(1, 0, 8).tolist() == [5, 1, 2, 4, 0, 6, 3, 7]
    assert not np.array_equal(order, epoch_order(1, 1, 1000))
    assert not np.array_equal(order, epoch_order(2, 0, 1000))
    assert len(epoch_order(1, 0, 0)) == 0


def test_every_place_is_as_likely() -> None:
    places = np.array([np.flatnonzero(epoch_order(5, e, 6) == 0)[0] for e in range(3000)])
    counts = np.bincount(places, minlength=6)
    assert ((counts - 500) ** 2 / 500).sum() < 20.5  # 0.1 % point for 5 degrees of freedom


@pytest.mark.parametrize(
    ("length", "batch", "drop", "sizes"),
    [(10, 4, False, [4, 4, 2]), (10, 4, True, [4, 4]), (8, 4, False, [4, 4]), (3, 4, False, [3]), (3, 4, True, [3])],
)
def test_batches(length: int, batch: int, drop: bool, sizes: list[int]) -> None:
    s = Sampler(length, batch, seed=3, drop_last=drop)
    batches = list(s.batches(2))
    assert [len(b) for b in batches] == sizes
    assert s.steps_per_epoch == len(sizes) and s.sizes() == sizes
    np.testing.assert_array_equal(np.concatenate(batches), epoch_order(3, 2, length)[: sum(sizes)])


def test_resume_goes_on_where_it_stopped() -> None:
    s = Sampler(10, 3, seed=4)
    everything = [b.tolist() for e in range(3) for b in s.batches(e)]
    epoch, start = s.position(6)
    assert (epoch, start) == (1, 2)
    rest = [b.tolist() for b in s.batches(epoch, start)] + [b.tolist() for b in s.batches(2)]
    assert rest == everything[6:]


def test_without_shuffling() -> None:
    assert [b.tolist() for b in Sampler(5, 2, shuffle=False).batches(7)] == [[0, 1], [2, 3], [4]]
