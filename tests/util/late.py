"""A device that shows what is missing: its own memory, queues that run as late as they may, in any order that events allow.

Arrays refuse to become NumPy arrays. Memory is full of NaN before it is written, and again once nobody refers to it, in the
order of the compute queue. Nothing runs before the host asks for a value; then what it depends on runs in an order
that a seed chooses, sometimes with other work. A wait that is left out, memory let go too early or a read by the host that
does not wait shows as a wrong number or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from lbpar.engine.base import Engine
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.layout.grid import Grid
from lbpar.transport.base import Counter, Transport
from lbpar.transport.calls import Call
from lbpar.transport.request import Request
from lbpar.transport.virtual import VirtualTransport, VirtualWorld
from tests.util.queues import Queue, Scheduler, Task, poison


class Storage:
    """Memory of one array and its views. When the last of them goes it is poisoned and used again, in queue order."""

    def __init__(self, engine: LateEngine, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.engine, self.key = engine, (shape, dtype.char)
        free = engine.free.setdefault(self.key, [])
        if free:
            self.data = free.pop()
        else:
            self.data = np.empty(shape, dtype)
            poison(self.data)

    def __del__(self) -> None:
        data = self.data
        self.engine.queue(lambda: poison(data))
        self.engine.free[self.key].append(data)


class LateArray:
    """An array of the device: only its shape is known to the host."""

    __array_ufunc__ = None

    def __init__(self, storage: Storage, raw: np.ndarray) -> None:
        self._storage, self._raw = storage, raw
        self.shape, self.dtype, self.size, self.ndim = raw.shape, raw.dtype, raw.size, raw.ndim
        self.nbytes, self.flags = raw.nbytes, raw.flags

    def __getitem__(self, index: Any) -> LateArray:
        return LateArray(self._storage, self._raw[index])

    def reshape(self, *shape: Any) -> LateArray:
        raw = self._raw.reshape(*shape)
        assert not raw.size or np.may_share_memory(raw, self._raw), "a reshape that would copy"
        return LateArray(self._storage, raw)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    __array__ = __iter__ = __len__ = __bool__ = __float__ = __setitem__ = __eq__ = _refuse  # type: ignore[assignment]
    __hash__ = object.__hash__


class LateEngine(Engine):
    """The NumPy engine's arithmetic, queued.

    Attributes
    ----------
    fetches : int
        Reads by the host since it was last set.
    broken : set of str
        What to leave out: "record", "wait" or "fetch" (the host then reads before the copy has run).
    """

    name = "late"

    def __init__(self, scheduler: Scheduler, dtype: Any = np.float64) -> None:
        super().__init__(dtype)
        self.scheduler, self.inner = scheduler, NumpyEngine(dtype)
        self.fetches = 0
        self.broken: set[str] = set()
        self.free: dict[Any, list[np.ndarray]] = {}
        self._queue = Queue(scheduler)
        self._results: dict[Any, list[tuple[str, Any, Any]]] = {}

    def queue(self, work: Callable[[], None]) -> Task:
        """Put work at the end of the compute queue."""
        return self._queue.put(work)

    def empty(self, shape: Sequence[int], dtype: Any = None) -> Any:
        storage = Storage(self, tuple(shape), np.dtype(self.dtype if dtype is None else dtype))
        return LateArray(storage, storage.data)

    def from_host(self, a: np.ndarray) -> Any:
        assert type(a) is np.ndarray, "not an array of the host"
        out = self.empty(a.shape, a.dtype)
        raw = out._raw
        self.queue(lambda: np.copyto(raw, a))
        return out

    def fetch(self, a: Any) -> Callable[[], np.ndarray]:
        self.fetches += 1
        raw, out = a._raw, np.empty(a.shape, a.dtype)
        poison(out)
        task = self.queue(lambda: np.copyto(out, raw))

        def read() -> np.ndarray:
            if "fetch" not in self.broken:
                self.scheduler.run_until(task)
            return out

        return read

    def record(self) -> Any:
        return None if "record" in self.broken else self._queue.tail()

    def wait(self, event: Any) -> None:
        if "wait" not in self.broken:
            self._queue.wait(event)

    def synchronize(self) -> None:
        self.scheduler.run_until(self._queue.tail())

    def mark(self) -> Any:
        return self._queue.tail()

    def elapsed(self, start: Any, end: Any) -> float:
        self.scheduler.run_until(end)
        return 0.0

    def launch(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Queue a call of the inner engine; its results' shapes are those of the same call on arrays of ones."""
        method = getattr(self.inner, name)
        given = (*args, *kwargs.values())
        key = (name, tuple(kwargs), _described(given))
        arrays: list[LateArray] = []
        _visit(given, arrays.append)
        if key not in self._results:
            self._results[key] = self._try(method, args, kwargs)
        outs = [
            arrays[where] if how == "argument" else self.empty(*where) if how == "new" else None
            for how, where in self._results[key]
        ]
        raw_args, raw_kwargs = _raw(args), dict(zip(kwargs, _raw(tuple(kwargs.values())), strict=True))
        raw_outs = [o._raw if how == "new" else None for o, (how, _) in zip(outs, self._results[key], strict=True)]

        def work() -> None:
            with np.errstate(all="ignore"):
                got = method(*raw_args, **raw_kwargs)
            for out, result in zip(raw_outs, got if isinstance(got, tuple) else (got,), strict=True):
                if out is not None:
                    out[...] = result

        self.queue(work)
        return tuple(outs) if len(outs) != 1 else outs[0]

    def _try(self, method: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
        ones: list[np.ndarray] = []

        def one(a: LateArray) -> np.ndarray:
            ones.append(np.ones_like(a._raw))
            return ones[-1]

        tried = _mapped((*args, *kwargs.values()), one)
        with np.errstate(all="ignore"):
            got = method(*tried[: len(args)], **dict(zip(kwargs, tried[len(args) :], strict=True)))
        found: list[tuple[str, Any]] = []
        for result in got if isinstance(got, tuple) else (got,):
            same = [i for i, a in enumerate(ones) if result is a]
            if same:
                found.append(("argument", same[0]))
            elif result is None:
                found.append(("nothing", None))
            else:
                assert not any(np.may_share_memory(result, a) for a in ones if a.size), "a view of an argument"
                found.append(("new", (result.shape, result.dtype)))
        return found


def _kernel(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self.launch(name, args, kwargs)


for _name in (Engine.__abstractmethods__ | {"on_host"}) - set(vars(LateEngine)):
    setattr(LateEngine, _name, _kernel(_name))
LateEngine.__abstractmethods__ = frozenset()


def _mapped(x: Any, f: Callable[[LateArray], Any]) -> Any:
    if isinstance(x, LateArray):
        return f(x)
    return type(x)(_mapped(v, f) for v in x) if type(x) in (list, tuple) else x


def _raw(x: Any) -> Any:
    return _mapped(x, lambda a: a._raw)


def _visit(x: Any, f: Callable[[LateArray], None]) -> None:
    _mapped(x, f)


def _described(x: Any) -> Any:
    """What the shapes of results depend on."""
    if isinstance(x, LateArray | np.ndarray):
        return (x.shape, x.dtype.char)
    if isinstance(x, slice):
        return (x.start, x.stop, x.step)
    return tuple(map(_described, x)) if isinstance(x, list | tuple) else x


class LateWorld:
    """P ranks whose moves are tasks as well: each starts once the events of all its members have happened, no sooner.

    Control, and the order in which ranks run, are those of a virtual world.
    """

    def __init__(self, grid: Grid) -> None:
        self.scheduler = Scheduler()
        self.virtual, self.plain = VirtualWorld(grid), VirtualWorld(grid, strict=False)
        self.meetings: dict[tuple[tuple[int, ...], int], dict[int, tuple[Call, Any, Any, Task | None]]] = {}
        self.tasks: dict[tuple[tuple[int, ...], int], Task] = {}
        self.transports = [LateTransport(self, t) for t in self.virtual.transports]

    def task(self, key: tuple[tuple[int, ...], int]) -> Task:
        """The move that all members of a group have started."""
        if key not in self.tasks:
            members = self.meetings.pop(key)
            raw = {r: (call, _raw_buffers(buf), _raw_buffers(out)) for r, (call, buf, out, _) in members.items()}

            def work() -> None:
                requests = {r: self.plain.transport(r)._start(*three, None) for r, three in raw.items()}
                for r, request in requests.items():
                    result = request.wait()
                    if raw[r][0].kind == "reduce_scatter":
                        raw[r][2][...] = result

            self.tasks[key] = self.scheduler.add(work, [after for *_, after in members.values()])
        return self.tasks[key]


def _raw_buffers(x: Any) -> Any:
    return {r: a._raw for r, a in x.items()} if isinstance(x, dict) else x._raw


class LateTransport(Transport):
    """One rank of a `LateWorld`."""

    direct = True

    def __init__(self, world: LateWorld, inner: VirtualTransport) -> None:
        self.world, self.inner = world, inner
        self.rank, self.size, self.grid, self.counter = inner.rank, inner.size, inner.grid, Counter()
        self._order: dict[tuple[int, ...], int] = {}

    def attach(self, device: Any) -> None:
        self.device = device

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return self.inner.bcast(obj, root)

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        return self.inner.gather(obj, root)

    def allgather_obj(self, obj: Any) -> list[Any]:
        return self.inner.allgather_obj(obj)

    def barrier(self) -> None:
        self.inner.barrier()

    def abort(self, message: str) -> NoReturn:
        self.inner.abort(message)

    def _start(self, call: Call, buf: Any, out: Any, after: Any) -> Request:
        group = self.group(call.axes)
        order = self._order.get(group, 0)
        self._order[group] = order + 1
        if out is None:
            out = self.device.empty((call.counts[group.index(self.rank)],), call.dtype)
        self.world.meetings.setdefault((group, order), {})[self.rank] = (call, buf, out, after)
        # Nothing but a meeting of the hosts: when it is over, all have started.
        met = self.inner.allgather(np.zeros(1), [1] * len(group), call.axes, call.title)
        return LateRequest(self, (group, order), met, buf, out)


class LateRequest(Request):
    def __init__(
        self, transport: LateTransport, key: tuple[tuple[int, ...], int], met: Request, buf: Any, out: Any
    ) -> None:
        super().__init__(transport.device, (buf, out), out)
        self._transport, self._key, self._met = transport, key, met

    def _finish(self) -> Any:
        self._met.wait()
        return self._transport.world.task(self._key)

    def test(self) -> bool:
        return self._met.test()
