"""Queues of a device that run as late as they may, in any order that events allow; memory that shows when it holds nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

MOST = 1000
"""Tasks listed before those that have run are taken out."""

POISON = 0xFF
"""Byte of memory that holds nothing: NaN in any floating-point type, -1 in integers."""


def poison(data: np.ndarray) -> None:
    """Fill an array with bytes that mean nothing."""
    data.reshape(-1).view(np.uint8).fill(POISON)


class Task:
    """A piece of work, and what must have run before.

    Attributes
    ----------
    missing : int
        Members of a meeting that have not come yet: until they have, nobody can run it.
    at : int
        Place in the order in which tasks ran.
    """

    __slots__ = ("after", "at", "missing", "work")

    def __init__(self, work: Callable[[], None], after: Iterable[Task | None], missing: int = 0) -> None:
        self.work: Callable[[], None] | None = work
        self.after = pending(after)
        self.missing, self.at = missing, 0


def pending(tasks: Iterable[Task | None]) -> list[Task]:
    """Those that have not run."""
    return [t for t in tasks if t is not None and t.work is not None]


class Scheduler:
    """The queues of all ranks: which task runs when.

    Attributes
    ----------
    others : callable
        Lets other ranks of the process go on until a condition holds; False if it never can.
    """

    def __init__(self) -> None:
        self.pending: list[Task] = []
        self.others: Callable[[Callable[[], bool]], bool] = lambda condition: False
        self.ran = 0
        self.seed(0)

    def seed(self, seed: int) -> None:
        """Choose an order. Every other seed also runs tasks that nobody waits for yet."""
        self.rng, self.eager = np.random.default_rng(seed), seed % 2

    def add(self, work: Callable[[], None], after: Iterable[Task | None], missing: int = 0) -> Task:
        task = Task(work, after, missing)
        if len(self.pending) > MOST:
            self.pending = pending(self.pending)
        self.pending.append(task)
        return task

    def run_until(self, task: Task | None) -> None:
        """Run a task and all that must come before it."""
        if task is None or task.work is None:
            return

        def missing() -> list[Task]:
            return [t for t in self._before([task]) if t.missing]

        if missing() and not self.others(lambda: not missing()):
            raise RuntimeError(f"a queue waits for {missing()[0].missing} other ranks, which never come")
        wanted = [task]
        if self.eager:
            for i in self.rng.integers(len(self.pending), size=3):
                if not any(t.missing for t in self._before([self.pending[i]])):
                    wanted.append(self.pending[i])
        self._run(self._before(wanted))

    def ready(self, task: Task | None) -> bool:
        """Whether it has run. Looks let other ranks go on, and now and then what is waited for runs."""
        before = {} if task is None else self._before([task])
        if any(t.missing for t in before):
            self.others(lambda: True)
        elif before and self.rng.random() < (0.5 if self.eager else 0.1):
            self._run(before)
        return task is None or task.work is None

    def _before(self, wanted: list[Task]) -> dict[Task, int]:
        """What must run for these, with the number of those that must run before each."""
        left: dict[Task, int] = {}
        wanted = list(wanted)
        while wanted:
            t = wanted.pop()
            if t.work is None or t in left:
                continue
            before = pending(t.after)
            left[t] = len(before)
            wanted += before
        return left

    def _run(self, left: dict[Task, int]) -> None:
        followers: dict[Task, list[Task]] = {}
        for t in left:
            for b in pending(t.after):
                followers.setdefault(b, []).append(t)
        ready = [t for t, n in left.items() if not n]
        while ready:
            t = ready.pop(int(self.rng.integers(len(ready))))
            work, t.work, t.after = t.work, None, []
            assert work is not None
            self.ran += 1
            t.at = self.ran
            work()
            for f in followers.get(t, ()):
                left[f] -= 1
                if not left[f]:
                    ready.append(f)


class Queue:
    """One stream: tasks that run one after the other, and after the events that it was told to wait for."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.last: Task | None = None
        self.waits: list[Task | None] = []

    def put(self, work: Callable[[], None]) -> Task:
        """Put work at the end."""
        return self.meet(self.scheduler.add(work, []))

    def meet(self, task: Task) -> Task:
        """Put a task at the end that others may share. Memory that is let go meanwhile puts its end here as well."""
        nothing: list[Task | None] = []
        while True:
            last, waits = self.last, self.waits
            after = task.after + pending([last, *waits])
            if self.last is last and self.waits is waits:
                break
        task.after, self.last, self.waits = after, task, nothing
        return task

    def follow(self, task: Task) -> Task:
        """What is put from now on runs after a task, and not after what was put before."""
        self.last, self.waits = task, []
        return task

    def tail(self) -> Task | None:
        """The task after which all that was put so far has happened."""
        if self.waits:
            self.put(lambda: None)
        return self.last

    def wait(self, task: Task | None) -> None:
        """What is put from now on runs after a task of another queue."""
        self.waits.append(task)
