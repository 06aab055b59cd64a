"""Norms of whole parameters from blocks."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.runtime.optim.norms import ReducedNorms
from lbpar.runtime.optim.rules import LAMB, LARS
from tests.util.optimizers import assert_same, problem, rates, run


class Lockstep:
    """Norms for virtual ranks: what each hands in is known beforehand, because all are stepped on copies first."""

    def __init__(self):
        self.sums: list[np.ndarray] = []
        self.total: np.ndarray | None = None

    def squared(self, names, squares):
        if self.total is None:
            self.sums.append(squares.copy())
            return squares
        return self.total


def cut(arrays, rank):
    """Block of virtual rank 0, 1, 2: the first dimension split unevenly, and one parameter with an empty block."""
    bounds = {5: [0, 2, 4, 5], 7: [0, 3, 7, 7]}
    return {n: a[slice(*bounds[a.shape[0]][rank : rank + 2])].copy() for n, a in arrays.items()}


@pytest.mark.parametrize(
    "make",
    [lambda: LARS(1.0, momentum=0.9, weight_decay=0.02, trust=0.1, eps=0.0), lambda: LAMB(1.0, weight_decay=0.02)],
)
def test_three_blocks_equal_the_whole(make):
    import copy

    params, grads = problem()
    whole = run(make(), params, grads, rates())
    ranks = [(make(), cut(params, r)) for r in range(3)]
    for lr, g in zip(rates(), grads, strict=True):
        norms = Lockstep()
        for r, (optimizer, block) in enumerate(ranks):  # dry run on copies collects the local sums
            copy.deepcopy(optimizer).step(copy.deepcopy(block), cut(g, r), float(lr), norms)
        norms.total = sum(norms.sums)
        for r, (optimizer, block) in enumerate(ranks):
            optimizer.step(block, cut(g, r), float(lr), norms)
    joined = {n: np.concatenate([block[n] for _, block in ranks]) for n in params}
    assert_same(joined, whole, rtol=1e-10)


def test_reduced_norms_count_each_block_once_in_one_reduction():
    names, local = ["split", "copied"], np.array([[1.0, 2.0], [3.0, 4.0]])
    other = np.array([10.0, 20.0, 0.0, 0.0])  # the other rank owns a block of "split" only
    calls = []

    def reduce(buffer):
        calls.append(buffer.copy())
        return buffer + other

    total = ReducedNorms(reduce, {"split", "copied"}, NumpyEngine()).squared(names, local)
    assert len(calls) == 1
    np.testing.assert_array_equal(total, [[11.0, 22.0], [3.0, 4.0]])
    lone = ReducedNorms(reduce, {"split"}, NumpyEngine()).squared(names, np.array([[1.0, 2.0], [np.nan, 4.0]]))
    np.testing.assert_array_equal(lone, [[11.0, 22.0], [0.0, 0.0]])
