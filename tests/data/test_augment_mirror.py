"""Augmented samples: any box equals that part of the whole augmented sample, which a plain loop makes."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.config.augment import Augment
from lbpar.data.augment.apply import augmented
from lbpar.data.augment.mirror import Mirrored
from lbpar.data.synthetic import SyntheticDataset
from lbpar.errors import DataError
from lbpar.layout.runs import Box, box_shape, indices


def oracle(data: Mirrored, original: np.ndarray, n: int) -> np.ndarray:
    """Pad, crop, mirror one sample with NumPy's own routines; only the drawn numbers are shared."""
    (flips,), (shifts,) = data._draw(np.array([n]))
    pad, dims = data._pad, len(flips)
    out = np.pad(original, [(pad, pad)] * dims + [(0, 0)] * (original.ndim - dims))
    out = out[tuple(slice(pad + s, pad + s + e) for s, e in zip(shifts, original.shape, strict=False))]
    return np.flip(out, [d for d in range(dims) if flips[d]])


CASES = [
    ((6, 7, 2), Augment(flip=("W",), crop_pad=2)),
    ((6, 7, 2), Augment(flip=("H", "W"))),
    ((5, 4, 3, 1), Augment(flip=("D", "H", "W"), crop_pad=1)),
    ((9, 2), Augment(flip=("W",), crop_pad=3)),
    ((4, 4, 1), Augment(crop_pad=6)),
]


@pytest.mark.parametrize(("shape", "augment"), CASES, ids=str)
def test_boxes_of_the_whole(shape: tuple[int, ...], augment: Augment) -> None:
    source = SyntheticDataset(40, shape, shape[:-1], 5, dtype=np.float64, distinct=40)
    data = Mirrored(source, augment, seed=3, epoch=1)
    originals, labels = source.read(np.arange(40)), source.read_targets(np.arange(40))
    x = np.stack([oracle(data, originals[n], n) for n in range(40)])
    y = np.stack([oracle(data, labels[n], n) for n in range(40)])
    np.testing.assert_array_equal(data.read(np.arange(40)), x)
    rng = np.random.default_rng(1)
    for _ in range(10):
        box: Box = tuple((tuple(sorted(rng.integers(0, e + 1, 2).tolist())),) for e in shape)  # type: ignore[misc]
        samples = rng.integers(0, 40, 6)
        got = data.read(samples, box)
        assert got.shape == (6, *box_shape(box))
        np.testing.assert_array_equal(got, x[np.ix_(samples, *map(indices, box))])
        got = data.read_targets(samples, box[:-1])
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, y[np.ix_(samples, *map(indices, box[:-1]))])


@pytest.mark.parametrize(
    ("shape", "target", "moves"),
    [
        ((9, 2), (9,), False),  # a vector as long as the line
        ((9, 2), (9, 3), True),
        ((9, 2), (8, 3), False),
        ((6, 7, 2), (6, 7), False),  # a map of positions and channels of a network of lines
        ((6, 7, 2), (6, 7, 1), True),
        ((6, 7, 2), (6, 7, 3, 2), False),
        ((6, 7, 2), (), False),
        ((3, 6, 7, 2), (3, 6, 7, 1), True),
    ],
)
def test_real_targets_move_along_only_where_they_are_dense(
    shape: tuple[int, ...], target: tuple[int, ...], moves: bool
) -> None:
    source = SyntheticDataset(40, shape, target, None, dtype=np.float64, distinct=40)
    data = Mirrored(source, Augment(flip=("W",), crop_pad=1), seed=3, epoch=1)
    originals, samples = source.read_targets(np.arange(40)), np.arange(40)
    expected = np.stack([oracle(data, originals[n], n) for n in samples]) if moves else originals
    np.testing.assert_array_equal(data.read_targets(samples), expected)


def test_epochs_samples_and_seeds_differ() -> None:
    source = SyntheticDataset(64, (8, 8, 1))
    augment = Augment(flip=("W",), crop_pad=2)
    a = Mirrored(source, augment, seed=3, epoch=1)
    flips, shifts = a._draw(np.arange(64))
    assert 16 < flips[:, 1].sum() < 48
    assert not flips[:, 0].any()
    assert set(shifts.ravel().tolist()) == {-2, -1, 0, 1, 2}
    for other in (Mirrored(source, augment, 3, 2), Mirrored(source, augment, 4, 1)):
        assert not np.array_equal(other._draw(np.arange(64))[1], shifts)


def test_boxes_read_below_depend_on_flips_only() -> None:
    seen = set()

    class Spy(SyntheticDataset):
        def read(self, samples, box=None):  # type: ignore[no-untyped-def]
            seen.add(box)
            return super().read(samples, box)

    data = Mirrored(Spy(64, (8, 8, 1)), Augment(flip=("H", "W"), crop_pad=1), 0, 0)
    for start in range(0, 64, 8):
        data.read(np.arange(start, start + 8), (((0, 3),), ((0, 8),), ((0, 1),)))
    assert seen == {(((0, 4),), ((0, 8),), ((0, 1),)), (((4, 8),), ((0, 8),), ((0, 1),))}


def test_empty_and_vectors() -> None:
    data = Mirrored(SyntheticDataset(4, (8, 8, 1)), Augment(crop_pad=1), 0, 0)
    assert data.read(np.array([], int)).shape == (0, 8, 8, 1)
    assert data.read(np.array([1]), (((3, 3),), ((0, 8),), ((0, 1),))).shape == (1, 0, 8, 1)
    assert data.read_targets(np.array([1, 2])).shape == (2,)
    vectors = Mirrored(SyntheticDataset(4, (5,)), Augment(), 0, 0)
    np.testing.assert_array_equal(vectors.read(np.array([2])), SyntheticDataset(4, (5,)).read(np.array([2])))


def test_unknown_dimension() -> None:
    with pytest.raises(DataError, match="got 'D', expected a spatial dimension of the samples: H, W"):
        augmented(SyntheticDataset(4, (8, 8, 1)), Augment(flip=("D",)), 0, 0)
