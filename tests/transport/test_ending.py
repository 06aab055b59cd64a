"""What is aborted before a failed job ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import NoReturn

from lbpar.transport.ending import Holder, abort_all, hold, unhold


class Held(Holder):
    def __init__(self, *aborts: Callable[[], object]) -> None:
        self._aborts = aborts

    def aborts(self) -> tuple[Callable[[], object], ...]:
        return self._aborts


def test_all_that_is_held_is_aborted_once() -> None:
    said: list[str] = []

    def fails() -> NoReturn:
        raise RuntimeError("it cannot be aborted")

    first, second = Held(fails, lambda: said.append("first")), Held(lambda: said.append("second"))
    gone, let_go = Held(lambda: said.append("gone")), Held(lambda: said.append("let go"))
    for held in (first, second, gone, let_go):
        hold(held)
    del held, gone
    gc.collect()
    unhold(let_go)
    assert abort_all()
    assert sorted(said) == ["first", "second"]
    assert abort_all()
    assert len(said) == 2


def test_one_that_waits_keeps_neither_the_others_nor_the_caller() -> None:
    others_ended, never = threading.Event(), threading.Event()
    ends = [Held(never.wait), Held(others_ended.set)]
    for end in ends:
        hold(end)
    assert not abort_all(0.05)
    assert others_ended.wait(60)
    never.set()


def test_one_abort_may_wait_for_another_of_the_same_holder() -> None:
    """As kernels of one communicator may lie behind those of another, in either order."""
    both = threading.Barrier(2)
    pair = Held(both.wait, both.wait)
    hold(pair)
    assert abort_all(60)
