"""What a run says at its start and end, and ``report.json``. On rank 0."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lbpar import __version__
from lbpar.checkpoint.files import checkpoint_path
from lbpar.config.losses import METRICS
from lbpar.data.chunks import told
from lbpar.data.shared import SHOWN, left_out
from lbpar.json_text import dumps, write_text
from lbpar.program.words import program_rows
from lbpar.provenance import hosts, provenance, timestamp
from lbpar.runtime.devices import by
from lbpar.runtime.feeds import boxes
from lbpar.runtime.worker import Mode
from lbpar.tables import print_table, short
from lbpar.terminal import screen
from lbpar.text import human_bytes
from lbpar.train.trainer import Trainer

_TESTED = tuple(f"test_{m}" for m in METRICS if m != "confusion")
FINAL = (*_TESTED, "test_accuracy", "test_loss", "accuracy", "loss", "images_per_s")


def say(text: str) -> None:
    """Print a line where a person or a log expects results: standard output."""
    print(text, file=screen(sys.stdout), flush=True)


def state_bytes(trainer: Trainer) -> int:
    """Bytes of weights, running statistics and optimizer state that this rank holds."""
    return sum(a.nbytes for a in (*trainer.worker.state.values(), *trainer.optimizer.state_dict().values()))


def process_seconds() -> float:
    """Seconds since this process was started, imports included; 0 where Linux' ``/proc`` does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def announce(trainer: Trainer, resumed: bool, state: int, seconds: float) -> None:
    """Print what is about to be trained; ``state`` is the largest `state_bytes` of all ranks."""
    t, e, graph = trainer.transport, trainer.engine, trainer.graph
    words = [
        f"lbpar {__version__}: {graph.name}, {graph.parameter_count:,} parameters",
        f"{t.size} rank{'s' * (t.size > 1)} ({trainer.plan.grid}) × {e.threads} thread{'s' * (e.threads != 1)}",
        f"engine {e.name} {trainer.config.engine.dtype}{by(e, t)}",
        f"{human_bytes(state)} of state per rank",
        f"ready after {seconds:.1f} s",
    ]
    if trainer.plan.recompute:
        again = len(trainer.plan.recompute)
        words.append(f"{again} layer{'s' * (again > 1)} computed again in the backward pass")
    if resumed:
        words.append(f"resumed after epoch {trainer.epoch}, step {trainer.step}")
    say(", ".join(words))
    mode: Mode = "reduce" if trainer.config.train.accumulate == 1 else "accumulate"
    program = trainer.worker.executor(min(trainer.config.train.batch, len(trainer.dataset)), mode).program
    for text in told(trainer.volumes, boxes(program, t.rank)):
        say(f"data.train: {text}")
    if trainer.delayed is not None:
        stages = trainer.delayed.stages
        say(
            f"parallel.schedule: delayed changes the arithmetic: stage k of {stages} is updated with gradients that are {stages} - k updates old "
            "(docs/strategies/stages.md)"
        )


def share(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """This rank's host, and its seconds and bytes in all: of the epochs (``total``), and per kind of step. Of the bytes of ``input``, which are those of whole chunks of
    files, so many were ``wanted``."""
    spent: dict[str, Any] = {
        "host": platform.node(),
        "seconds": {"total": sum(r["seconds"] for r in records)},
        "bytes": {},
        "wanted": {},
    }
    for kind, found in (item for record in records for item in record["steps"].items()):
        for name, value in found.items():
            spent[name][kind] = spent[name].get(kind, 0) + value
    return spent


def report(trainer: Trainer, out: Path, record: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Write ``report.json`` and print the final table; ``record`` is the last epoch's.

    ``facts`` are ``startup_seconds``, ``total_seconds`` (start-up included), ``state_bytes`` (per rank), ``updates`` and ``batches``, which were made since then, and each
    rank's `share` of them as ``ranks``.
    """
    samples = min(trainer.config.train.batch, len(trainer.dataset))
    rows = program_rows(trainer.worker.program(samples), 0, np.dtype(trainer.engine.dtype), trainer.engine.activations)
    content = {
        **{k: v for k, v in record.items() if k != "steps"},
        **facts,
        "started": timestamp(facts["total_seconds"]),
        "ended": timestamp(),
        **provenance(),
        "hosts": hosts(rank["host"] for rank in facts["ranks"]),
        "procs": trainer.transport.size,
        "threads": trainer.engine.threads,
        "parameters": trainer.graph.parameter_count,
        "engine": trainer.engine.name,
        "dtype": trainer.config.engine.dtype,
        "libraries": list(trainer.engine.libraries),
        "transport": trainer.transport.name if trainer.transport.size > 1 else None,
        "layers": rows,
    }
    if found := {name: left_out(data) for name, data in trainer.datasets().items()}:
        content["samples_left_out"] = {name: {"number": len(n), "first": n[:SHOWN]} for name, n in found.items() if n}
    best = trainer.best
    if best is not None and best.step is not None:
        saved = str(checkpoint_path("checkpoints", best.step)) if trainer.config.run.checkpoint else None
        content["best"] = {**best.state_dict(), "checkpoint": saved}
    write_text(out / "report.json", dumps(content, indent=2) + "\n")
    print_table(rows, title="per step and rank 0")
    if best is not None and best.value is not None and best.step != trainer.step:
        where = f": {out / content['best']['checkpoint']}" if content["best"]["checkpoint"] else ""
        say(f"best {best.metric} {short(best.value)} after epoch {best.epoch}{where}")
    words = [f"{k} {short(record[k])}" for k in FINAL if k in record]
    say("  ".join([*words, f"{facts['total_seconds']:.1f} s", f"-> {out}"]))
