"""Random fields have the spectrum that their targets say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lbpar.data.__main__ import main
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.made.fields import _fields, make_volumes, parameters, spectrum
from lbpar.errors import DataError


@pytest.mark.parametrize("space", [(8, 9, 10), (9, 8, 7), (16, 15)])
def test_a_spectrum_sums_to_the_variance(space: tuple[int, ...]) -> None:
    power = spectrum(space, 0.5, -0.25, 0.8)
    whole = np.fft.fftn(np.fft.irfftn(power, s=space, axes=range(len(space)))).real  # with the modes that are left out
    np.testing.assert_allclose(whole.sum() / np.prod(space), np.exp(0.8), rtol=1e-12)
    assert power.flat[0] == 0 and (power.ravel()[1:] > 0).all()


def test_fields_have_the_power_that_their_parameters_say() -> None:
    shape, rows, key = (12, 10, 9, 2), np.arange(300), 5
    found, own = _fields(key, shape, rows), parameters(key, rows)
    assert found.dtype == np.float32 and np.abs(own).max() <= 1 and np.abs(own.mean(0)).max() < 0.1
    ratio = np.mean(
        [
            np.abs(np.fft.rfftn(field[..., c])) ** 2 / np.prod(shape[:-1]) / np.maximum(spectrum(shape[:-1], *p), 1e-30)
            for field, p in zip(found, own, strict=True)
            for c in range(2)
        ],
        axis=0,
    )
    low = np.ix_(
        *(np.flatnonzero(np.abs(np.fft.fftfreq(e)) < 0.3) for e in shape[:2]), range(3)
    )  # above, float32's rounding
    assert np.abs(np.delete(ratio[low].ravel(), 0) - 1).max() < 0.35  # 600 draws each: a deviation of 4 to 6 %
    assert abs(np.delete(ratio[low].ravel(), 0).mean() - 1) < 0.02
    assert abs(np.corrcoef(found[..., 0].ravel(), found[..., 1].ravel())[0, 1]) < 0.05
    np.testing.assert_array_equal(_fields(key, shape, rows[7:8])[0], found[7])  # made one by one


def test_a_file_of_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fields.h5"
    assert (
        main(
            [
                "make",
                "volumes",
                "--out",
                str(out),
                "--shape",
                "6",
                "5",
                "4",
                "1",
                "--samples",
                "3",
                "--test-samples",
                "2",
            ]
        )
        == 0
    )
    assert "/train: 3 samples 6 x 5 x 4 x 1" in capsys.readouterr().out
    train, test = (Hdf5Dataset(out, split) for split in ("train", "test"))
    assert train.classes is None and train.target_shape == (3,) and len(test) == 2
    assert not np.array_equal(train.read(np.arange(2)), test.read(np.arange(2)))
    with pytest.raises(DataError, match="make volumes: got 3 and 2 samples of shape"):
        make_volumes(out, (6, 3, 4, 1), 3, 2)
