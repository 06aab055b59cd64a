"""Reading ahead: same results, errors arrive, threads end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lbpar.data.prefetch import read_ahead


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("lbpar-prefetch")]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert not threads()


@pytest.mark.parametrize("depth", [0, 1, 2, 50])
@pytest.mark.parametrize("n", [0, 1, 7])
def test_order_and_number(depth: int, n: int) -> None:
    with read_ahead(lambda i: i * i, range(n), depth) as batches:
        assert list(batches) == [i * i for i in range(n)]


def test_none_and_exceptions_are_results_too() -> None:
    error = ValueError("a value, not raised")
    with read_ahead(lambda i: i, [None, error], 2) as batches:
        assert list(batches) == [None, error]


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_arrives_where_its_result_would(depth: int) -> None:
    def load(i: int) -> int:
        if i == 2:
            raise OSError("disk gone")
        return i

    got = []

    def consume() -> None:
        with read_ahead(load, range(5), depth) as batches:
            got.extend(batches)

    with pytest.raises(OSError, match="disk gone"):
        consume()
    assert got == [0, 1]


def test_an_error_of_the_items_arrives() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"), read_ahead(lambda i: i, items(), 2) as batches:
        list(batches)


def test_reads_ahead_but_not_further() -> None:
    loaded: list[int] = []
    third = threading.Event()

    def load(i: int) -> int:
        loaded.append(i)
        if i == 2:
            third.set()
        return i

    with read_ahead(load, range(100), depth=2) as batches:
        it = iter(batches)
        assert next(it) == 0
        assert third.wait(30), "two more are read while the first is used"
        assert len(loaded) <= 3
    assert len(loaded) == 3


def test_leaving_early_ends_the_thread() -> None:
    with read_ahead(lambda i: i, range(10**9), depth=2) as batches:
        for x in batches:
            if x == 3:
                break
    assert not threads()
