"""What a training run does besides training: who may write where, what is written when, and what is printed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

from lbpar.config.model import PythonModel
from lbpar.config.run_file import AUTO, RunConfig, dump
from lbpar.errors import CheckpointError, ConfigError
from lbpar.graph.graph import Graph
from lbpar.json_text import write_text
from lbpar.plan.resolve import is_chosen, save_plan
from lbpar.program.plan import Plan
from lbpar.provenance import timestamp
from lbpar.runtime.worker import StepResult
from lbpar.tables import short
from lbpar.train.directory import Resume, check_directory, make_directory
from lbpar.train.lock import check_free, run_lock
from lbpar.train.metrics import MetricsWriter, tensorboard_messages
from lbpar.train.progress import Progress
from lbpar.train.report import announce, report, say, share, state_bytes
from lbpar.train.saver import Saver, check_copy
from lbpar.train.setup import join
from lbpar.train.trainer import Trainer
from lbpar.transport.base import Transport
from lbpar.transport.together import together

log = logging.getLogger(__name__)
OnEpoch = Callable[[dict[str, Any]], object]


def start(
    config: RunConfig,
    graph: Graph | None = None,
    plan: Plan | None = None,
    transport: Transport | None = None,
    write: bool = True,
    resume: Resume = False,
) -> tuple[Trainer, bool]:
    """A trainer, and whether it is to go on from a checkpoint. Collective over all ranks; see `lbpar.api.train`.

    Raises
    ------
    LbparError
        The run cannot start; then nothing was made.
    """
    graph, plan, transport = join(config, graph, plan, transport, write=write, resume=resume)
    out, root, goes_on = Path(config.run.out), transport.rank == 0, False
    if not write:
        if resume:
            raise ConfigError("train: resume=True needs write=True; it goes on with the run directory run.out.")
        return Trainer.alike(config, graph, plan, transport), False
    with together(transport):
        if root:
            check_free(out)
            goes_on = check_directory(out, resume)
    goes_on = transport.bcast(goes_on)
    trainer = Trainer.alike(config, graph, plan, transport)
    trainer.check_batches()
    with together(transport):
        if root:  # last, so that nothing is made for a run that cannot start
            if config.run.metrics.tensorboard:
                tensorboard_messages()
            check_copy(trainer)
            make_directory(config.run)
    return trainer, goes_on


def run(
    trainer: Trainer,
    goes_on: bool,
    started: float,
    on_epoch: OnEpoch | None = None,
    stop: Callable[[], str | None] = lambda: None,
) -> list[dict[str, Any]]:
    """Train, write what the run directory holds, and print the final table on rank 0. Collective over all ranks.

    Takes what `start` returned, and when the run started on the clock of ``time.perf_counter``; returns the records of the
    epochs, of which each is also given to ``on_epoch``, on every rank. When ``stop`` names a reason on some rank, all save and
    raise SystemExit.
    """
    out = Path(trainer.config.run.out)
    with _locked(out, trainer.transport) as check_lock:
        with together(trainer.transport):
            if trainer.transport.rank == 0 and check_directory(out, goes_on or "auto") != goes_on:
                raise CheckpointError(
                    f"run.out: {out} holds a run that another job began meanwhile; add --resume to go on with it."
                )
        resumed = goes_on and trainer.resume(out / "checkpoints")
        return _run(trainer, out, resumed, check_lock, started, on_epoch, stop)


@contextmanager
def _locked(out: Path, transport: Transport) -> Iterator[Callable[[], None]]:
    """No other job writes into the directory; on rank 0 the call that is yielded makes sure of it."""
    with ExitStack() as stack:
        with together(transport):
            check = stack.enter_context(run_lock(out) if transport.rank == 0 else nullcontext(_nothing))
        yield check


def _nothing() -> None:
    pass


def _run(
    trainer: Trainer,
    out: Path,
    resumed: bool,
    check_lock: Callable[[], None],
    started: float,
    on_epoch: OnEpoch | None,
    stop: Callable[[], str | None],
) -> list[dict[str, Any]]:
    config, root = trainer.config, trainer.transport.rank == 0
    if trainer.done and resumed:
        if root:
            why = f" (early stop: {trainer.early_stop.reason})" if trainer.early_stop and trainer.stopped else ""
            say(f"lbpar: {out}: nothing left to train after epoch {trainer.epoch}, step {trainer.step}{why}.")
        return []
    state = max(trainer.transport.allgather_obj(state_bytes(trainer)))
    begin, first = perf_counter(), trainer.step
    records: list[dict[str, Any]] = []
    with together(trainer.transport):
        writer = _writer(trainer, out, resumed) if root else None
    with writer or nullcontext(), Saver(trainer, out / "checkpoints", check_lock, stop) as saver:
        if root:
            announce(trainer, resumed, state, begin - started)
        while not trainer.done:
            records.append(_epoch(trainer, root, saver))
            log.info("%s", records[-1])
            with together(trainer.transport):
                if writer:
                    check_lock()
                    writer.write({**records[-1], "time": timestamp()})
            saver.after_epoch()
            if on_epoch is not None:
                on_epoch(records[-1])
    if root and trainer.early_stop is not None and trainer.stopped and trainer.epoch < config.train.epochs:
        say(f"early stop after epoch {trainer.epoch}: {trainer.early_stop.reason}")
    trainer.tracer.write(out, trainer.transport)
    ranks = trainer.transport.gather(share(records))
    if ranks is not None:
        facts = {"startup_seconds": begin - started, "total_seconds": perf_counter() - started, "state_bytes": state}
        facts |= {"updates": trainer.step - first, "batches": trainer.trained, "ranks": ranks}
        report(trainer, out, records[-1] if records else {}, facts)
    return records


def _writer(trainer: Trainer, out: Path, resumed: bool) -> MetricsWriter:
    """Write what is known at the start, and open the metrics."""
    config = trainer.config
    save_plan(trainer.plan, out / "plan.yaml", model=trainer.graph.name, batch=config.train.batch)
    write_text(out / "run.yaml", dump(config))
    if is_chosen(config.parallel, trainer.transport.size) and config.machine == AUTO:
        from lbpar.calibrate.machine import measured
        from lbpar.config.machine_file import save_machine_file

        if machine := measured(config.engine):
            save_machine_file(machine, out / "machine.yaml")
    if isinstance(config.model, PythonModel) and config.model.file is not None:
        write_text(out / config.model.file.name, config.model.file.read_text(encoding="utf-8"))
    kinds = config.run.metrics
    done = (trainer.step, trainer.epoch) if resumed else (None, None)
    return MetricsWriter(out, kinds.csv, kinds.tensorboard, *done)


def _epoch(trainer: Trainer, root: bool, saver: Saver) -> dict[str, Any]:
    mode = trainer.config.run.progress
    label = f"epoch {trainer.epoch + 1}/{trainer.config.train.epochs}"
    with Progress(trainer.batches_left, enabled=root, mode=mode, label=label) as bar:

        def on_step(result: StepResult, lr: float) -> None:
            bar.update(1, loss=result.loss, lr=lr)
            saver.after_batch()

        record = trainer.train_epoch(on_step)
    if root and mode != "none":  # results belong to standard output, whatever the bar is shown on
        shown = [k for k in ("loss", "accuracy", "test_loss", "test_accuracy", "images_per_s") if k in record]
        say(f"{label}: " + "  ".join(f"{k} {short(record[k])}" for k in shown))
    return record
