"""Synthetic samples: any box is the same part of the whole."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.config.data import DataConfig
from lbpar.data.open import open_dataset
from lbpar.data.synthetic import SyntheticDataset
from lbpar.errors import DataError
from lbpar.layout.runs import box_shape


@pytest.mark.parametrize("cache", [0, 10**8])
def test_any_box(cache: int) -> None:
    data = SyntheticDataset(100, (4, 5, 6, 2), (4, 5, 6), 3, dtype=np.float64, cache=cache)
    everything = data.read(np.arange(100))
    targets = data.read_targets(np.arange(100))
    box = (((0, 1), (2, 4)), ((1, 4),), ((0, 6),), ((1, 2),))
    samples = np.array([99, 3, 3, 0])
    got = data.read(samples, box)
    assert got.shape == (4, *box_shape(box))
    np.testing.assert_array_equal(got, everything[samples][:, [0, 2, 3], 1:4, :, 1:2])
    np.testing.assert_array_equal(data.read_targets(samples, box[:-1]), targets[samples][:, [0, 2, 3], 1:4])
    assert data.read(np.array([], int), box).shape == (0, 3, 3, 6, 1)
    assert (targets.min(), targets.max()) == (0, 2)
    assert abs(everything[:32].mean()) < 0.02
    assert abs(everything[:32].var() - 1) < 0.02
    assert not np.array_equal(everything[0], everything[1])


def test_cache_keeps_a_bounded_number() -> None:
    data = SyntheticDataset(100, (4, 4, 1), cache=32 * 16 * 4)
    data.read(np.arange(100))
    data.read(np.arange(100), (((0, 2),), ((0, 4),), ((0, 1),)))
    assert data._kept.cache_info().currsize == 32


def test_real_targets() -> None:
    y = SyntheticDataset(8, (3,), (5,), None).read_targets(np.arange(8))
    assert y.shape == (8, 5)
    assert y.dtype == np.float32
    assert 0 <= y.min() < y.max() < 1


def test_open() -> None:
    config = DataConfig(train="synthetic", test="synthetic", samples=7)
    train = open_dataset(config, "train", input_shape=(4, 4, 1), classes=10)
    test = open_dataset(config, "test", input_shape=(4, 4, 1), classes=10)
    assert len(train) == 7
    assert not np.array_equal(train.read(np.array([0])), test.read(np.array([0])))
    with pytest.raises(DataError, match="need the network's input shape"):
        open_dataset(config)
