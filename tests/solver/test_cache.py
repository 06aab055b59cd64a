"""Equal rows, maps and tables become one, and what was made from them is made once."""

from __future__ import annotations

import numpy as np

from lbpar.solver.cache import Cache, classify, relabel


def test_rows_of_one_class_are_equal_to_the_last_bit() -> None:
    rows = np.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [1.0, np.nextafter(2.0, 3.0)]])
    index, first = classify(rows)
    assert index.tolist() == [0, 1, 0, 2] and first.tolist() == [0, 1, 3]
    assert [a.size for a in classify(np.empty((3, 0)))] == [3, 1]


def test_labels_are_numbered_in_order_whether_few_or_many_are_possible() -> None:
    labels = np.array([7, 2, 7, 9])
    for bound in (10, 1 << 21):
        new, count = relabel(labels, bound)
        assert new.tolist() == [1, 0, 1, 2] and count == 3


def test_equal_content_becomes_one_object() -> None:
    cache, table = Cache(), np.arange(6.0).reshape(2, 3)
    assert cache.intern(table) is table and cache.intern(table.copy()) is table
    assert cache.intern(table.reshape(3, 2)) is not table
    one, same = (cache.classes(np.array([0, 1, 0]), 2) for _ in range(2))
    assert one is same
    assert cache.add(table[0], np.ones(2), one) is not cache.add(table[0], np.ones(2), one)
    unary, ones = table[0], np.ones(2)
    assert cache.add(unary, ones, one) is cache.add(unary, ones, one)


def test_maps_are_joined_into_their_coarsest_refinement() -> None:
    cache = Cache()
    a, b = cache.classes(np.array([0, 0, 1, 1]), 2), cache.classes(np.array([0, 1, 1, 1]), 2)
    joint, (of_a, of_b) = cache.joint(a, b)
    assert joint.index.tolist() == [0, 1, 2, 2]
    assert of_a[joint.index].tolist() == a.index.tolist() and of_b[joint.index].tolist() == b.index.tolist()
    assert cache.joint(a, a) == (a, ())


def test_the_first_of_the_cheapest_stands_for_its_class() -> None:
    cache = Cache()
    cost, best = cache.cheapest(np.array([3.0, 1.0, 1.0, 2.0]), cache.classes(np.array([1, 0, 0, 1]), 2))
    assert cost.tolist() == [1.0, 2.0] and best.tolist() == [1, 3]
