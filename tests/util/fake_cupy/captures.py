"""What streams record instead of running it: work, and what must have run before, to be put into the scheduler anew in each launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.util.fake_cupy.machine import CUDARuntimeError, machine
from tests.util.queues import Task

Enter = Callable[[list[Task]], list[Task]]
"""Puts work behind tasks into the scheduler; gives the tasks that it has become."""


class Node:
    """Work of a capture.

    Attributes
    ----------
    before : int
        The nodes of the capture that run before it, as bits.
    comm : NcclCommunicator or None
        Whose call it is.
    """

    __slots__ = ("after", "before", "comm", "enter", "number")

    def __init__(self, number: int, enter: Enter, after: Sequence[Node], comm: Any) -> None:
        self.number, self.enter, self.after, self.comm = number, enter, after, comm
        self.before = before(after)


def before(nodes: Sequence[Node]) -> int:
    """These nodes and all that run before them, as bits."""
    found = 0
    for node in nodes:
        found |= node.before | 1 << node.number
    return found


class Capture:
    """What the streams record that have been drawn into it, the one in which it began first."""

    def __init__(self) -> None:
        self.nodes, self.streams = list[Node](), list[Any]()
        self.invalid = self.ended = False

    def draw(self, stream: Any, after: Sequence[Node]) -> None:
        """Let a stream record, behind some nodes, what it is given from now on; what it holds already is no part of that."""
        stream.recording = stream.queue = Recording(self, list(after))
        self.streams.append(stream)
        stream.recording.put(lambda: None)  # a stream that nobody joins shows, also where nothing is put into it

    def refused(self, why: str) -> CUDARuntimeError:
        """An error that spoils the capture."""
        self.invalid = True
        return CUDARuntimeError(f"cudaErrorStreamCapture{why}")

    def end(self) -> None:
        """Let the streams run again."""
        self.ended = True
        for stream in self.streams:
            stream.recording, stream.queue = None, stream.always


class Recording:
    """In the place of the queue of a stream that is captured: nothing runs, and nothing may be asked."""

    def __init__(self, capture: Capture, after: list[Node]) -> None:
        self.capture, self.after = capture, after

    @property
    def invalid(self) -> bool:
        return self.capture.invalid

    def put(self, work: Callable[[], None]) -> None:
        self.enter(lambda after: [machine().scheduler.add(work, after)])

    def enter(self, enter: Enter, comm: Any = None) -> None:
        """Put a node at the end of the stream. Those of NCCL must follow each other: in parallel each rank might take another one first."""
        node, nodes = Node(len(self.capture.nodes), enter, self.after, comm), self.capture.nodes
        last = next((n for n in reversed(nodes) if n.comm is not None), None)
        assert comm is None or last is None or node.before >> last.number & 1, "calls of NCCL side by side in a graph"
        nodes.append(node)
        self.after = [node]

    def tail(self) -> Point:
        return Point(self.capture, self.after)

    def wait(self, point: Point) -> None:
        if point.capture is not self.capture:
            raise self.capture.refused("Merge: dependency between two captures")
        self.after = list(dict.fromkeys([*self.after, *point.after]))


class Point:
    """A place in a stream that is captured."""

    def __init__(self, capture: Capture, after: list[Node]) -> None:
        self.capture, self.after = capture, after


class Graph:
    """What a capture has recorded."""

    def __init__(self, nodes: list[Node], last: list[Node]) -> None:
        self._nodes, self._last = nodes, last
        for comm in {node.comm for node in nodes if node.comm is not None}:
            comm.graphs.add(self)

    def launch(self, stream: Any) -> None:
        assert len(self._nodes) > 1, "an empty graph"
        queue, tasks = stream.queue, list[list[Task]]()
        first = queue.put(lambda: None)
        for node in self._nodes:
            tasks.append(node.enter([t for n in node.after for t in tasks[n.number]] or [first]))
        for node in self._last:
            for task in tasks[node.number]:
                queue.wait(task)
        queue.put(lambda: None)
