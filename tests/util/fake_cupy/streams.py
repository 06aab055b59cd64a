"""Streams and events whose work runs late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

from tests.util.fake_cupy.machine import CUDARuntimeError, machine
from tests.util.queues import Queue, Task

_local = threading.local()
_streams: dict[int, Stream] = {}


class Stream:
    """A queue of the pretended device. Nothing may run in the default stream, which would wait for all others."""

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        machine().check()
        assert non_blocking, "a stream that waits for the default stream"
        self.queue: Any = Queue(machine().scheduler)
        self.recording: Recording | None = None
        self.always = self.queue
        self.ptr = len(_streams) + 16
        self.priority, self.device_id = priority, machine().device
        _streams[self.ptr] = self

    def __enter__(self) -> Self:
        if self.device_id != machine().device:
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the current device ({machine().device})"
            )
        stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        stack().pop()

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if "wait" not in machine().broken:
            self.queue.wait(event.task)

    def synchronize(self) -> None:
        if "synchronize" not in machine().broken:
            machine().scheduler.run_until(self.queue.tail())

    @property
    def done(self) -> bool:
        return machine().scheduler.ready(self.queue.tail())

    def begin_capture(self, mode: int | None = None) -> None:
        assert self.recording is None, "a capture in a capture"
        self.queue = self.recording = Recording()

    def end_capture(self) -> Graph:
        recording, self.recording, self.queue = self.recording, None, self.always
        if recording is None:
            raise CUDARuntimeError("cudaErrorIllegalState: no capture")
        if recording.invalid:
            raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated")
        return Graph(recording.work)


class Recording:
    """In the place of a queue while its stream is captured: nothing runs, and nothing may be asked."""

    def __init__(self) -> None:
        self.work = list[Callable[[], None]]()
        self.invalid = False

    def put(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def _refuse(self, *_: Any) -> Any:
        self.invalid = True
        raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing")

    tail = wait = meet = follow = _refuse


class Graph:
    """What a capture has recorded."""

    def __init__(self, work: list[Callable[[], None]]) -> None:
        self._work = work

    def launch(self, stream: Stream | None = None) -> None:
        assert self._work, "an empty graph"
        for work in self._work:
            (stream or current()).queue.put(work)


def stack() -> list[Stream]:
    """Streams that this thread has entered."""
    if not hasattr(_local, "entered"):
        _local.entered = []
    entered: list[Stream] = _local.entered
    return entered


def current() -> Stream:
    """The stream that work goes to which names none."""
    entered = stack()
    assert entered, "work in the default stream"
    return entered[-1]


def get_current_stream() -> Stream:
    return current()


def stream_at(ptr: int) -> Stream:
    """The stream of a handle."""
    assert ptr, "work in the default stream"
    if type(ptr) is not int:
        raise TypeError("an integer is required")
    return _streams[ptr]


class Event:
    """A point in a stream."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        machine().check()
        self._device = machine().device
        self.task: Task | None = None
        self.timed, self.ptr = not disable_timing, id(self)

    def __del__(self) -> None:
        """As CuPy's: in garbage that refers to itself this may happen while others still refer to it."""
        self.ptr = 0

    def record(self, stream: Stream | None = None) -> None:
        self.task = None if "record" in machine().broken else (stream or current()).queue.tail()

    def synchronize(self) -> None:
        self._asked()
        if "synchronize" not in machine().broken:
            machine().scheduler.run_until(self.task)

    @property
    def done(self) -> bool:
        self._asked()
        return machine().scheduler.ready(self.task)

    def _asked(self) -> None:
        assert self.ptr, "an event that was destroyed"
        assert self._device == machine().device, "CUDA answers, and first sets up the thread's own device, too"


def get_elapsed_time(start: Event, end: Event) -> float:
    """Milliseconds: a thousandth for every task that ran between."""
    if not (start.timed and end.timed):
        raise RuntimeError("cudaErrorInvalidResourceHandle: an event without times")
    for event in (start, end):
        if event.task is not None and event.task.work is not None:
            raise RuntimeError("cudaErrorNotReady: an event that has not happened")
    first, last = (0 if e.task is None else e.task.at for e in (start, end))
    return max(0, last - first) * 1e-3
