"""Pieces cover an array once, in order, and are as small as asked for."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.data.pieces import Rows, cuts, pieces


@pytest.mark.parametrize("shape", [(7,), (7, 5), (7, 5, 4, 3), (1, 100, 2), (3, 0, 2), (0, 4)])
@pytest.mark.parametrize("most", [1, 6, 24, 10**6])
def test_cuts(shape: tuple[int, ...], most: int) -> None:
    seen = np.zeros(shape, int)
    order = np.arange(seen.size).reshape(shape)
    last = -1
    for where in cuts(shape, most):
        seen[where] += 1
        assert seen[where].size <= max(most, int(np.prod(shape[2:])))
        if seen[where].size:
            assert order[where].min() == last + 1
            last = order[where].max()
    assert (seen == 1).all()


@pytest.mark.parametrize("room", [8, 400, 10**6])
def test_pieces_of_arrays_and_of_what_is_made(monkeypatch, room: int) -> None:
    monkeypatch.setattr("lbpar.data.pieces._BYTES", room)
    a = np.arange(7 * 5 * 3, dtype=np.float32).reshape(7, 5, 3)
    asked = []

    def read(rows: np.ndarray) -> np.ndarray:
        asked.extend(rows.tolist())
        return a[rows]

    for source in (a, Rows(a.shape, a.dtype, read)):
        out = np.zeros_like(a)
        for where, part in pieces(source, 8):
            out[where] = part
        np.testing.assert_array_equal(out, a)
    assert asked == list(range(7)), "every sample is made once"
