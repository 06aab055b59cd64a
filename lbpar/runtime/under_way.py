"""Batches under way in training with delayed gradients, and the rates of their updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lbpar.program.steps import Program
from lbpar.runtime.binding import MicroBatch
from lbpar.runtime.delayed import Pipe
from lbpar.runtime.executor import Executor
from lbpar.runtime.optim.base import Optimizer
from lbpar.runtime.optim.norms import Norms
from lbpar.runtime.trace import Tracer
from lbpar.runtime.worker import StepResult, Worker

Array = Any


@dataclass
class Entered:
    """A batch that has entered the stages: its samples, the learning rate of its updates, and what it has told when it leaves."""

    feed: Mapping[str, Array]
    samples: int
    micro_batch: MicroBatch
    lr: float
    result: StepResult | None = field(default=None, init=False)


class UnderWay:
    """Batches that not all stages have been updated with.

    Parameters
    ----------
    worker : Worker
        Its plan has stages with delayed gradients.
    optimizer : Optimizer
    norms : Norms
        Over the ranks of a stage.
    reschedule : int, optional
        Updates over which rates of stages with old gradients grow to the schedule's (`slower`).
    """

    def __init__(self, worker: Worker, optimizer: Optimizer, norms: Norms, reschedule: int | None) -> None:
        pipeline = worker.plan.pipeline
        assert pipeline is not None
        self.worker, self.optimizer, self.norms, self.reschedule = worker, optimizer, norms, reschedule
        self.stages, self.age = pipeline.count, worker.plan.age(worker.transport.rank)
        self._pipe = Pipe(self.stages)
        self._entered: deque[Entered] = deque()  # the oldest first
        self._slot = 0

    def __len__(self) -> int:
        return len(self._entered)

    def program(self, entering: Entered | None) -> Program:
        """Of a batch that enters, or of the newest under way."""
        return self.worker.executor((entering or self._entered[-1]).samples).program

    def go(self, entering: Entered | None, tracer: Tracer | None) -> Entered | None:
        """Let a batch enter, if one is given, and all go one round further; returns the one that leaves. Collective over all ranks."""
        executor: Executor | None = None
        if entering is not None:
            executor = self.worker.executor(entering.samples, slot=self._slot)
            rate = entering.lr * self.slower(entering.micro_batch.number)

            def update(params: Mapping[str, Array], grads: Mapping[str, Array]) -> None:
                self.optimizer.step(params, grads, rate, self.norms)

            executor.micro_batch, executor.on_update = entering.micro_batch, update
            executor.label = f"#{entering.micro_batch.number}"
            self._slot = (self._slot + 1) % self.stages
            self._entered.append(entering)
        done = self.worker.go(self._pipe, executor, None if entering is None else entering.feed, tracer)
        if done is None:
            return None
        left = self._entered.popleft()
        left.result = self.worker.result(done, left.samples)
        return left

    def slower(self, number: int) -> float:
        """Part of the schedule's rate that this rank's stage takes in an update, of which ``number`` came before.

        PipeMare's learning rate rescheduling (Yang et al., MLSys 2021): the rate is divided by the number of updates from those weights to
        the one with their gradient, to a power that falls from 1 to 0.
        """
        if self.reschedule is None:
            return 1.0
        return float((1 + self.age) ** -max(0.0, 1 - number / self.reschedule))
