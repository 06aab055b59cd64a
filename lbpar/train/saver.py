"""When a run saves, and how it ends early: between two updates, with no batch under way, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Self

import numpy as np

from lbpar.checkpoint.saving import copy_bytes
from lbpar.errors import ConfigError
from lbpar.plan.resolve import optimizer_name
from lbpar.runtime.room import node_memory
from lbpar.text import human_bytes
from lbpar.train.report import say
from lbpar.train.trainer import Trainer
from lbpar.transport.stop import STOPPED
from lbpar.transport.together import together

AGREE_SECONDS, MOST_UPDATES = 1.0, 20
"""Ranks tell each other of signals and clocks about once in so many seconds, but never leave out more updates than so many."""


class Saver:
    """Saves a run as ``run.checkpoint`` says; a context manager. Every method is collective over all ranks.

    Parameters
    ----------
    trainer : Trainer
    folder : Path
        Of the checkpoints.
    check_lock : callable
        Called on rank 0 before a checkpoint is written; raises if another job has the directory.
    stop : callable
        Why this rank was asked to end the run, or None.
    """

    def __init__(
        self, trainer: Trainer, folder: Path, check_lock: Callable[[], None], stop: Callable[[], str | None]
    ) -> None:
        self._trainer, self._folder, self._check_lock, self._stop = trainer, folder, check_lock, stop
        self._config = trainer.config.run.checkpoint
        self._asked = self._saved = perf_counter()
        self._updates = 0  # since the ranks last told each other
        self._until = 1
        self._due = False
        self._asked_by: str | None = None
        self._thread = ThreadPoolExecutor(1, "lbpar checkpoint") if self._config and self._config.background else None
        self._under_way: Future[None] | None = None  # on rank 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            if error is None:
                self._wait()

    def after_batch(self) -> None:
        """Save in the middle of an epoch if that is due. At its end `after_epoch` does, but for a run that is asked to end.

        Raises
        ------
        SystemExit
            With the status `STOPPED`: the run was asked to end, and has saved.
        """
        trainer = self._trainer
        if self._config is None or not (trainer.between_updates or trainer.under_way):
            return
        self._updates += 1
        if self._asked_by is None and self._updates >= self._until:
            self._asked_by = self._agree()
        every = self._config.every_steps
        self._due |= every is not None and trainer.step % every == 0
        if self._asked_by or (self._due and trainer.batches_left):
            if trainer.under_way:  # saved when they are done
                trainer.pause = True
            else:
                self._save(self._asked_by)

    def after_epoch(self) -> None:
        """Save after an epoch if that is due, and end the run as `after_batch` does."""
        trainer, config = self._trainer, self._config
        if config is None:
            return
        asked = self._asked_by or self._agree()
        if asked or self._due or trainer.epoch % config.every_epochs == 0 or trainer.done or trainer.improved:
            self._save(asked)

    def _agree(self) -> str | None:
        """Tell each other of signals and of rank 0's clock; why the run is to end, or None."""
        assert self._config is not None
        minutes, now = self._config.every_minutes, perf_counter()
        pace = (now - self._asked) / max(1, self._updates)
        until = int(min(MOST_UPDATES, max(1.0, AGREE_SECONDS / max(pace, 1e-9))))
        late = minutes is not None and now - self._saved >= 60 * minutes
        failed = self._under_way is not None and self._under_way.done() and self._under_way.exception() is not None
        told = self._trainer.transport.allgather_obj((self._stop(), until, late, failed))
        if told[0][3]:
            self._wait()
        self._asked, self._updates, self._until = now, 0, told[0][1]
        self._due |= told[0][2]
        if self._trainer.done:  # needs no other job, but its last record and report
            return None
        return next((f"rank {rank}: {why}" for rank, (why, *_) in enumerate(told) if why), None)

    def _save(self, asked: str | None) -> None:
        """Save; then end the run, if it was asked to."""
        trainer, root = self._trainer, self._trainer.transport.rank == 0
        self._wait()
        with together(trainer.transport):
            if root:
                self._check_lock()
        trainer.save(self._folder, self._later if self._thread else None)
        self._saved, self._due = perf_counter(), False
        if asked:
            self._wait()
            if root:
                say(f"{asked}: saved after step {trainer.step}, to go on with --resume; exit status {STOPPED}")
            raise SystemExit(STOPPED)

    def _later(self, write: Callable[[], None]) -> None:
        assert self._thread is not None
        self._under_way = self._thread.submit(write)

    def _wait(self) -> None:
        """Until the checkpoint under way is written; its error is one of all ranks."""
        if self._thread is not None:
            with together(self._trainer.transport):
                under_way, self._under_way = self._under_way, None
                if under_way is not None:
                    under_way.result()


def check_copy(trainer: Trainer) -> None:
    """Refuse ``run.checkpoint.background`` where rank 0, which calls this, has no room for the copy.

    Raises
    ------
    ConfigError
        Says what it would need, and has.
    """
    config = trainer.config
    if config.run.checkpoint is None or not config.run.checkpoint.background:
        return
    from lbpar.cost.memory import memory

    copy, own, room = copy_bytes(trainer.worker, trainer.optimizer), 0, node_memory()
    if all(isinstance(a, np.ndarray) for a in trainer.worker.state.values()):  # else the rest is in a device's memory
        program = trainer.worker.program(min(config.train.batch, len(trainer.dataset)))
        of = config.engine.dtype, optimizer_name(config.train.optimizer), config.data.prefetch
        own = memory(program, *of, copies=trainer.worker.engine.volume_copies).peak
        room = min(room, config.parallel.memory or room)
    if own + copy > room:
        raise ConfigError(
            f"run.checkpoint.background: rank 0 would hold a copy of all ranks' state, {human_bytes(copy)}, besides {human_bytes(own)} to "
            f"train with, but may use {human_bytes(room)}; leave it out, or see parallel.memory."
        )
