"""Measure one point of a study: ``mpirun -n P python -m lbpar.study.measure FOLDER --steps 10 --repeats 3``.

``FOLDER/run.yaml`` says what is trained; ``FOLDER/point.json`` gets what was found.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from lbpar import __version__
from lbpar.calibrate.machine import machine_of
from lbpar.config.run_file import RunConfig, load_run_file
from lbpar.cost.machine import Machine
from lbpar.errors import DataError
from lbpar.json_text import dumps, write_text
from lbpar.plan.explain import step_numbers
from lbpar.plan.priced import Settings
from lbpar.plan.resolve import optimizer_name
from lbpar.runtime.worker import StepResult
from lbpar.threads import node_cores
from lbpar.train.setup import join
from lbpar.train.trainer import Trainer
from lbpar.transport.launch import run_main
from lbpar.transport.together import together

#: Kinds of a step's time that are no communication between ranks.
OWN = ("compute", "update", "slice")


@dataclass
class Clock:
    """Times of one rank's steps. The first step of an epoch, which waits for the first read, and the warm-up are left out.

    With ``train.accumulate`` times are those of a batch, as a prediction's are: an update's over the batches that it takes.
    """

    trainer: Trainer
    warmup: int
    steps: list[float] = field(default_factory=list)
    kinds: dict[str, float] = field(default_factory=dict)
    input: float = 0.0
    bytes: int = 0
    batches: int = 0

    def start(self) -> None:
        """An epoch begins."""
        self._forget = self.trainer.updates_per_epoch > 1
        self._mark()

    def tick(self, result: StepResult, lr: float) -> None:
        """A batch is done; with the last of a step, the step is."""
        self._taken += 1
        if self.trainer.step == self._step:
            return
        seconds = perf_counter() - self._began
        left_out = self._forget or self.trainer.step <= self.warmup
        spent, waited, sent = self.trainer.worker.spent(), self.trainer.waited - self._waited, self._sent()
        if not left_out:
            self.steps.append(seconds / self._taken)
            self.batches += self._taken
            self.input += waited
            self.bytes += sent - self._before
            for kind, s in spent.items():
                self.kinds[kind] = self.kinds.get(kind, 0.0) + s
        self._forget = False
        self._mark()

    def _mark(self) -> None:
        self.trainer.worker.spent()
        self._step, self._waited, self._before = self.trainer.step, self.trainer.waited, self._sent()
        self._taken, self._began = 0, perf_counter()

    def _sent(self) -> int:
        return sum(sent.bytes for sent in self.trainer.transport.counter.items().values())


def doubts_of(machine: Machine) -> list[str]:
    """Why a measured machine cannot be trusted, as its file says."""
    notes = machine.file.notes
    measured = notes.get("measured") if isinstance(notes, dict) else None
    return list(measured.get("doubts", ())) if isinstance(measured, dict) else []


def measure(config: RunConfig, steps: int, repeats: int, warmup: int) -> dict[str, Any] | None:
    """Train for ``warmup + repeats * steps`` steps and say where the time went; None on all ranks but the first.

    Collective over all ranks.

    Raises
    ------
    LbparError
        The point cannot be trained.
    """
    before = peak_memory()  # Python and what it has imported, which a prediction knows nothing of
    graph, plan, transport = join(config)
    machine = machine_of(config.machine, config.engine, transport)
    trainer = Trainer.alike(config, graph, plan, transport)
    with closing(trainer):
        trainer.check_batches()
        with together(transport):
            if len(trainer.dataset) < config.train.batch:
                raise DataError(
                    f"data.train: {len(trainer.dataset)} samples are less than one batch of {config.train.batch}; "
                    "a point of a study needs a whole batch."
                )
        clock = Clock(trainer, warmup)
        per_epoch = trainer.updates_per_epoch
        kept = max(1, per_epoch - 1)  # of an epoch
        wanted = repeats * steps + warmup
        trainer.total_steps = wanted // kept * per_epoch + (wanted % kept and wanted % kept + (per_epoch > 1))
        while not trainer.done:
            clock.start()
            trainer.train_epoch(clock.tick)
        mine = {
            "steps": clock.steps[: repeats * steps],
            "kinds": clock.kinds,
            "input": clock.input,
            "counted": clock.batches,
            "bytes": clock.bytes / clock.batches,
            "before": before,
            "peak": peak_memory(),
            "host": platform.node(),
            "cores": node_cores(),
        }
        everyone = transport.gather(mine)
        settings = Settings(
            graph,
            config.train.batch,
            machine,
            config.engine.arithmetic,
            optimizer_name(config.train.optimizer),
            config.data.prefetch,
            **config.engine.planned,
        )
        found = None
        if everyone is not None:
            predicted = settings.priced("measured", plan)
            memory = predicted.memory.peak + max(rank["before"] for rank in everyone)
            found = {
                **summary(everyone, steps, trainer.engine.threads or 1),
                "engine": f"{trainer.engine.name} {config.engine.arithmetic}",
                "grid": str(plan.grid),
                "predicted": step_numbers(predicted, config.train.batch) | {"memory": memory},
                "machine": machine.name,
                "doubts": doubts_of(machine),
                "lbpar": __version__,
                "job": os.environ.get("SLURM_JOB_ID"),
            }
    transport.close()
    return found


def peak_memory() -> int:
    """Bytes that this process has had resident at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def summary(ranks: Sequence[dict[str, Any]], steps: int, threads: int) -> dict[str, Any]:
    """What all ranks measured, as the figures of a point.

    A step lasts as long as its slowest rank says. Time in a move is split: what the quickest rank spends in that kind of move
    is the move itself as far as computation does not hide it, what others spend beyond is waiting for slower ranks (``idle``).

    Parameters
    ----------
    ranks : sequence of dict
        Per rank ``steps``, ``kinds``, ``input``, ``counted``, ``bytes``, ``peak``, ``host`` and ``cores``.
    steps : int
        In one repeat.
    threads : int
        Per rank.
    """
    slowest = [max(times) for times in zip(*(r["steps"] for r in ranks), strict=True)]
    repeats = [sum(slowest[i : i + steps]) / steps for i in range(0, len(slowest), steps)]
    each = [{k: s / r["counted"] for k, s in r["kinds"].items()} for r in ranks]
    seconds = median(repeats)
    hosts = [r["host"] for r in ranks]
    return {
        "seconds": seconds,
        "repeats": repeats,
        "spread": (max(repeats) - min(repeats)) / seconds,
        "parts": parts_of(
            each, [r["input"] / r["counted"] for r in ranks], [sum(r["steps"]) / len(r["steps"]) for r in ranks]
        ),
        "imbalance": imbalance(each),
        "bytes": max(r["bytes"] for r in ranks),
        "memory": max(r["peak"] for r in ranks),
        "hosts": len(set(hosts)),
        "threads": threads,
        "oversubscribed": any(hosts.count(r["host"]) * threads > r["cores"] for r in ranks),
    }


def parts_of(each: Sequence[Mapping[str, float]], waited: Sequence[float], whole: Sequence[float]) -> dict[str, float]:
    """A step in parts, as in `summary`, from each rank's seconds per kind, its waiting for samples, and its whole step."""
    parts: dict[str, float] = {}
    idle = 0.0
    for kind in dict.fromkeys(k for kinds in each for k in kinds):
        times = [kinds.get(kind, 0.0) for kinds in each]
        mean = sum(times) / len(times)
        parts[kind] = mean if kind in OWN else min(times)
        idle += mean - parts[kind]
    parts |= {"idle": idle, "input": sum(waited) / len(waited)}
    parts["other"] = max(0.0, sum(whole) / len(whole) - sum(parts.values()))
    return parts


def imbalance(each: Sequence[Mapping[str, float]]) -> float:
    """By how much the slowest rank's computation exceeds the mean, as a share of it."""
    compute = [kinds.get("compute", 0.0) for kinds in each]
    return max(compute) / (sum(compute) / len(compute)) - 1 if any(compute) else 0.0


def add_steps(parser: argparse._ActionsContainer) -> None:
    """Add ``--steps``, ``--repeats`` and ``--warmup``."""
    parser.add_argument("--steps", type=_count, default=10, help="steps of a repeat (default: %(default)s)")
    parser.add_argument("--repeats", type=_count, default=3, help="the median of so many counts (default: %(default)s)")
    parser.add_argument("--warmup", type=_count, default=3, help="first steps that are left out (default: %(default)s)")


def step_options(args: argparse.Namespace) -> list[str]:
    """What `add_steps` read, for another command line."""
    return ["--steps", str(args.steps), "--repeats", str(args.repeats), "--warmup", str(args.warmup)]


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 10**6):
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number of at least 1")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the point of a folder. Collective over all ranks."""
    p = argparse.ArgumentParser(prog="python -m lbpar.study.measure", description=__doc__)
    p.add_argument("folder", type=Path)
    p.add_argument("--machine", help="instead of the run file's")
    add_steps(p)
    args = p.parse_args(argv)
    config = load_run_file(args.folder / "run.yaml", allow_code=True)
    config = config.model_copy(update={"machine": args.machine or config.machine})
    found = measure(config, args.steps, args.repeats, args.warmup)
    if found is not None:
        found["options"] = step_options(args)
        write_text(args.folder / "point.json", dumps(found, indent=1) + "\n", "--out")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
