"""Double-double arithmetic against exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from lbpar.engine.double_double import Pair, add, leading, plus, times


def exact(p: Pair) -> Fraction:
    return Fraction(float(p.high)) + Fraction(float(p.low))


def pairs(count: int) -> list[tuple[Pair, Pair, np.float64]]:
    rng = np.random.default_rng(0)
    size = rng.standard_normal((count, 3)) * 10.0 ** rng.integers(-20, 20, (count, 3))
    low = rng.uniform(-0.5, 0.5, (count, 2)) * np.spacing(size[:, :2])
    return [(add(a, x), add(b, y), c) for (a, b, c), (x, y) in zip(size, low, strict=True)]


def test_sums_and_products_are_good_for_100_bits():
    for p, q, c in pairs(300):
        assert exact(add(p.high, c)) == Fraction(float(p.high)) + Fraction(float(c))
        for got, want in (
            (plus(p, c), exact(p) + Fraction(float(c))),
            (times(p, q), exact(p) * exact(q)),
            (times(p, Pair(12345678901.0)), exact(p) * 12345678901),
        ):
            assert abs(exact(got) - want) <= Fraction(2) ** -100 * abs(want)
            assert abs(got.low) <= np.spacing(abs(got.high))


def test_leading_bits_of_many_numbers_add_up_exactly():
    values = leading(np.random.default_rng(1).uniform(1, 4, 4096), 32)
    assert Fraction(float(values.sum())) == sum(map(Fraction, map(float, values)))
    assert np.abs(values - np.random.default_rng(1).uniform(1, 4, 4096)).max() <= 4 * 2.0**-32
