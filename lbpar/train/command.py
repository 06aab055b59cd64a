"""`python -m lbpar.train`: the whole job, from a run file to a trained network and its report."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from lbpar import __version__
from lbpar.config.run_file import dump, load_run_file
from lbpar.errors import CheckpointError
from lbpar.plan.resolve import save_plan
from lbpar.train.checkpoint import latest
from lbpar.train.json_text import write_report
from lbpar.train.metrics import MetricsWriter
from lbpar.train.progress import Progress, print_table
from lbpar.train.setup import build_graph, build_plan, connect_to
from lbpar.train.summary import program_rows
from lbpar.train.trainer import Trainer
from lbpar.transport.base import Transport
from lbpar.transport.launch import connect


def parser() -> argparse.ArgumentParser:
    """Command-line options."""
    p = argparse.ArgumentParser(
        prog="lbpar train", description="Train a network: mpirun -n 4 python -m lbpar.train --config run.yaml"
    )
    p.add_argument("--config", required=True, help="run file (YAML); see docs/run-file.md")
    p.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field, as in train.epochs=3"
    )
    p.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in run.out")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says. Collective over all ranks; call it through `lbpar.transport.launch.run_main`."""
    started = perf_counter()
    args = parser().parse_args(argv)
    config = load_run_file(args.config, args.set)
    graph = build_graph(config)
    transport = connect()
    plan = build_plan(config, graph, transport.size)
    transport = connect_to(plan.grid, transport)
    out = Path(config.run.out)
    prepare_directory(out, transport, args.resume)
    trainer = Trainer(config, graph, plan, transport)
    resumed = args.resume and trainer.resume(out / "checkpoints")
    run(trainer, out, resumed, started)
    transport.close()
    return 0


def prepare_directory(out: Path, transport: Transport, resume: bool) -> None:
    """Make the run directory; refuse one that holds a run, unless it is to be resumed. All ranks fail alike.

    Raises
    ------
    CheckpointError
        It holds a run already, cannot be written, or holds nothing to resume.
    """
    problem = None
    if transport.rank == 0:
        used = (out / "metrics.jsonl").exists() or latest(out / "checkpoints") is not None
        if used and not resume:
            problem = f"run.out: {out} holds an earlier run; add --resume to go on with it, or choose another directory (--set run.out=...)."
        elif resume and latest(out / "checkpoints") is None:
            problem = f"--resume: {out / 'checkpoints'} holds no checkpoint; leave --resume out, or check run.out."
        else:
            problem = _make(out)
    problem = transport.bcast(problem)
    if problem is not None:
        raise CheckpointError(problem)


def _make(out: Path) -> str | None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError("no permission to write")
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as error:
        return f"run.out: {out} cannot be written: {error.strerror or error}; choose another directory (--set run.out=...)."
    return None


def run(trainer: Trainer, out: Path, resumed: bool, started: float) -> None:
    """Train, write what the run directory holds, and print the final table on rank 0."""
    config, root = trainer.config, trainer.transport.rank == 0
    writer = None
    if root:
        save_plan(trainer.plan, out / "plan.yaml", model=trainer.graph.name, batch=config.train.batch)
        (out / "run.yaml").write_text(dump(config), encoding="utf-8")
        kinds = config.run.metrics
        writer = MetricsWriter(out, kinds.csv, kinds.tensorboard, trainer.step if resumed else None)
        _announce(trainer, resumed, perf_counter() - started)
    first_step = perf_counter()
    record: dict[str, Any] = {}
    while not trainer.done:
        record = _epoch(trainer, root)
        if writer is not None:
            writer.write(record)
        checkpoint = config.run.checkpoint
        if checkpoint is not None and (trainer.epoch % checkpoint.every_epochs == 0 or trainer.done):
            trainer.save(out / "checkpoints")
    if writer is not None:
        writer.close()
        report(trainer, out, record, perf_counter() - first_step)


def _announce(trainer: Trainer, resumed: bool, seconds: float) -> None:
    t, e = trainer.transport, trainer.engine
    threads = f"{e.threads} thread{'s' if e.threads != 1 else ''}"
    print(
        f"lbpar {__version__}: {trainer.graph.name}, {trainer.graph.parameter_count:,} parameters, {t.size} rank{'s' if t.size > 1 else ''} "
        f"({trainer.plan.grid}) × {threads}, engine {e.name} {e.dtype}, ready after {seconds:.1f} s"
        + (f", resumed at epoch {trainer.epoch}" if resumed else ""),
        flush=True,
    )


def _epoch(trainer: Trainer, root: bool) -> dict[str, Any]:
    mode = trainer.config.run.progress
    label = f"epoch {trainer.epoch + 1}/{trainer.config.train.epochs}"
    with Progress(trainer.sampler.steps_per_epoch, enabled=root and mode != "none", mode=mode, label=label) as bar:
        record = trainer.train_epoch(lambda result, lr: bar.update(1, loss=result.loss, lr=lr))
        words = {
            k: record[k] for k in ("loss", "accuracy", "test_loss", "test_accuracy", "images_per_s") if k in record
        }
        if root and mode != "none":
            bar.message(f"{label}: " + "  ".join(f"{k} {v:.4g}" for k, v in words.items()))
    return record


def report(trainer: Trainer, out: Path, record: dict[str, Any], seconds: float) -> None:
    """Write report.json and print the final table; on rank 0."""
    rows = program_rows(trainer.worker.program(trainer.config.train.batch), 0, np.dtype(trainer.engine.dtype))
    final = {k: v for k, v in record.items() if k != "steps"}
    write_report(
        out,
        {
            **final,
            "total_seconds": seconds,
            "procs": trainer.transport.size,
            "parameters": trainer.graph.parameter_count,
            "engine": trainer.engine.name,
            "state_bytes": state_bytes(trainer),
            "layers": rows,
        },
    )
    print_table(rows, title="per step and rank 0")
    words = [f"{k} {record[k]:.4g}" for k in ("test_accuracy", "accuracy", "loss", "images_per_s") if k in record]
    print("  ".join([*words, f"{seconds:.1f} s", f"-> {out}"]), flush=True)


def state_bytes(trainer: Trainer) -> int:
    """Bytes of weights, running statistics and optimizer state that this rank holds."""
    return sum(a.nbytes for a in (*trainer.worker.state.values(), *trainer.optimizer.state_dict().values()))
