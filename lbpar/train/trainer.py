"""The training loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from lbpar.config.run_file import RunConfig
from lbpar.data.augment import AugmentedDataset
from lbpar.data.dataset import Dataset
from lbpar.data.prefetch import Prefetcher
from lbpar.data.sampler import Sampler
from lbpar.errors import ConfigError, TrainingError
from lbpar.graph.graph import Graph
from lbpar.program.plan import Plan
from lbpar.train.checkpoint import latest
from lbpar.train.early_stop import EarlyStop
from lbpar.train.feeds import read_feeds
from lbpar.train.kernels import Context
from lbpar.train.optim.make import make_optimizer
from lbpar.train.optim.norms import ReducedNorms, clip_by_global_norm
from lbpar.train.saving import load, save
from lbpar.train.schedules import make_schedule
from lbpar.train.setup import build_dataset, build_engine
from lbpar.train.worker import Mode, StepResult, Worker
from lbpar.transport.base import Sent, Transport

Array = Any


@dataclass
class Totals:
    """Sums over steps: a weighted mean loss and hit rates."""

    loss: float = 0.0
    samples: int = 0
    positions: int = 0
    top1: float = 0.0
    top5: float = 0.0
    counted: bool = False

    def add(self, r: StepResult) -> None:
        """Add one step."""
        self.loss += r.loss * r.samples
        self.samples += r.samples
        self.positions += r.positions
        if r.top1 is not None and r.top5 is not None:
            self.top1 += r.top1
            self.top5 += r.top5
            self.counted = True

    def record(self, prefix: str = "") -> dict[str, float]:
        """Means, under names that start with ``prefix``."""
        out = {f"{prefix}loss": self.loss / max(1, self.samples)}
        if self.counted:
            out[f"{prefix}accuracy"] = self.top1 / max(1, self.positions)
            out[f"{prefix}top5"] = self.top5 / max(1, self.positions)
        return out


@dataclass
class Trainer:
    """Trains a network on this rank's share. Every method is collective over all ranks.

    Parameters
    ----------
    config : RunConfig
    graph : Graph
        With its loss.
    plan : Plan
    transport : Transport
        Of the plan's grid.

    Examples
    --------
    >>> from lbpar.config.run_file import parse_run
    >>> from lbpar.train.setup import build_graph, build_plan, connect_to
    >>> config = parse_run('''
    ... model: {input: [8, 8, 1], layers: [{op: conv, filters: 4, kernel: 3}, {op: relu}, {op: global_avg_pool}, {op: linear, features: 3}]}
    ... data: {train: synthetic, samples: 32}
    ... train: {batch: 8, epochs: 1}
    ... engine: {name: numpy}
    ... ''')
    >>> graph = build_graph(config)
    >>> plan = build_plan(config, graph, procs=1)
    >>> trainer = Trainer(config, graph, plan, connect_to(plan.grid))
    >>> [record] = trainer.train()
    >>> record["step"]
    4
    """

    config: RunConfig
    graph: Graph
    plan: Plan
    transport: Transport
    step: int = 0
    epoch: int = 0
    micro: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        c = self.config
        if c.engine.dtype == "bfloat16":
            raise ConfigError(
                "engine.dtype: bfloat16 training is not available on this engine; use float32 or float64."
            )
        self.engine = build_engine(c.engine)
        dataset = build_dataset(c, self.graph, "train", self.engine.dtype)
        assert dataset is not None
        self.dataset: Dataset = dataset
        self.test = build_dataset(c, self.graph, "test", self.engine.dtype)
        self.worker = Worker(self.graph, self.plan, self.engine, self.transport, c.train.seed)
        self.sampler = Sampler(len(dataset), c.train.batch, c.train.seed, c.data.shuffle, c.data.drop_last)
        per_epoch = -(-self.sampler.steps_per_epoch // c.train.accumulate)
        self.total_steps = max(1, min(per_epoch * c.train.epochs, c.train.max_steps or per_epoch * c.train.epochs))
        self.updates_per_epoch = per_epoch
        kinds = {name: p.kind for name, p in self.graph.params().items() if p.kind != "statistic"}
        self.optimizer = make_optimizer(c.train.optimizer, kinds, c.train.no_decay)
        self.schedule = make_schedule(c.train.schedule, c.train.optimizer.lr, per_epoch, self.total_steps)
        stop = c.train.early_stop
        self.early_stop = EarlyStop(stop.patience, stop.metric, stop.min_delta) if stop else None
        if stop and stop.metric.startswith("test_") and self.test is None:
            raise ConfigError(
                f"train.early_stop.metric: {stop.metric} needs test data; give data.test, or watch loss or accuracy."
            )
        self.worker.executor(min(c.train.batch, len(dataset)), "reduce" if c.train.accumulate == 1 else "hold")
        self.norms = ReducedNorms(self._sum, [n for n in kinds if self.worker.owns(n)])
        self.optimizer.init_state({n: self.worker.state[n] for n in kinds})

    # One epoch and its steps.

    def train(self) -> Iterator[dict[str, Any]]:
        """Train to the end; yields the record of each epoch (as in ``metrics.jsonl``).

        Raises
        ------
        TrainingError
            The loss is not finite; names the step and the first layer whose output is not.
        """
        while self.epoch < self.config.train.epochs and self.step < self.total_steps and not self.stopped:
            yield self.train_epoch()

    @property
    def stopped(self) -> bool:
        """Whether early stop has ended training."""
        return self.early_stop is not None and self.early_stop.stop

    @property
    def done(self) -> bool:
        """Whether nothing is left to train."""
        return self.epoch >= self.config.train.epochs or self.step >= self.total_steps or self.stopped

    def train_epoch(self, on_step: Any = None) -> dict[str, Any]:
        """One pass over the training data, evaluated if it is due; ``on_step(result, lr)`` is called after each micro-batch."""
        start, sent_before = perf_counter(), self.transport.counter.by_kind()
        totals, lr = Totals(), 0.0
        dataset = self._epoch_data()
        batches = list(self.sampler.batches(self.epoch))
        every = self.config.train.accumulate

        def read(batch: np.ndarray) -> dict[str, Array]:
            program = self.worker.executor(len(batch), modes[len(batch)]).program
            return read_feeds(program, self.transport.rank, dataset, batch)

        first: Mode = "reduce" if every == 1 else "hold"
        modes = {len(b): first for b in batches}
        for n, mode in modes.items():
            self.worker.executor(n, mode)  # made here: the reading thread only looks it up
        with Prefetcher(read, batches, self.config.data.prefetch) as feeds:
            for i, (batch, feed) in enumerate(zip(batches, feeds, strict=True)):
                group = batches[i - i % every : i - i % every + every]
                last = i % every == every - 1 or i == len(batches) - 1
                mode = "reduce" if every == 1 else "release" if last else "hold"
                lr = self.schedule(self.step)
                result = self._step(feed, len(batch), mode, lr, len(batch) / sum(map(len, group)))
                totals.add(result)
                if on_step is not None:
                    on_step(result, lr)
                self.step += last
                if self.step >= self.total_steps:
                    break
        self.epoch += 1
        return self._finish_epoch(totals, lr, perf_counter() - start, sent_before)

    def _step(self, feed: Mapping[str, Array], samples: int, mode: Mode, lr: float, weight: float) -> StepResult:
        executor = self.worker.executor(samples, mode)
        context = Context(self.config.train.seed, self.micro, weight)

        def update(params: Mapping[str, Array], grads: Mapping[str, Array]) -> None:
            loss = float(self.engine.to_host(executor.arrays[executor.program.results["loss"]]))
            if not isfinite(loss):
                self._not_finite(loss, feed, samples, context)  # before anything is spoilt
            if self.config.train.clip_norm is not None:
                clip_by_global_norm(grads, self.config.train.clip_norm, self.norms)
            self.optimizer.step(params, grads, lr, self.norms)

        executor.on_update = update
        result = self.worker.run(feed, samples, mode, context)
        if not isfinite(result.loss):
            self._not_finite(result.loss, feed, samples, context)
        self.micro += 1
        return result

    def _not_finite(self, loss: float, feed: Mapping[str, Array], samples: int, context: Context) -> None:
        layer = self.worker.first_bad_layer(feed, samples, context)
        where = f"the output of layer {layer!r} is the first that is not" if layer else "all layers' outputs are finite"
        raise TrainingError(
            f"step {self.step + 1}: the loss is {loss}, expected a finite number; {where}. "
            "Lower the learning rate, use warm-up or clip_norm, or look for bad samples."
        )

    def _finish_epoch(self, totals: Totals, lr: float, seconds: float, before: Mapping[str, Sent]) -> dict[str, Any]:
        record: dict[str, Any] = {"epoch": self.epoch, "step": self.step, **totals.record()}
        record |= {"lr": lr, "seconds": seconds, "images_per_s": totals.samples / seconds}
        after = self.transport.counter.by_kind()
        spent = self._spent()
        steps = {k: {"seconds": s} for k, s in spent.items()}
        for kind, sent in after.items():
            steps.setdefault(kind, {})["bytes"] = sent.bytes - before.get(kind, Sent()).bytes
        record["steps"] = steps
        due = self.epoch % self.config.train.evaluate.every_epochs == 0 or self.done
        if self.test is not None and due:
            record |= self.evaluate()
        if self.early_stop is not None and self.early_stop.metric in record:
            self.early_stop.update(record)
        return record

    def _spent(self) -> dict[str, float]:
        out: dict[str, float] = {}
        for executor in self.worker._executors.values():
            for kind, s in executor.seconds.items():
                out[kind] = out.get(kind, 0.0) + s
            executor.seconds.clear()
        return out

    def _epoch_data(self) -> Dataset:
        augment = self.config.data.augment
        if not augment.flip and not augment.crop_pad:
            return self.dataset
        return AugmentedDataset(self.dataset, augment, self.config.train.seed, self.epoch)

    def _sum(self, values: np.ndarray) -> np.ndarray:
        return self.transport.allreduce(values, self.plan.grid.axes, "sum", "norms").wait()

    # Evaluation.

    def evaluate(self, dataset: Dataset | None = None) -> dict[str, float]:
        """Loss and accuracies on a dataset (default: the test split), with running statistics and no dropout."""
        data = dataset or self.test
        if data is None:
            raise ConfigError("data.test: not given; evaluation needs test data.")
        totals = Totals()
        size = self.config.train.evaluate.batch or self.config.train.batch
        batches = list(Sampler(len(data), size, shuffle=False).batches(0))
        for n in {len(b) for b in batches}:
            self.worker.executor(n, "evaluate")

        def read(batch: np.ndarray) -> dict[str, Array]:
            return read_feeds(self.worker.executor(len(batch), "evaluate").program, self.transport.rank, data, batch)

        with Prefetcher(read, batches, self.config.data.prefetch) as feeds:
            for batch, feed in zip(batches, feeds, strict=True):
                totals.add(self.worker.run(feed, len(batch), "evaluate"))
        return totals.record("test_")

    # Checkpoints.

    def save(self, directory: str | Path) -> None:
        """Write a checkpoint of this moment (between epochs) and keep the newest few."""
        keep = self.config.run.checkpoint.keep if self.config.run.checkpoint else 1
        meta = {
            "epoch": self.epoch,
            "micro": self.micro,
            "seed": self.config.train.seed,
            "batch": self.config.train.batch,
        }
        if self.early_stop is not None:
            meta["early_stop"] = self.early_stop.state_dict()
        save(Path(directory), self.worker, self.optimizer, self.step, meta, keep)

    def resume(self, directory: str | Path) -> bool:
        """Go on from the newest checkpoint of a directory, whatever grid wrote it; False if there is none."""
        path = latest(directory)
        if path is None:
            return False
        meta = load(path, self.worker, self.optimizer)
        self.step, self.epoch, self.micro = int(meta["step"]), int(meta["epoch"]), int(meta["micro"])
        if self.early_stop is not None and "early_stop" in meta:
            self.early_stop.load_state_dict(meta["early_stop"])
        return True
