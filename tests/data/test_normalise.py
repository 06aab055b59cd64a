"""Stored numbers become what a network is given, in the precision of their source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from lbpar.data.arrays import ArrayDataset
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.normalise import Normalisation
from lbpar.data.volume_dataset import VolumeDataset
from lbpar.errors import DataError

OWN = Normalisation(0.5, (1.0, 2.0), (4.0, 8.0), integers=True)


def test_scale_mean_and_deviation_per_channel() -> None:
    x = np.random.default_rng(1).integers(0, 256, (3, 4, 2), np.uint8)
    got = OWN(x, np.float64)
    np.testing.assert_allclose(got, (x * 0.5 - [1, 2]) / [4, 8], rtol=1e-15)
    np.testing.assert_array_equal(OWN(x[..., 1:], np.float64, [1]), got[..., 1:])
    assert OWN(x, np.float32).dtype == np.float32


def test_large_offsets_keep_their_small_differences() -> None:
    x = 1e5 + np.linspace(-0.01, 0.01, 101)[:, None]
    got = Normalisation(mean=(1e5,), std=(0.01,))(x, np.float32)
    np.testing.assert_allclose(got[:, 0], np.linspace(-1, 1, 101), atol=1e-7 * 1e3)
    assert len(np.unique(got)) == 101


def test_the_result_is_a_copy() -> None:
    x = np.ones((2, 3), np.float32)
    Normalisation()(x, np.float32)[...] = 5
    assert x.sum() == 6


def test_other_storage_keeps_its_scale() -> None:
    assert Normalisation(1 / 255, None, None, True).like(OWN) == Normalisation(1 / 255, OWN.mean, OWN.std, True)


@pytest.mark.parametrize(("dtype", "fits"), [(np.uint8, True), (np.int32, True), (np.float32, False)])
def test_whole_and_real_numbers_are_not_confused(dtype: type, fits: bool) -> None:
    x = np.zeros((1, 2), dtype)
    if fits:
        OWN.check_kind(x, "predict")
    with pytest.raises(DataError, match="expected real numbers" if fits else "got float32, expected whole numbers"):
        (Normalisation() if fits else OWN).check_kind(x, "predict")


def test_boxes_of_arrays() -> None:
    x = np.random.default_rng(1).integers(0, 256, (5, 4, 3, 2), np.uint8)
    data = ArrayDataset(x, OWN, np.float64)
    samples, box = np.array([4, 0]), (((1, 3),), ((0, 1), (2, 3)), ((1, 2),))
    np.testing.assert_array_equal(data.read(samples, box), OWN(x, np.float64)[samples][:, 1:3][:, :, [0, 2]][..., 1:])
    assert len(data) == 5 and data.sample_shape == (4, 3, 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_volumes_and_arrays_that_are_not_finite_are_refused_as_samples_of_files_are(bad: float, tmp_path: Path) -> None:
    x = np.ones((2, 4, 3, 5, 1), np.float32)
    x[1, 2, 1, 3, 0] = bad
    for i, one in enumerate(x):
        np.save(tmp_path / f"{i}.npy", one[..., 0])
    volumes = VolumeDataset(tmp_path, (4, 3, 5), np.float32)
    for data in volumes, ArrayDataset(x, Normalisation(), np.float32):
        np.testing.assert_array_equal(data.read(np.array([0])), x[:1])
        with pytest.raises(DataError, match=r"sample 1 has values that are not finite.*data\.nan: zero"):
            data.read(np.arange(2))
        data.normalisation = replace(data.normalisation, zero=True)
        np.testing.assert_array_equal(data.read(np.arange(2)), np.nan_to_num(x, nan=0, posinf=0))


def test_values_that_are_finite_but_too_large_for_the_network_are_refused(tmp_path: Path) -> None:
    x = np.ones((3, 4, 3, 5, 1))
    x[2, 0, 1, 3, 0] = 1e300
    for i, one in enumerate(x):
        np.save(tmp_path / f"{i}.npy", one[..., 0])
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["x"] = x
    for data in (
        VolumeDataset(tmp_path, (4, 3, 5), np.float32),
        ArrayDataset(x, Normalisation(), np.float32),
        Hdf5Dataset(tmp_path / "d.h5", "", y=None),
    ):
        np.testing.assert_array_equal(data.read(np.arange(2)), x[:2])
        with pytest.raises(DataError, match=r"sample 2 has values that are too large for float32.*float64"):
            data.read(np.arange(3))
    np.testing.assert_array_equal(ArrayDataset(x, Normalisation(), np.float64).read(np.arange(3)), x)
    np.testing.assert_allclose(
        ArrayDataset(x, Normalisation(scale=1e-290), np.float32).read(np.array([2]))[0, 0, 1, 3, 0], 1e10, rtol=1e-6
    )
