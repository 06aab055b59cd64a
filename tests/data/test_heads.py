"""Made data sets of segmentation: deformed heads from a folder like Debian's mricron-data, and pictures of cells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lbpar.data.__main__ import main
from lbpar.data.hdf5 import Hdf5Dataset

AFFINE = np.diag([-1.0, 1, 1, 1]) + np.array([[0, 0, 0, 9], [0, 0, 0, -12], [0, 0, 0, -7], [0, 0, 0, 0]])
TABLE = "1 Precentral_L 2001\n2 Hippocampus_R 4101\n3 Vermis_10 9170\n4 Elsewhere 1\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    nib = pytest.importorskip("nibabel")
    at = np.stack(np.meshgrid(*(np.arange(e) - e / 2 for e in (19, 21, 17)), indexing="ij"))
    far = (at**2).sum(0)
    head = np.where(far < 60, 200, 0) + np.where(far < 25, 50, 0)
    regions = np.where(far < 25, 1 + (at[2] > 0) + 2 * (at[1] > 0), 0)
    for name, values in (("ch2", head), ("ch2bet", head * (far < 25)), ("aal", regions)):
        nib.save(nib.Nifti1Image(values.astype(np.uint8), AFFINE), tmp_path / f"{name}.nii.gz")
    (tmp_path / "aal.nii.txt").write_text(TABLE)
    return tmp_path


def test_heads_differ_and_keep_their_labels(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "brain.h5"
    assert main(["make", "brain", "--source", str(folder), "--out", str(out), "--samples", "3"]) == 0
    assert "/test: 2 samples 19 x 21 x 17 x 1, uint8" in capsys.readouterr().out
    seen = []
    for split in ("train", "test"):
        data = Hdf5Dataset(out, split)
        x, y = data.read(np.arange(len(data))), data.read_targets(np.arange(len(data)))
        assert data.classes == 2 and data.class_names == ("background", "brain")
        for image, labels in zip(x[..., 0], y, strict=True):
            seen.append(image.tobytes())
            assert set(np.unique(labels)) == {0, 1} and 200 < labels.sum() < 1100
            assert image[labels == 1].mean() > image[labels == 0].mean() + 0.4  # labels moved along
        (affine,) = data.beside("affine")  # type: ignore[misc]
        np.testing.assert_array_equal(np.diag(affine[0]), 1)  # RAS+
    assert len(set(seen)) == 5


def test_regions_of_an_atlas_become_classes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "atlas.h5"
    command = ["make", "atlas", "--source", str(folder), "--out", str(out), "--samples", "1", "--test-samples", "0"]
    assert main(command) == 0
    data = Hdf5Dataset(out, "train")
    assert data.classes == 8
    assert set(np.unique(data.read_targets(np.array([0])))) == {
        0,
        1,
        2,
        7,
    }  # frontal, limbic, cerebellum; the fourth has no class
    assert main([*command, "--overwrite", "--shape", "9", "11", "8"]) == 0
    assert Hdf5Dataset(out, "train").sample_shape == (9, 11, 8, 1)
    (folder / "aal.nii.txt").write_text("one Precentral\n")
    assert main([*command, "--overwrite"]) == 2
    assert "cannot be read as lines of a number and a name" in capsys.readouterr().err
    (folder / "aal.nii.gz").unlink()
    assert main([*command, "--overwrite"]) == 2
    assert "no aal.nii.gz in" in capsys.readouterr().err


def test_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cells.h5"
    assert (
        main(["make", "cells", "--shape", "96", "80", "1", "--samples", "2", "--test-samples", "1", "--out", str(out)])
        == 0
    )
    train, test = Hdf5Dataset(out, "train"), Hdf5Dataset(out, "test")
    x, y = train.read(np.arange(2))[..., 0], train.read_targets(np.arange(2))
    assert 0.02 < y.mean() < 0.6 and x[y == 1].mean() > x[y == 0].mean() + 0.4
    assert not np.array_equal(y[0], y[1]) and not np.array_equal(y[0], test.read_targets(np.array([0]))[0])
    assert main(["make", "cells", "--shape", "8", "80", "1", "--out", str(out)]) == 2
    assert "expected at least one of H W 1" in capsys.readouterr().err
