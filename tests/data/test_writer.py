"""Writing is all or nothing, and nothing is lost."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from lbpar.data.__main__ import main
from lbpar.data.moments import channel_moments
from lbpar.data.new_file import check_room, new_file
from lbpar.data.pieces import Rows
from lbpar.data.writer import Split, _chunk, write
from lbpar.errors import DataError


def split(name: str, value: float) -> Split:
    return Split(name, np.full((2, 3), value), np.zeros(2, np.int64))


def held(path: Path) -> dict[str, float]:
    with h5py.File(path) as file:
        return {name: float(file[name]["x"][0, 0]) for name in file}


def test_an_interrupt_leaves_what_was_there(tmp_path) -> None:
    path = tmp_path / "a.h5"
    write(path, [split("train", 1)])
    before = path.read_bytes()

    def half() -> None:
        with new_file(path, ["train"]) as (file, _):
            file["x"] = np.zeros(3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    assert [p.name for p in tmp_path.iterdir()] == ["a.h5"]
    assert path.read_bytes() == before


def test_splits_are_added_and_replaced_only_on_request(tmp_path) -> None:
    path = tmp_path / "a.h5"
    write(path, [split("train", 1)])
    write(path, [split("test", 2), split("val", 3)])
    assert held(path) == {"train": 1, "test": 2, "val": 3}
    with pytest.raises(DataError, match="it exists and holds /test; `--overwrite`"):
        write(path, [split("extra", 9), split("test", 9)])
    assert held(path) == {"train": 1, "test": 2, "val": 3}
    write(path, [split("test", 4)], overwrite=True)
    assert held(path) == {"train": 1, "test": 4, "val": 3}
    with pytest.raises(DataError, match="it exists and holds /train, /val, /test|/test, /train, /val"):
        write(path, [split("", 9)])
    write(path, [split("", 5)], overwrite=True)
    with pytest.raises(DataError, match="it exists and holds /x, /y"):
        write(path, [split("train", 9)])
    write(path, [split("train", 6)], overwrite=True)
    assert held(path) == {"train": 6}


def test_only_datasets_are_replaced(tmp_path, monkeypatch) -> None:
    (tmp_path / "run.yaml").write_text("model: {}")
    for overwrite in (False, True):
        with pytest.raises(DataError, match="run.yaml: it exists and is no HDF5 file"):
            write(tmp_path / "run.yaml", [split("train", 1)], overwrite=overwrite)
    assert (tmp_path / "run.yaml").read_text() == "model: {}"
    with pytest.raises(DataError, match="/dev/null: it exists and is no"):
        write("/dev/null", [split("train", 1)], overwrite=True)
    (tmp_path / "link.h5").symlink_to("real.h5")
    write(tmp_path / "link.h5", [split("train", 1)])
    assert (tmp_path / "link.h5").is_symlink()
    assert held(tmp_path / "real.h5") == {"train": 1}


def test_refusals(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for here in (tmp_path, ".", "/"):
        with pytest.raises(DataError, match="it is a directory"):
            write(here, [])
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file" / "a.h5", "a\0b.h5", "a\ud800.h5", "a" * 5000, "a/" * 3000 + "b"):
        with pytest.raises(DataError, match="cannot write|cannot be the name"):
            write(bad, [split("train", 1)])
    with pytest.raises(DataError, match=r"'train': 'y' has the shape \(2,\), expected one entry per sample"):
        write(tmp_path / "a.h5", [Split("train", np.zeros((3, 1)), np.zeros(2))])
    huge = Split("train", Rows((10**15, 1), np.float64, np.zeros), Rows((10**15,), np.int64, np.zeros))
    with pytest.raises(DataError, match="it would take 16,000,000 GB, but .* are free"):
        write(tmp_path / "a.h5", [huge])
    for name in ("a/b", "..", "a\0", "a\ud800", "a\n"):
        with pytest.raises(DataError, match="got the split .*, expected a name without slashes"):
            write(tmp_path / "a.h5", [split(name, 1)])
    check_room(tmp_path / "no" / "such" / "a.h5", 1)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_make_refuses_as_well(tmp_path, capsys) -> None:
    out = tmp_path / "s.h5"
    small = ["make", "synthetic", "--shape", "2", "1", "--samples", "2", "--test-samples", "0", "--out"]
    assert main([*small, str(out)]) == 0
    (tmp_path / "run.yaml").write_text("model: {}")
    for bad in (str(out), str(tmp_path / "run.yaml"), ".", str(tmp_path / "a\udc80" / ("b" * 300))):
        assert main([*small, bad]) == 2
        assert capsys.readouterr().err.startswith("lbpar: error: ")
    assert main([*small, str(out), "--samples", str(10**15)]) == 2
    assert main([*small, str(tmp_path / "b.h5"), "--classes", str(10**30)]) == 2
    assert main(["make", "digits", "--size", "0", "--out", str(tmp_path / "b.h5")]) == 2
    assert main(["make", "digits", "--size", str(8 * 10**9), "--out", str(tmp_path / "b.h5")]) == 2
    assert main([*small, str(tmp_path / "b.h5"), "--samples", str(10**15)]) == 2
    assert "are free in" in capsys.readouterr().err
    assert main([*small, str(tmp_path / "n\u00e4me \u6570.h5")]) == 0


@pytest.mark.parametrize("limit", [1, 40, 100, 300])
@pytest.mark.parametrize("more", [[], ["--gzip", "--normalise"]])
def test_a_full_disk_ends_quietly(tmp_path, limit: int, more: list[str]) -> None:
    """A limit on the size of files stands for the disk; the whole process must end well, HDF5's last words included."""
    x = np.random.default_rng(0).integers(0, 256, (3, 200, 200, 3), np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(3))
    out = tmp_path / "out" / "a.h5"
    out.parent.mkdir()
    run = subprocess.run(
        [sys.executable, "-m", "lbpar.data", "convert", str(tmp_path / "a.npz"), "--out", str(out), *more],
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit << 10, limit << 10)),
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert run.returncode == 2, run.stderr
    assert run.stderr == f"lbpar: error: {out}: cannot write: File too large. Nothing was changed.\n"
    assert not list(out.parent.iterdir())


def test_chunks_hold_one_sample_at_most() -> None:
    assert _chunk((100, 28, 28, 1), 1) == (1, 28, 28, 1)
    big = _chunk((10, 512, 512, 512, 4), 4)
    assert big[0] == 1
    assert np.prod(big) * 4 <= 1 << 20


def test_channel_moments(monkeypatch) -> None:
    monkeypatch.setattr("lbpar.data.pieces._BYTES", 8 * 5 * 5 * 3 * 2)  # two samples at a time
    x = np.random.default_rng(0).integers(0, 256, (7, 5, 5, 3), np.uint8)
    x[..., 2] = 9
    mean, std = channel_moments(x, 1 / 255)
    np.testing.assert_allclose(mean, (x / 255).mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(std[:2], (x / 255).std(axis=(0, 1, 2))[:2], rtol=1e-9)
    assert std[2] == 1


@pytest.mark.parametrize("piece", [8, 1 << 24])
def test_large_offsets_do_no_harm(monkeypatch, piece: int) -> None:
    monkeypatch.setattr("lbpar.data.pieces._BYTES", piece)
    rng = np.random.default_rng(3)
    spread = np.array([0.5, 1e-9, 1e-3, 0])
    x = np.array([1e8, 1e-3, -1e10, 0.1]) + spread * rng.choice([-1.0, 1.0], (64, 9, 4))
    x[0] = 0, 1e-3, -1e10, 0.1  # a first sample unlike the others
    exact = x.astype(np.longdouble).reshape(-1, 4)
    mean, std = channel_moments(x)
    np.testing.assert_allclose(mean, exact.mean(axis=0).astype(float), rtol=1e-14)
    np.testing.assert_allclose(std[:3], exact.std(axis=0).astype(float)[:3], rtol=1e-6)
    assert std[3] == 1
    one = 1e8 + 0.499 * rng.choice([-1.0, 1.0], (300, 4, 1))
    assert channel_moments(one)[1] == pytest.approx(one.std(), rel=1e-9)


def test_moments_of_what_is_not_finite(monkeypatch) -> None:
    monkeypatch.setattr("lbpar.data.pieces._BYTES", 8)
    x = np.zeros((4, 2, 3), np.float32)
    x[2, 1, 1] = np.nan
    with pytest.raises(DataError, match="channel 1 of sample 2 holds values that are not finite"):
        channel_moments(x)
    mean, std = channel_moments(x[:1])
    assert mean.tolist() == [0, 0, 0]
    assert std.tolist() == [1, 1, 1]
