from __future__ import annotations

import numpy as np
import pytest

from lbpar.errors import CommError
from lbpar.layout.grid import Grid
from lbpar.transport.base import Counter, Sent
from lbpar.transport.single import SingleTransport


def test_every_operation_returns_what_came_in() -> None:
    t = SingleTransport(Grid((1, 1)))
    x = np.arange(4.0)
    assert t.allreduce(x, (0, 1)).wait().tolist() == [0, 1, 2, 3]
    assert t.reduce_scatter(x, [4], (0,)).wait().tolist() == [0, 1, 2, 3]
    assert t.allgather(x, [4], (1,)).wait().tolist() == [0, 1, 2, 3]
    assert t.alltoall(x, [4], [4], ()).wait().tolist() == [0, 1, 2, 3]
    got = t.exchange({0: x}, {0: 4}, float, ()).wait()
    assert got[0].tolist() == [0, 1, 2, 3] and got[0] is not x
    assert t.exchange({}, {}, float, ()).wait() == {}
    assert t.exchange({}, {0: 0}, "float32", ()).wait()[0].dtype == np.float32
    assert t.bcast("a") == "a" and t.gather("a") == ["a"] and t.allgather_obj("a") == ["a"]
    t.barrier()
    assert t.counter.total() == Sent(0, 0)


def test_wrong_use_is_refused() -> None:
    t = SingleTransport()
    with pytest.raises(CommError, match="has 2 processes, expected 1"):
        SingleTransport(Grid.of(2))
    with pytest.raises(CommError, match="1-D contiguous"):
        t.allreduce(np.ones((2, 2)), ())
    with pytest.raises(CommError, match="expected 1 counts"):
        t.reduce_scatter(np.ones(2), [1, 1], ())
    with pytest.raises(CommError, match=r"names ranks \[1\]"):
        t.exchange({1: np.ones(1)}, {}, float, ())
    with pytest.raises(CommError, match="sends 2 elements to itself but expects 3"):
        t.exchange({0: np.ones(2)}, {0: 3}, float, ())


def test_counter_sums_by_kind_and_tag() -> None:
    c = Counter()
    c.add("allreduce", "a", 2, 16)
    c.add("allreduce", "b", 1, 4)
    c.add("exchange", "a", 3, 8)
    with c.paused():
        c.add("exchange", "a", 100, 100)
    assert c.by_tag() == {"a": Sent(5, 24), "b": Sent(1, 4)}
    assert c.total() == Sent(6, 28)
    c.reset()
    assert c.items() == {}
