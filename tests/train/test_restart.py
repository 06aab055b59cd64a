"""A run saved on three blocks per parameter and resumed on two equals the uninterrupted run."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.checkpoint.files import checkpoint_path, latest, open_checkpoint, write_checkpoint
from lbpar.runtime.optim.rules import SGD, AdamW

pytest.importorskip("h5py")

SHAPES = {"conv.weight": (7, 3, 6), "norm.weight": (7,)}
ROWS, TAPS = ((0, 7),), ((0, 3),)
THREE = {  # the last rank holds nothing
    "conv.weight": [(ROWS, TAPS, ((0, 1), (4, 6))), (ROWS, TAPS, ((1, 4),)), (ROWS, TAPS, ())],
    "norm.weight": [(ROWS,), ((),), ((),)],
}
TWO = {
    "conv.weight": [(((0, 3),), TAPS, ((0, 6),)), (((3, 7),), TAPS, ((0, 6),))],
    "norm.weight": [(((0, 4),),), (((4, 7),),)],
}


def cut(arrays, grid, rank):
    out = {}
    for name, a in arrays.items():
        index = [[i for lo, hi in runs for i in range(lo, hi)] for runs in grid[name][rank]]
        out[name] = a[np.ix_(*index)].copy()
    return out


@pytest.mark.parametrize("make", [lambda: SGD(0.1, momentum=0.9, weight_decay=0.01), lambda: AdamW(0.01)])
def test_restart_on_another_grid(make, tmp_path):
    rng = np.random.default_rng(0)
    start = {n: rng.standard_normal(s) for n, s in SHAPES.items()}
    grads = [{n: rng.standard_normal(s) for n, s in SHAPES.items()} for _ in range(20)]

    whole, optimizer = {n: p.copy() for n, p in start.items()}, make()
    for g in grads:
        optimizer.step(whole, g)

    ranks = [(make(), cut(start, THREE, r)) for r in range(3)]
    for g in grads[:8]:
        for r, (optimizer, params) in enumerate(ranks):
            optimizer.step(params, cut(g, THREE, r))
    tensors = {n: (s, "f8") for n, s in SHAPES.items()}
    tensors |= {f"{n}/{slot}": (s, "f8") for n, s in SHAPES.items() for slot in optimizer.slots}
    blocks = (
        (key, THREE[key.partition("/")[0]][r], array)
        for r, (optimizer, params) in enumerate(ranks)
        for key, array in {**params, **optimizer.state_dict()}.items()
    )
    write_checkpoint(checkpoint_path(tmp_path, 8), tensors, blocks, {"optimizer": optimizer.counters()})

    resumed = []
    for r in range(2):
        with open_checkpoint(latest(tmp_path)) as saved:
            read = {key: saved.read(key, TWO[key.partition("/")[0]][r]) for key in saved.tensors}
            optimizer = make()
            optimizer.load_state_dict({k: v for k, v in read.items() if "/" in k}, saved.meta["optimizer"])
        params = {n: read[n] for n in SHAPES}
        for g in grads[8:]:
            optimizer.step(params, cut(g, TWO, r))
        resumed.append(params)
    for r in range(2):
        for name, expected in cut(whole, TWO, r).items():
            np.testing.assert_array_equal(resumed[r][name], expected)
