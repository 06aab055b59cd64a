"""Predictions of volumes: the network's output where the input lies, in the order of its file, from any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lbpar import api
from lbpar.data.convert import convert
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.volume_dataset import VolumeDataset
from lbpar.errors import DataError
from lbpar.inference import predict
from lbpar.layout.grid import Grid
from lbpar.train import predict as parts
from lbpar.transport.base import Transport
from lbpar.transport.virtual import VirtualWorld

nib = pytest.importorskip("nibabel")
SHAPE = (7, 5, 6)
SLP = np.array([[0, -0.9, 0, 4], [0, 0.2, -1.1, 6], [2.5, 0, 0, -3], [0, 0, 0, 1.0]])
RUN: dict[str, Any] = {
    "model": {
        "input": [*SHAPE, 1],
        "layers": [
            {"op": "conv", "filters": 3, "kernel": 3, "pad": 1, "name": "conv1"},
            {"op": "relu"},
            {"op": "conv", "filters": 3, "kernel": 1, "name": "conv2"},
        ],
    },
    "train": {"batch": 2, "epochs": 1, "optimizer": {"name": "sgd", "lr": 0.1}},
    "parallel": {"strategy": "data"},
    "engine": {"name": "numpy", "dtype": "float64", "threads": 1},
    "run": {"progress": "none"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its volumes in `d` (two of them smaller, one of these turned) and as `d.h5`."""
    folder, rng = tmp_path_factory.mktemp("job"), np.random.default_rng(3)
    for name, shape, affine in (
        ("a", SHAPE, np.diag([1, 2, 3, 1.0])),
        ("b", (5, 4, 6), np.eye(4)),
        ("c", (6, 7, 4), SLP),  # 7 x 4 x 6 in RAS+
    ):
        for kind, values in (
            ("images", rng.integers(-500, 500, shape).astype(np.int16)),
            ("labels", rng.integers(0, 3, shape).astype(np.uint8)),
        ):
            (folder / "d" / kind).mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(values, affine), folder / "d" / kind / f"{name}.nii.gz")
    convert([folder / "d"], folder / "d.h5", pad=1, normalise=True)
    with h5py.File(folder / "d.h5") as file:
        assert file["x"].shape == (3, *SHAPE, 1)
    (folder / "run.yaml").write_text(str(RUN | {"data": {"train": str(folder / "d.h5")}}))
    api.train(api.load_run(folder / "run.yaml", [f"run.out={folder}/run"]), write=True).close()
    return folder


@pytest.fixture(scope="module")
def scores(trained: Path) -> np.ndarray:
    """Of the padded volumes in RAS+, whole."""
    with api.restore(trained / "run") as network:
        return network.predict(Hdf5Dataset(trained / "d.h5", y=None, dtype=np.float64))


def test_hdf5_says_where_predictions_lie(trained: Path, tmp_path: Path) -> None:
    """As the converted file does, whether that is predicted or the volumes themselves."""
    names = ("files", "size", "affine", "spacing")
    for i, source in enumerate(("d.h5", "d/images")):
        out = tmp_path / f"{i}.h5"
        assert predict(["--run", str(trained / "run"), "--input", str(trained / source), "--out", str(out)]) == 0
        with h5py.File(out) as got, h5py.File(trained / "d.h5") as own:
            assert set(got) == {"y", *names}
            for name in names:
                np.testing.assert_array_equal(got[name][...], own[name][...])


def check(file: Path, source: Path, expected: np.ndarray) -> None:
    """A NIfTI file lies where its source does, in the same order, and holds what is expected in RAS+."""
    got, own = nib.load(file), nib.load(source)
    assert got.shape[:3] == own.shape
    np.testing.assert_allclose(got.affine, own.affine, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got.header.get_zooms()[:3], own.header.get_zooms(), rtol=1e-6)
    values = np.asanyarray(nib.as_closest_canonical(got).dataobj)
    np.testing.assert_allclose(values, expected[tuple(map(slice, values.shape[:3]))], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("labels", [False, True])
def test_folder_to_folder(
    trained: Path, scores: np.ndarray, tmp_path: Path, labels: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--run", str(trained / "run"), "--input", str(trained / "d/images"), "--out", str(tmp_path / "out")]
    assert predict([*args, *(["--labels"] if labels else [])]) == 0
    kind = "7 x 5 x 6, uint8" if labels else "7 x 5 x 6 x 3, float64"
    assert f"3 volumes like {kind}, of step 2\n" in capsys.readouterr().out
    for name, expected in zip("abc", scores, strict=True):
        file = tmp_path / f"out/{name}.nii.gz"
        check(file, trained / f"d/images/{name}.nii.gz", expected.argmax(-1) if labels else expected)
        assert nib.load(file).get_data_dtype() == (np.uint8 if labels else np.float64)
    assert len(list((tmp_path / "out").iterdir())) == 3
    with pytest.raises(DataError, match="exists; --overwrite"):
        predict(args)


@pytest.mark.parametrize("suffix", ["nii", "nii.gz"])
def test_one_file_to_one_file(
    trained: Path, scores: np.ndarray, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = trained / "d/images/c.nii.gz", tmp_path / f"p.{suffix}"
    assert predict(["--run", str(trained / "run"), "--input", str(source), "--out", str(out)]) == 0
    assert (
        capsys.readouterr().out == f"{out}: 7 x 4 x 6 x 3, float64, of step 2\n"
    )  # the size of the file, not of what it was padded to
    check(out, source, scores[2])
    assert list(tmp_path.iterdir()) == [out]


def test_the_space_that_a_file_names_is_kept(trained: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "c.nii.gz", tmp_path / "p.nii.gz"
    upright = nib.as_closest_canonical(nib.load(trained / "d/images/c.nii.gz"))
    image = nib.Nifti1Image(upright.dataobj, np.diag([1.5, 2, 3, 1]))
    for q, s, kept in ((0, 4, 4), (1, 0, 1), (2, 3, 3)):
        image.set_qform(image.affine, q)
        image.set_sform(image.affine, s)
        nib.save(image, source)
        assert predict(["--run", str(trained / "run"), "--input", str(source), "--out", str(out), "--overwrite"]) == 0
        assert [int(nib.load(out).header[c]) for c in ("qform_code", "sform_code")] == [kept, kept]
    sheared = image.affine @ np.array([[1, 0.3, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    nib.save(nib.Nifti1Image(image.dataobj, sheared), source)
    assert predict(["--run", str(trained / "run"), "--input", str(source), "--out", str(out), "--overwrite"]) == 0
    assert nib.load(out).get_qform(coded=True)[1] == 0  # nothing else could be said with a quaternion
    np.testing.assert_allclose(nib.load(out).affine, sheared, atol=1e-4)


def test_raw_numbers_are_predicted_as_their_name_says(trained: Path, scores: np.ndarray, tmp_path: Path) -> None:
    values = nib.as_closest_canonical(nib.load(trained / "d/images/a.nii.gz")).get_fdata().astype("<i2")
    source, out = tmp_path / "in/a_6x5x7_int16.raw", tmp_path / "p.npy"
    source.parent.mkdir()
    source.write_bytes(values.tobytes())
    for given in (source, source.parent):
        assert predict(["--run", str(trained / "run"), "--input", str(given), "--out", str(out), "--overwrite"]) == 0
        np.testing.assert_allclose(np.load(out)[0], scores[0], rtol=1e-9, atol=1e-12)


def test_hdf5_to_each_form(trained: Path, scores: np.ndarray, tmp_path: Path) -> None:
    args = ["--run", str(trained / "run"), "--labels", "--input", str(trained / "d.h5"), "--out"]
    for name in ("p.h5", "p.npy", "p"):
        assert predict([*args, str(tmp_path / name)]) == 0
    with h5py.File(tmp_path / "p.h5") as file:
        np.testing.assert_allclose(file["y"][...], scores, rtol=1e-12)
        np.testing.assert_array_equal(file["labels"][...], scores.argmax(-1))
    np.testing.assert_array_equal(np.load(tmp_path / "p.npy"), scores.argmax(-1))
    got = nib.load(tmp_path / "p/c.nii.gz")  # in RAS+, as the file holds it, without what was padded
    np.testing.assert_array_equal(np.asanyarray(got.dataobj), scores[2].argmax(-1)[:, :4])
    canonical = nib.as_closest_canonical(nib.load(trained / "d/images/c.nii.gz"))
    np.testing.assert_allclose(got.affine, canonical.affine, atol=1e-6)


@pytest.mark.parametrize(
    ("ranks", "layers"),
    [
        (2, "{conv1: {D: 2}, relu1: {D: 2}, conv2: {D: 2}}"),
        (3, "{conv1: {H: 3}, relu1: {W: 3}, conv2: {D: 3}}"),
        (2, "{conv2: {F: 2}}"),
        (2, "{conv2: {C: 2}}"),
    ],
)
def test_ranks_send_parts(
    trained: Path, scores: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, layers: str
) -> None:
    monkeypatch.setattr(parts, "PART", 5 * 6 * 3 * 2)  # two slices
    seen: list[int] = []
    whole = parts.gather_part
    monkeypatch.setattr(parts, "gather_part", lambda *a: [seen.append(1), whole(*a)][1])

    def rank(transport: Transport) -> None:
        plan = [f"parallel={{strategy: data, layers: {layers}}}"]
        network = api.restore(trained / "run", overrides=plan, transport=transport)
        network.predict_to(tmp_path / "p", VolumeDataset(trained / "d/images", SHAPE, np.float64))

    VirtualWorld(Grid.of(ranks)).run(rank)
    assert len(seen) >= ranks * 3 * 4  # 7 slices of 3 volumes by two
    for name, expected in zip("abc", scores, strict=True):
        check(tmp_path / f"p/{name}.nii.gz", trained / f"d/images/{name}.nii.gz", expected)


@pytest.mark.parametrize("name", ["file/p.nii", "p.h5"])
def test_a_failure_is_one_of_all_ranks_and_leaves_nothing(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "file").write_text("")

    def full(sink: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lbpar.hdf5_file._Sink.check", full)

    def rank(transport: Transport) -> str:
        plan = ["parallel={strategy: data, layers: {conv1: {D: 2}}}"]
        network = api.restore(trained / "run", overrides=plan, transport=transport)
        with pytest.raises(DataError) as error:
            network.predict_to(tmp_path / name, VolumeDataset(trained / "d/images/a.nii.gz", SHAPE, np.float64))
        return str(error.value)

    told = VirtualWorld(Grid.of(2)).run(rank)
    assert len(set(told)) == 1 and "cannot" in told[0]
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("shape", "dtype", "out", "message"),
    [
        ((8, 5, 6), "int16", "p.nii", "got 8 x 5 x 6 voxels, expected 7 x 5 x 6 or fewer, the network's input"),
        (SHAPE, "uint8", "p.nii", "holds uint8 without a scale of its own, which counts as scaled by 0.0039"),
        ((*SHAPE, 2), "int16", "p.nii", "has samples of 2 channels, expected 1, as the network was trained with"),
    ],
)
def test_what_does_not_fit_is_refused(
    trained: Path, tmp_path: Path, shape: tuple[int, ...], dtype: str, out: str, message: str
) -> None:
    nib.save(nib.Nifti1Image(np.ones(shape, dtype), np.eye(4)), tmp_path / "a.nii")
    with pytest.raises(DataError, match=message):
        predict(["--run", str(trained / "run"), "--input", str(tmp_path / "a.nii"), "--out", str(tmp_path / out)])
    assert [p.name for p in tmp_path.iterdir()] == ["a.nii"]


def test_places_that_nifti_needs(trained: Path, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.ones((1, *SHAPE, 1), np.int16)
    args = ["--run", str(trained / "run"), "--out", str(tmp_path / "p.nii"), "--input"]
    with pytest.raises(DataError, match="it has no `affine`"):
        predict([*args, str(tmp_path / "x.h5")])
    with pytest.raises(DataError, match="got 3 volumes, expected one; give the name of a folder"):
        predict([*args, str(trained / "d.h5")])
