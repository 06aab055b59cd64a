"""The least that convolutions must communicate (Chen, Demmel, Dinh, Haberle and Holtz, PASC 2022), whatever memory there is.

A process that does g of a convolution's multiply-adds reads i inputs, f weights and makes parts of o outputs. Two of the three say which
multiply-add it is, so that i f, f o and i o are at least g; and by the inequality of Hölder, Brascamp and Lieb g^2 <= i f o r, where r is, over the
dimensions of space, the product of taps over stride (at least 1): so often can a pair of an input and an output meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod


def least_elements(
    updates: float, arrays: Sequence[float], taps: Sequence[int], strides: Sequence[int], procs: int
) -> float:
    """Elements that at least one process must receive for a convolution whose work and arrays are shared evenly.

    Parameters
    ----------
    updates : float
        Multiply-adds of all processes.
    arrays : sequence of float
        Elements of inputs, weights and outputs; each process holds its share of them before.
    taps, strides : sequence of int
        Of the window, per dimension.
    procs : int
        Processes.
    """
    g = updates / procs
    reuse = prod(max(1.0, k / s) for k, s in zip(taps, strides, strict=True))
    touched = max(3 * (g * g / reuse) ** (1 / 3), 3 * g**0.5)
    return max(0.0, touched - sum(arrays) / procs)
