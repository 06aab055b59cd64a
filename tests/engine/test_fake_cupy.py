"""The stand-in for CuPy shows what a device would only sometimes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.util import fake_cupy
from tests.util.fake_cupy import cuda
from tests.util.fake_cupy.machine import Machine
from tests.util.fake_cupy.memory import ndarray


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return fake_cupy.install(monkeypatch)


def array(values: list[float], stream: cuda.Stream, pool: cuda.MemoryPool) -> ndarray:
    host = np.array(values, float)
    with stream:
        a = ndarray(host.shape, host.dtype, pool.malloc(host.nbytes))
    copy(a.data.ptr, host.ctypes.data, host.nbytes, 1, stream)
    return a


def copy(dst: int, src: int, nbytes: int, kind: int, stream: cuda.Stream) -> None:
    cuda.runtime.memcpyAsync(dst, src, nbytes, kind, stream.ptr)


def streams(n: int) -> list[cuda.Stream]:
    return [cuda.Stream(non_blocking=True) for _ in range(n)]


def test_every_name_is_one_of_cupy(machine: Machine) -> None:
    import cupy

    assert cupy is fake_cupy and cupy.cuda is cuda and cupy.cuda.runtime.getDeviceCount() == 1
    machine.missing = "driver"
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="InsufficientDriver"):
        cupy.cuda.Stream(non_blocking=True)


def test_arrays_stay_on_the_device(machine: Machine) -> None:
    (s,), pool = streams(1), cuda.MemoryPool()
    a = array([1, 2, 3, 4, 5, 6], s, pool)
    for use in (np.asarray, float, bool, list, len, lambda a: a + 1, lambda a: np.ones(6) * a):
        with pytest.raises(TypeError):
            use(a)
    b = a.reshape(2, 3)[1, 1:]
    assert (b.shape, b.data.ptr - a.data.ptr, b.view(np.int64).dtype) == ((2,), 32, np.int64)
    with pytest.raises(AssertionError, match="would copy"):
        a.reshape(2, 3)[:, 1:].reshape(-1)
    assert b.get(s).tolist() == [5, 6]
    with pytest.raises(AssertionError, match="default stream"):
        pool.malloc(8)


def test_addresses_are_pythons_integers(machine: Machine) -> None:
    """As for CuPy, whose functions are compiled."""
    (s,), pool, runtime = streams(1), cuda.MemoryPool(), cuda.runtime
    with s:
        a = pool.malloc(8)
    for integer in (np.int64, np.uint64):
        for ptr, stream in ((integer(a.ptr), s.ptr), (a.ptr, integer(s.ptr))):
            with pytest.raises(TypeError, match="an integer is required"):
                runtime.memsetAsync(ptr, 0, 8, stream)
            with pytest.raises(TypeError, match="an integer is required"):
                runtime.memcpyAsync(ptr, a.ptr, 8, runtime.memcpyDeviceToDevice, stream)
    runtime.memsetAsync(a.ptr, 0, np.int64(8), s.ptr)


def test_memory_holds_nothing_before_and_after(machine: Machine) -> None:
    (s,), pool = streams(1), cuda.MemoryPool()
    with s:
        a = ndarray((3,), float, pool.malloc(24))
        assert np.isnan(a.get(s)).all()
        a = array([1, 2, 3], s, pool)
        raw, used = a._raw, pool.used_bytes()
        s.synchronize()
        del a
        assert pool.used_bytes() == used - 512
        assert not np.isnan(raw).all()  # not yet: in the stream's order
        s.synchronize()
        assert np.isnan(raw).all()
        machine.memory = 2048
        with pytest.raises(cuda.memory.OutOfMemoryError):
            pool.malloc(4096)


def test_writes_behind_a_block_are_noticed(machine: Machine) -> None:
    (s,), pool = streams(1), cuda.MemoryPool()
    a = array([1, 2], s, pool)
    machine.find(a.data.ptr, 16)[0].data[20] = 7  # type: ignore[index]
    del a
    with pytest.raises(AssertionError, match="wrote behind a block of 16"):
        s.synchronize()
    b = array([1, 2], s, pool)
    with pytest.raises(cuda.runtime.CUDARuntimeError, match="beyond the end"):
        copy(b.data.ptr, b.data.ptr, 17, 3, s)


@pytest.mark.parametrize("waits", [True, False])
def test_other_streams_run_in_any_order_that_events_allow(machine: Machine, waits: bool) -> None:
    """A copy in a second stream, of what the first one writes."""
    (s, t), pool, seen = streams(2), cuda.MemoryPool(), set()
    for seed in range(8):
        machine.scheduler.seed(seed)
        a, b = array([1, 2], s, pool), array([3, 4], t, pool)
        if waits:
            t.wait_event(s.record())
        copy(b.data.ptr, a.data.ptr, 16, 3, t)
        seen.add(str(b.get(t)))
        s.synchronize()
    assert (seen == {"[1. 2.]"}) is waits


def test_events_happen_late_and_tell_their_time(machine: Machine) -> None:
    (s, t), pool = streams(2), cuda.MemoryPool()
    start, end = cuda.Event(), cuda.Event()
    start.record(s)
    array([1], s, pool)
    end.record(s)
    assert not end.done
    with pytest.raises(RuntimeError, match="NotReady"):
        cuda.get_elapsed_time(start, end)
    end.synchronize()
    assert end.done
    assert cuda.get_elapsed_time(start, end) > 0
    t.wait_event(end)
    after = t.record(cuda.Event(disable_timing=True))
    after.synchronize()
    with pytest.raises(RuntimeError, match="without times"):
        cuda.get_elapsed_time(start, after)


def test_pinned_memory_is_read_late_other_memory_at_once(machine: Machine) -> None:
    (s,), pool = streams(1), cuda.MemoryPool()
    with s:
        a, b = (ndarray((2,), float, pool.malloc(16)) for _ in range(2))
    held = cuda.alloc_pinned_memory(16)
    pinned, plain = np.frombuffer(held, float), np.ones(2)
    pinned[:] = 1
    copy(a.data.ptr, plain.ctypes.data, 16, 1, s)
    copy(b.data.ptr, pinned.ctypes.data, 16, 1, s)
    plain[:] = pinned[:] = 2
    assert (a.get(s).tolist(), b.get(s).tolist()) == ([1, 1], [2, 2])
    copy(b.data.ptr, pinned.ctypes.data, 16, 1, s)
    del pinned, held
    assert np.isnan(b.get(s)).all()  # let go before it was read


def test_collectives_start_when_all_members_have_come(machine: Machine) -> None:
    nccl, pool = cuda.nccl, cuda.MemoryPool()
    unique = nccl.get_unique_id()
    comms = [nccl.NcclCommunicator(4, unique, r) for r in range(4)]
    rows = [c.commSplit(r // 2, r) for r, c in enumerate(comms)]
    ss = streams(4)
    arrays = [array([r, 10.0 * r], s, pool) for r, s in enumerate(ss)]
    for r, (c, a) in enumerate(zip(rows, arrays, strict=True)):
        c.allReduce(a.data.ptr, a.data.ptr, 2, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, ss[r].ptr)
        if r == 2:
            with pytest.raises(RuntimeError, match="1 other ranks, which never come"):
                ss[2].synchronize()
    assert [a.get(s).tolist() for a, s in zip(arrays, ss, strict=True)] == [[1, 10]] * 2 + [[5, 50]] * 2
    wide = [array([np.nan] * 8, s, pool) for s in ss]
    for c, a, w, s in zip(comms, arrays, wide, ss, strict=True):
        c.allGather(a.data.ptr, w.data.ptr, 2, nccl.NCCL_FLOAT64, s.ptr)
        c.reduceScatter(w.data.ptr, a.data.ptr, 2, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, s.ptr)
    assert arrays[2].get(ss[2]).tolist() == [20, 200]
    comms[0].broadcast(arrays[0].data.ptr, arrays[0].data.ptr, 2, nccl.NCCL_FLOAT64, 1, ss[0].ptr)
    with pytest.raises(AssertionError, match="NCCL would hang"):
        comms[1].allGather(arrays[0].data.ptr, wide[0].data.ptr, 2, nccl.NCCL_FLOAT64, ss[0].ptr)
    comms[3].abort()
    with pytest.raises(nccl.NcclError):
        comms[2].check_async_error()


def test_messages_of_a_group_pass_side_by_side(machine: Machine) -> None:
    nccl, pool, ss = cuda.nccl, cuda.MemoryPool(), streams(3)
    unique = nccl.get_unique_id()
    comms = [nccl.NcclCommunicator(3, unique, r) for r in range(3)]
    mine = [array([r], s, pool) for r, s in enumerate(ss)]
    got = [array([-1, -1], s, pool) for s in ss]
    for r, (c, s) in enumerate(zip(comms, ss, strict=True)):
        nccl.groupStart()
        for i in (1, 2):
            c.send(mine[r].data.ptr, 1, nccl.NCCL_FLOAT64, (r + i) % 3, s.ptr)
            c.recv(got[r][i - 1 :].data.ptr, 1, nccl.NCCL_FLOAT64, (r + i) % 3, s.ptr)
        nccl.groupEnd()
    assert [g.get(s).tolist() for g, s in zip(got, ss, strict=True)] == [[1, 2], [2, 0], [0, 1]]
