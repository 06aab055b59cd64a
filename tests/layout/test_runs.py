"""Index sets against Python sets, the block rule, and windows against their definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lbpar.graph.loops import Window
from lbpar.layout.runs import Runs, block, expand, indices, intersect, length, positions


def random_runs(rng: np.random.Generator, extent: int) -> Runs:
    """Sorted disjoint runs; neighbours may touch."""
    cuts = sorted(rng.choice(extent + 1, size=min(extent + 1, 2 * int(rng.integers(0, 4))), replace=False))
    if len(cuts) % 2:
        cuts = cuts[:-1]
    runs = [(int(a), int(b)) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
    if runs and runs[0][1] - runs[0][0] > 1 and rng.random() < 0.5:
        (lo, hi), *rest = runs
        runs = [(lo, lo + 1), (lo + 1, hi), *rest]
    return tuple(runs)


@pytest.mark.parametrize("extent", [0, 1, 2, 5, 12, 17])
@pytest.mark.parametrize("parts", range(1, 13))
def test_blocks_tile_a_range_and_the_first_are_one_larger(extent: int, parts: int) -> None:
    blocks = [block(3, 3 + extent, parts, i) for i in range(parts)]
    assert [i for lo, hi in blocks for i in range(lo, hi)] == list(range(3, 3 + extent))
    sizes = [hi - lo for lo, hi in blocks]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("seed", range(50))
def test_sets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = random_runs(rng, 20), random_runs(rng, 20)
    both = intersect(a, b)
    assert list(indices(both)) == sorted({*indices(a)} & {*indices(b)})
    assert length(a) == len(indices(a))
    held = indices(a)
    where = positions(both, a)
    np.testing.assert_array_equal(held[where], indices(both))
    if len(indices(both)) == length(a) or len(both) <= 1:
        assert isinstance(where, slice) or len(a) > 1


@pytest.mark.parametrize("seed", range(30))
def test_flat_indices_of_a_box(seed: int) -> None:
    rng = np.random.default_rng(seed)
    extents = [int(e) for e in rng.integers(1, 5, int(rng.integers(1, 5)))]
    parts = []
    for e in extents:
        lo = int(rng.integers(0, e + 1))
        parts.append((lo, int(rng.integers(lo, e + 1))))
    inside = itertools.product(*(range(lo, hi) for lo, hi in parts))
    want = sorted(int(np.ravel_multi_index(i, extents)) for i in inside)
    runs = expand(parts, extents)
    assert list(indices(runs)) == want
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(runs))


WINDOWS = list(itertools.product([1, 2, 3, 5], [1, 2, 3], [1, 2], [0, 1, 2, 4]))


@pytest.mark.parametrize(("kernel", "stride", "dilation", "pad"), WINDOWS)
def test_image_and_preimage_of_a_window(kernel: int, stride: int, dilation: int, pad: int) -> None:
    """Both are the hulls of the pairs (output, input) that the definition names; a stride may leave gaps inside."""
    extent, w = 11, Window(kernel, stride, dilation, pad)
    outputs = max(1, (extent + 2 * pad - w.reach - 1) // stride + 1)
    pairs = {
        (o, i) for o in range(outputs) for k in range(kernel) if 0 <= (i := o * stride + k * dilation - pad) < extent
    }
    for lo, hi in itertools.combinations_with_replacement(range(outputs + 1), 2):
        got = range(*w.image(lo, hi, extent))
        want = {i for o, i in pairs if lo <= o < hi}
        assert want <= set(got)
        if want and stride == dilation == 1 and all(any(o == q for q, _ in pairs) for o in (lo, hi - 1)):
            assert (min(want), max(want)) == (got[0], got[-1])
    for lo, hi in itertools.combinations_with_replacement(range(extent + 1), 2):
        got = range(*w.preimage(lo, hi, outputs))
        want = {o for o, i in pairs if lo <= i < hi}
        assert want <= set(got)
        assert len(got) <= len(want) + 2 * dilation + (hi - lo + w.reach) // stride + 1
