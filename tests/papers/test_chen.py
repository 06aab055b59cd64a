from __future__ import annotations

from itertools import product
from math import prod
from random import Random

import pytest

from lbpar.papers.chen import least_elements


def test_a_matrix_product_needs_what_is_known_of_matrix_products() -> None:
    """Irony, Toledo and Tiskin (2004): of n^3 multiply-adds a share of n^3 / P touches 3 (n^3 / P)^(2/3) elements."""
    n, p = 4096, 64
    assert least_elements(n**3, (n * n,) * 3, (1,), (1,), p) == pytest.approx(3 * (n**3 / p) ** (2 / 3) - 3 * n * n / p)
    assert least_elements(n**3, (n * n,) * 3, (1,), (1,), 1) == 0


def test_windows_let_inputs_be_used_again() -> None:
    n, p = 1 << 30, 64
    plain, windows, strided = (
        least_elements(n, (0, 0, 0), *w, p) for w in (((1, 1), (1, 1)), ((3, 3), (1, 1)), ((3, 3), (3, 3)))
    )
    assert windows == pytest.approx(plain / 9 ** (1 / 3)) and strided == plain
    assert least_elements(n, (0, 0, 0), (10_000,), (1,), p) == pytest.approx(3 * (n / p) ** 0.5)  # pairs say which


@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (3, 2), (2, 3)])
def test_no_part_of_a_convolution_touches_less(kernel: int, stride: int) -> None:
    """Random boxes and random sets of multiply-adds of a convolution in one dimension."""
    random = Random(kernel * 10 + stride)
    extents = {"n": 2, "f": 3, "c": 3, "x": 5, "k": kernel}
    space = list(product(*map(range, extents.values())))
    for trial in range(300):
        box = [sorted(random.choices(range(e + 1), k=2)) for e in extents.values()]
        part = [u for u in space if all(lo <= i < hi for i, (lo, hi) in zip(u, box, strict=True))]
        if trial % 2:
            part = random.sample(part, random.randint(0, len(part)))
        inputs = {(n, c, x * stride + k) for n, f, c, x, k in part}
        weights = {(f, c, k) for n, f, c, x, k in part}
        outputs = {(n, f, x) for n, f, c, x, k in part}
        touched = len(inputs) + len(weights) + len(outputs)
        assert prod(map(len, (inputs, weights, outputs))) * max(1, kernel / stride) >= len(part) ** 2 * (1 - 1e-9)
        assert touched >= least_elements(len(part), (0, 0, 0), (kernel,), (stride,), 1) * (1 - 1e-9)
