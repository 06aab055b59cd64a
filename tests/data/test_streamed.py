"""Volumes read by boxes, and statistics of pieces: equal to those of whole volumes, and no more of one is held than was asked for."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar.data.formats import volume_file
from lbpar.data.formats.volume_file import look_volume
from lbpar.data.rules import Rule
from lbpar.data.shared import explored
from lbpar.data.streamed import percentiles
from lbpar.data.volume_dataset import VolumeDataset
from lbpar.layout.grid import Grid
from lbpar.transport.virtual import VirtualWorld

nib = pytest.importorskip("nibabel")
RNG = np.random.default_rng(6)
TURNED = np.array([[0, -0.9, 0, 4], [0, 0.2, -1.1, 6], [2.5, 0, 0, -3], [0, 0, 0, 1.0]])
FLIPPED = np.diag([-1, 2, -3, 1.0])
RULES = [Rule("zscore"), Rule("zscore", nonzero=True), Rule("percentile", 2, 97.3), Rule("percentile", 0, 100, True)]


def canonical(path: Path) -> np.ndarray:
    """Nibabel's, (D, H, W, C)."""
    values = np.asanyarray(nib.as_closest_canonical(nib.load(path)).dataobj)
    return values.reshape(*values.shape[:3], -1)


@pytest.mark.parametrize("part", [1, 60, 1 << 20])
@pytest.mark.parametrize("name", ["v.nii", "v.nii.gz"])
@pytest.mark.parametrize("affine", [np.eye(4), TURNED, FLIPPED], ids=["straight", "turned", "flipped"])
@pytest.mark.parametrize("shape", [(7, 5, 6), (4, 7, 5, 3), (4, 5, 6, 1, 2)], ids=["one", "channels", "vectors"])
def test_a_box_is_that_of_the_whole_volume(
    shape: tuple[int, ...], affine: np.ndarray, name: str, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_file, "_PART", part)
    image = nib.Nifti1Image(RNG.integers(-500, 500, shape).astype(np.int16), affine)
    if part == 60:
        image.header.set_slope_inter(0.5, 3)
    nib.save(image, tmp_path / name)
    want, file = canonical(tmp_path / name), look_volume(tmp_path / name)
    np.testing.assert_array_equal(file.read(), want)
    d, h, w, _ = want.shape
    for spans in ([(1, 4), (0, h), (2, w - 1)], [(0, 1), (h - 1, h), (0, w)], [(d - 1, d), (2, 2), (0, w)]):
        np.testing.assert_array_equal(file.read(spans), want[tuple(slice(*s) for s in spans)])
    last = np.concatenate([p.ravel() for _, p in file.parts([(0, e) for e in want.shape[:3]], want.shape[3] - 1)])
    np.testing.assert_array_equal(np.sort(last), np.sort(want[..., -1].ravel()))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_statistics_of_pieces_are_those_of_the_whole(rule: Rule, dtype: Any) -> None:
    x = (RNG.standard_normal((40, 17, 2)) * [3, 1e4] + [1e3, -5]).astype(dtype)
    x[RNG.random(x.shape) < 0.3] = 0
    x[3, 3], x[:, :, 1][x[:, :, 1] > 2e4] = [np.nan, np.inf], -0.0

    def pieces(c: int) -> Iterator[np.ndarray]:
        return (x[i : i + 7, :, c] for i in range(0, 40, 7))

    np.testing.assert_allclose(
        rule.streamed(pieces, 2), rule.statistics(x), rtol=1e-6 if dtype == np.float32 else 1e-12
    )
    nothing = np.zeros((3, 1), dtype)
    np.testing.assert_array_equal(
        Rule(rule.name, rule.low, rule.high, True).streamed(lambda c: iter([nothing]), 1)[:, 0], [-np.inf, np.inf, 0, 1]
    )


@pytest.mark.parametrize("n", [1, 2, 5, 1000])
def test_percentiles_are_numpys(n: int) -> None:
    x = RNG.standard_normal(n) * 10.0 ** RNG.integers(-3, 4, n)
    x[: n // 3] = x[-1]  # many alike
    wanted = (0, 0.5, 33.3, 50, 99.5, 100)
    np.testing.assert_allclose(
        percentiles(lambda: iter(np.array_split(x, 3)), wanted), np.percentile(x, wanted), rtol=1e-12
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One volume that fills the network's input, and two that are padded."""
    for i, (shape, affine) in enumerate((((7, 5, 6), np.eye(4)), ((5, 4, 6), FLIPPED), ((6, 7, 4), TURNED))):
        nib.save(nib.Nifti1Image(RNG.integers(-500, 500, shape).astype(np.int16), affine), tmp_path / f"{i}.nii.gz")
    return tmp_path


def padded(folder: Path) -> np.ndarray:
    out = np.empty((3, 7, 5, 6, 1))
    for i, one in enumerate(out):
        values = canonical(folder / f"{i}.nii.gz")
        one[...] = values.min()
        one[tuple(map(slice, values.shape))] = values
    return out


@pytest.mark.parametrize("rule", [None, *RULES[:3], Rule("window", -100, 300)], ids=str)
def test_boxes_of_padded_volumes_with_their_statistics(rule: Rule | None, folder: Path) -> None:
    want = padded(folder)
    if rule is not None:
        for one in want:
            low, high, shift, factor = rule.statistics(one)
            one[...] = (np.clip(one, low, high) - shift) * factor

    def rank(transport: Any) -> np.ndarray:
        data = VolumeDataset(folder, (7, 5, 6), np.float64)
        data.normalisation = data.normalisation.ruled(rule, False)
        return explored(data, transport).read(np.array([2, 0, 1]), (((2, 4), (5, 7)), ((1, 5),), ((0, 6),), ((0, 1),)))

    for got in VirtualWorld(Grid.of(2)).run(rank):
        np.testing.assert_allclose(got, want[[2, 0, 1]][:, [2, 3, 5, 6], 1:], rtol=1e-5, atol=1e-6)


def test_each_rank_goes_through_its_share_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    streamed = VolumeDataset._pieces
    monkeypatch.setattr(VolumeDataset, "_pieces", lambda self, n, c: [seen.append(n), streamed(self, n, c)][1])

    def rank(transport: Any) -> None:
        data = explored(VolumeDataset(folder, (7, 5, 6), np.float64), transport)
        data.read(np.arange(3))

    VirtualWorld(Grid.of(3)).run(rank)
    assert sorted(seen) == [1, 2]  # those that are padded, once by all ranks together


@pytest.mark.parametrize("name", ["v.nii", "v.nii.gz", "v.npy"])
@pytest.mark.parametrize("rule", [None, Rule("zscore"), Rule("percentile", 1, 99)], ids=str)
def test_no_more_is_held_than_was_asked_for(
    rule: Rule | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_file, "_PART", 1 << 14)
    shape = (80, 96, 112)
    values = RNG.integers(0, 900, shape).astype(np.int16)
    if name == "v.npy":
        np.save(tmp_path / name, values)
    else:
        image = nib.Nifti1Image(values, FLIPPED)
        image.header.set_slope_inter(1.5, 0)  # as scanners store: whole numbers that stand for real ones
        nib.save(image, tmp_path / name)
    box = (((20, 30),), ((0, 96),), ((0, 112),), ((0, 1),))  # an eighth
    tracemalloc.start()
    try:
        data = VolumeDataset(tmp_path / name, shape, np.float32)
        data.normalisation = data.normalisation.ruled(rule, False)
        got = data.read(np.array([0]), box)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Its values as stored, one more time as they are changed, and pieces; a whole volume of 4 bytes is 3.4 MB, of 8 bytes 6.9.
    tables = 4 * 8 * (1 << 16) if rule is not None and rule.name == "percentile" else 0
    assert peak < 3 * got.nbytes + 1_500_000 + tables < 8 * values.size
    if rule is None:
        want = values if name == "v.npy" else canonical(tmp_path / name)[..., 0]
        np.testing.assert_array_equal(got[0, ..., 0], want[20:30])


def test_a_volume_that_is_read_by_windows_is_kept_if_it_is_small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []
    read = volume_file.VolumeFile.read
    monkeypatch.setattr(volume_file.VolumeFile, "read", lambda self, s=None: [reads.append(s), read(self, s)][1])
    for cache, whole in ((1000, 1), (100, 0)):
        data = VolumeDataset(folder, (3, 3, 3), np.float64, larger=True, cache=cache)
        assert [data.extents(n) for n in range(3)] == [(7, 5, 6), (5, 4, 6), (7, 4, 6)]
        reads.clear()
        for lo in range(4):
            got = data.read(np.array([0]), (((lo, lo + 3),), ((0, 3),), ((1, 4),), ((0, 1),)))
            np.testing.assert_array_equal(got[0], canonical(folder / "0.nii.gz")[lo : lo + 3, :3, 1:4])
        assert reads.count(None) == whole and len(reads) == (2 if whole else 4)
