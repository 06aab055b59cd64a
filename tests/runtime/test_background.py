"""A thread looks at messages while a block runs, and has ended when the block has, whatever ended it."""

from __future__ import annotations

from threading import Event, active_count

import pytest

from lbpar.runtime.background import Background


def test_it_looks_until_the_block_ends() -> None:
    looked, before = Event(), active_count()
    with Background(looked.set):
        assert looked.wait(30)
    assert active_count() == before


def test_it_ends_with_a_block_that_fails() -> None:
    before = active_count()
    with pytest.raises(ZeroDivisionError), Background(lambda: None):
        raise ZeroDivisionError
    assert active_count() == before
