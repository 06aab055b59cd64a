"""Streams and events whose work runs late."""

from __future__ import annotations

import threading
from typing import Any, Self

from tests.util.fake_cupy.captures import Capture, Graph, Point, Recording, before
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
        self.recording: Recording | None = None  # which is the queue while there is one
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
        if "wait" in machine().broken or not event.recorded:
            return
        point, mine = event.task, None if self.recording is None else self.recording.capture
        if isinstance(point, Point) and point.capture.ended:
            raise CUDARuntimeError(
                "cudaErrorCapturedEvent: operation not permitted on an event last recorded in a capturing stream"
            )
        if isinstance(point, Point) and mine is None:
            point.capture.draw(self, point.after)
        elif isinstance(point, Point) is (mine is not None):
            self.queue.wait(point)
        else:
            assert mine is not None
            raise mine.refused("Isolation: dependency created on uncaptured work in another stream")

    def synchronize(self) -> None:
        self.asked()
        if "synchronize" not in machine().broken:
            machine().scheduler.run_until(self.queue.tail())

    @property
    def done(self) -> bool:
        self.asked()
        return machine().scheduler.ready(self.queue.tail())

    def asked(self) -> None:
        """Something that is refused while the stream is captured."""
        if self.recording is not None:
            raise self.recording.capture.refused("Unsupported: operation not permitted when stream is capturing")

    def begin_capture(self, mode: int | None = None) -> None:
        assert self.recording is None, "a capture in a capture"
        Capture().draw(self, [])

    def end_capture(self) -> Graph:
        if self.recording is None:
            raise CUDARuntimeError("cudaErrorIllegalState: no capture")
        capture, last = self.recording.capture, self.recording.after
        assert capture.streams[0] is self, "a capture ends in the stream in which it began"
        capture.end()
        if capture.invalid:
            raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated")
        if before(last) != (1 << len(capture.nodes)) - 1:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnjoined: capturing stream has unjoined work")
        return Graph(capture.nodes, last)


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
        self.task: Task | Point | None = None
        self.recorded = False
        self.timed, self.ptr = not disable_timing, id(self)

    def __del__(self) -> None:
        """As CuPy's: in garbage that refers to itself this may happen while others still refer to it."""
        self.ptr = 0

    def record(self, stream: Stream | None = None) -> None:
        self.recorded = True
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
        if isinstance(self.task, Point):
            raise self.task.capture.refused("Unsupported: an event that was captured has no time of its own")
        assert self._device == machine().device, "CUDA answers, and first sets up the thread's own device, too"


def get_elapsed_time(start: Event, end: Event) -> float:
    """Milliseconds: a thousandth for every task that ran between."""
    if not (start.timed and end.timed):
        raise RuntimeError("cudaErrorInvalidResourceHandle: an event without times")
    for event in (start, end):
        if isinstance(event.task, Point) or (event.task is not None and event.task.work is not None):
            raise RuntimeError("cudaErrorNotReady: an event that has not happened")
    first, last = (0 if e.task is None else e.task.at for e in (start, end))
    return max(0, last - first) * 1e-3
