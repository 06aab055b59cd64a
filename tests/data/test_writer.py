"""Writing is all or nothing."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.data.writer import Split, _chunk, channel_moments, new_file, write
from lbpar.errors import DataError


def test_nothing_half_written(tmp_path) -> None:
    path = tmp_path / "a.h5"
    path.write_text("old")

    def half() -> None:
        with new_file(path) as f:
            f["x"] = np.zeros(3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    assert [p.name for p in tmp_path.iterdir()] == ["a.h5"]
    assert path.read_text() == "old"


def test_refusals(tmp_path) -> None:
    with pytest.raises(DataError, match="it is a directory"):
        write(tmp_path, [])
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        write(tmp_path / "file" / "a.h5", [])
    with pytest.raises(DataError, match="'train' has 3 samples and 2 targets"):
        write(tmp_path / "a.h5", [Split("train", np.zeros((3, 1)), np.zeros(2))])
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_chunks_hold_one_sample_at_most() -> None:
    assert _chunk((100, 28, 28, 1), 1) == (1, 28, 28, 1)
    big = _chunk((10, 512, 512, 512, 4), 4)
    assert big[0] == 1
    assert np.prod(big) * 4 <= 1 << 20


def test_channel_moments(monkeypatch) -> None:
    monkeypatch.setattr("lbpar.data.writer._PIECE", 8 * 5 * 5 * 3 * 2)  # two samples at a time
    x = np.random.default_rng(0).integers(0, 256, (7, 5, 5, 3), np.uint8)
    x[..., 2] = 9
    mean, std = channel_moments(x, 1 / 255)
    np.testing.assert_allclose(mean, (x / 255).mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(std[:2], (x / 255).std(axis=(0, 1, 2))[:2], rtol=1e-9)
    assert std[2] == 1
