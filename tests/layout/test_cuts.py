"""Cuts by number: what one pair is, many are."""

from __future__ import annotations

import numpy as np

from lbpar.graph.loops import Window
from lbpar.layout.cuts import Cuts, bits, by_value, pick
from lbpar.layout.grid import Grid
from lbpar.layout.layout import Dim


def test_plain_cuts_have_one_number_for_all_extents_and_ghosts_one_each() -> None:
    cuts = Cuts(Grid((2, 2)))
    assert cuts.number(Dim(8, (8,), ((1,),))) == cuts.number(Dim(12, (12,), ((1,),))) == cuts.of((1,))
    assert cuts.number(Dim.whole(5)) == 0 and cuts.dim(0, 7) == Dim.whole(7)
    near = [Dim(e, (e,), ((1,),), Window(3, pad=1)) for e in (8, 12)]
    assert cuts.number(near[0]) != cuts.number(near[1])
    assert cuts.plain(cuts.number(near[0])) == cuts.of((1,)) and cuts.ghosts(cuts.number(near[0]))
    assert cuts.dim(cuts.number(near[1]), 12) == near[1]


def test_pairs_say_what_leaves_and_what_comes() -> None:
    cuts = Cuts(Grid((2, 2, 2)))
    fine, coarse = cuts.of((2, 1)), cuts.of((2,))
    assert cuts.pair(fine, coarse) == (fine, bits((1,)), 0, False, False, False)
    assert cuts.pair(coarse, fine) == (fine, 0, bits((1,)), True, False, False)
    assert cuts.pair(coarse, coarse) == (coarse, 0, 0, False, False, False)
    assert cuts.pair(cuts.of((0,)), cuts.of((1,))) == (cuts.of((0,)), bits((0,)), bits((1,)), True, False, False)
    ghosts = cuts.number(Dim(8, (8,), ((2,),), Window(3, pad=1)))
    assert cuts.pair(coarse, ghosts).halo and cuts.pair(0, ghosts).sliced == ghosts
    first, last = (cuts.number(Dim.only((2,), k)) for k in range(2))
    assert cuts.pair(first, last) == (first, bits((2,)), bits((2,)), True, False, True)
    assert cuts.pair(last, 0) == (last, bits((2,)), 0, False, False, True)
    assert cuts.pair(0, last).sliced == last and cuts.dim(last, 1) == Dim.only((2,), 1)


def test_sums_are_scattered_at_once_where_the_rest_is_replicated() -> None:
    cuts = Cuts(Grid((2, 2, 2)))
    goal = cuts.of((2, 1))
    assert cuts.scattered(0, goal, bits((2,)), bits((1,))) == goal
    assert cuts.scattered(0, goal, bits((2,)), 0) == cuts.of((2,))
    assert cuts.scattered(cuts.of((0,)), goal, bits((2,)), 0) == cuts.of((0, 2))
    assert cuts.scattered(0, goal, 0, bits((1, 2))) == 0


def test_arrays_give_what_numbers_give() -> None:
    cuts, rng = Cuts(Grid((2, 2, 2, 2))), np.random.default_rng(0)
    all_of = [cuts.of(tuple(rng.permutation(4)[: rng.integers(5)].tolist())) for _ in range(40)]
    all_of += [cuts.number(Dim.only((a,), k)) for a in range(2) for k in range(2)]
    for _ in range(3):  # the tables grow on the way
        c, d = (rng.choice(all_of, 50) for _ in range(2))
        todo, free = rng.integers(0, 16, 50), rng.integers(0, 16, 50)
        many = cuts.pair(c, d)
        for i in range(50):
            assert tuple(x[i] for x in many) == cuts.pair(int(c[i]), int(d[i]))
        got = cuts.scattered(c, d, todo, free)
        want = [cuts.scattered(int(a), int(b), int(t), int(f)) for a, b, t, f in zip(c, d, todo, free, strict=True)]
        assert got.tolist() == want
        all_of += [cuts.of((int(a), 3)) for a in range(3)]


def test_small_things() -> None:
    assert bits((0, 2)) == 5 and pick(True, 1, 2) == 1
    assert pick(np.array([True, False]), 1, 2).tolist() == [1, 2]
    assert by_value(lambda a, b: 10 * a + b, np.array([1, 2, 1]), np.array([3, 4, 3])).tolist() == [13, 24, 13]
