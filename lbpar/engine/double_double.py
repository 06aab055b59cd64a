"""Double-double arithmetic (Dekker 1971): a number as an unevaluated sum of two float64, good for 106 bits.

`kernels/rows.c` has the same in C, operation by operation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Value = Any  # float64, a number or an array


class Pair(NamedTuple):
    """``high + low``; after each operation low is below half a unit in the last place of high."""

    high: Value
    low: Value = 0.0


def add(a: Value, b: Value) -> Pair:
    """a + b, exactly."""
    s = a + b
    t = s - a
    return Pair(s, (a - (s - t)) + (b - t))


def plus(p: Pair, b: Value) -> Pair:
    """p + b."""
    s, e = add(p.high, b)
    return add(s, e + p.low)


def times(p: Pair, q: Pair) -> Pair:
    """p * q."""
    product = p.high * q.high
    x, y = leading(p.high, 26), leading(q.high, 26)
    u, v = p.high - x, q.high - y
    rest = ((x * y - product) + x * v + u * y) + u * v
    return add(product, rest + (p.high * q.low + p.low * q.high))


def leading(a: Value, bits: int) -> Value:
    """``a`` rounded to so many significant bits (Veltkamp's splitting)."""
    scaled = a * (2.0 ** (53 - bits) + 1)
    return scaled - (scaled - a)
