"""The training loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import inf, isclose, isinf
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from lbpar.checkpoint.files import checkpoint_path
from lbpar.checkpoint.find import newest
from lbpar.checkpoint.saving import Later, load, require, save
from lbpar.config.losses import METRICS
from lbpar.config.paths import as_path
from lbpar.config.training import LossScale, of_output
from lbpar.data.augment.apply import augmented
from lbpar.data.dataset import Dataset
from lbpar.data.prefetch import read_ahead
from lbpar.data.sampler import Sampler
from lbpar.errors import CheckpointError, ConfigError, TrainingError
from lbpar.plan.resolve import optimizer_name
from lbpar.program.norms import check_norms
from lbpar.runtime.binding import MicroBatch
from lbpar.runtime.optim.clip import clip_by_global_norm
from lbpar.runtime.optim.loss_scale import Scaler, check_scalable
from lbpar.runtime.optim.make import make_optimizer
from lbpar.runtime.optim.schedules import make_schedule
from lbpar.runtime.room import reserve_arrays
from lbpar.runtime.totals import Totals
from lbpar.runtime.trace import SETTLED, Tracer
from lbpar.runtime.under_way import Entered, UnderWay
from lbpar.runtime.worker import Mode, StepResult, norms_over_ranks, sum_over_ranks
from lbpar.train.best import Best, EarlyStop, watched_metric
from lbpar.train.delayed import check_delayed
from lbpar.train.evaluator import REMEDY, Evaluator
from lbpar.train.setup import build_dataset

log = logging.getLogger(__name__)
Array = Any
Feed = Mapping[str, Array]
OnStep = Callable[[StepResult, float], None]
DIVERGED = 1e8
"""Times the first step's loss (or 1, if that is less) that no training comes back from."""


@dataclass
class Trainer(Evaluator):
    """Trains a network on this rank's share. Made and called as an `Evaluator`.

    Attributes
    ----------
    epoch : int
        Epochs done.
    batches : int
        Batches done of the epoch under way.
    totals : Totals
        Sums over these.
    micro : int
        Batches done since the start; dropout counts by it.
    waited, trained : float, int
        Seconds that this rank has waited for samples, and batches that this process has trained on.
    scaler : Scaler or None
        Scales gradients, in float16 or where the run file says so.
    delayed : UnderWay or None
        With delayed gradients: the batches that are under way.
    pause : bool
        Set to let no more batches enter until those under way are done, so that this moment can be saved.

    Raises
    ------
    ConfigError
        The run file asks for what this network, engine or data cannot give.
    DataError
        A dataset cannot be read or does not fit the network.
    """

    epoch: int = 0
    batches: int = 0
    totals: Totals = field(default_factory=Totals)
    micro: int = 0
    waited: float = 0.0
    trained: int = 0
    scaler: Scaler | None = None
    delayed: UnderWay | None = None
    pause: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        c = self.config
        check_delayed(c, self.plan, self.engine)
        self._first_loss = inf  # of this process
        share = self.transport.rank, self.transport.size
        dataset = build_dataset(c, self.graph, "train", self.engine.dtype, share=share)
        assert dataset is not None
        self.volumes = dataset  # what patches are cut of, if they are
        if c.data.train != "synthetic":  # noise has no mean and std to hand on
            self.normalisation = dataset.normalisation
        self.open_test()
        self._lay_out(dataset if c.data.patches is None else self._patched(dataset, drawn=False))
        self._epoch_data()  # refuses what these samples cannot be changed by
        kinds = {name: p.kind for name, p in self.graph.params().items() if p.kind != "statistic"}
        self.optimizer = make_optimizer(c.train.optimizer, kinds, c.train.no_decay, self.engine)
        if c.train.loss_scale is not None or self.engine.activations == np.float16:
            self.scaler = Scaler(c.train.loss_scale or LossScale(), self.engine, sum_over_ranks(self.transport))
        stop = c.train.early_stop
        self.early_stop = EarlyStop(stop) if stop else None
        for where, watched in (("early_stop.metric", stop and stop.metric), ("evaluate.watch", c.train.evaluate.watch)):
            if watched:
                self._check_metric(f"train.{where}", watched)
        metric = watched_metric(c.train, self.test is not None)
        self.best = Best(metric) if metric else None
        first = self.worker.executor(
            min(c.train.batch, len(self.dataset)), "reduce" if c.train.accumulate == 1 else "accumulate"
        )
        if self.scaler is not None:
            check_scalable(first.program)
        self.norms = norms_over_ranks(self.worker.layouts, self.transport, self.engine, self.plan.update_axes)
        self.optimizer.init_state({n: self.worker.state[n] for n in kinds})
        reserve_arrays(self.engine, first.program, self.transport.rank, optimizer_name(c.train.optimizer))
        if self.plan.delayed:
            self.delayed = UnderWay(self.worker, self.optimizer, self.norms, c.parallel.reschedule)

    def datasets(self) -> dict[str, Dataset | None]:
        """Data that are open, by field of the run file."""
        return {"data.train": self.volumes, "data.test": self.test}

    def share(self) -> None:
        """Also which samples there are to train with, and the places around which patches lie."""
        super().share()
        self.volumes = self._explored(self.volumes)
        self._lay_out(self.volumes if self.config.data.patches is None else self._patched(self.volumes))

    def _lay_out(self, dataset: Dataset) -> None:
        """What follows from the number of samples."""
        c, self.dataset = self.config, dataset
        self.sampler = Sampler(len(dataset), c.train.batch, c.train.seed, c.data.shuffle, c.data.drop_last)
        per_epoch = -(-self.sampler.steps_per_epoch // c.train.accumulate)
        self.total_steps = max(1, min(per_epoch * c.train.epochs, c.train.max_steps or per_epoch * c.train.epochs))
        self.updates_per_epoch = per_epoch
        settled = SETTLED + (self.plan.pipeline.count if self.plan.pipeline is not None and self.plan.delayed else 0)
        self.tracer = Tracer(self.transport, self.engine, c.run.trace, c.run.report, self.total_steps, settled)
        self.schedule = make_schedule(c.train.schedule, c.train.optimizer.lr, per_epoch, self.total_steps)

    def _check_metric(self, where: str, metric: str) -> None:
        if metric.startswith("test_") and self.test is None:
            raise ConfigError(f"{where}: {metric} needs test data; give data.test, or watch loss or accuracy.")
        graph, output, given = self.graph, self.graph.output, metric
        of = of_output(metric) if metric not in ("test_loss", "loss") else None
        if of and of[0] in self.config.train.losses:
            output, metric = of
        elif self.config.train.losses and not metric.endswith("loss"):
            raise ConfigError(
                f"{where}: {metric} is one of each output, as {metric.replace('test_', f'test_{output}_')}."
            )
        loss, (name, _, number) = graph.compared[output][1], metric.removeprefix("test_").partition("/")
        name = name.removesuffix("_of")
        if name == "accuracy" and not loss.labels:
            other = given.replace("accuracy", "loss")
            raise ConfigError(f"{where}: {given} is not measured with loss {loss.kind}; watch {other}.")
        if name in METRICS and name not in loss.metrics:
            asked = name in self.config.train.evaluate.metrics
            mend = f" with loss {loss.kind}; watch another" if asked else f"; add {name} to train.evaluate.metrics"
            raise ConfigError(f"{where}: {given} is not measured{mend}.")
        if number and int(number) >= (classes := graph.shapes(1)[output][-1]):
            raise ConfigError(f"{where}: got class {number} in {metric}, expected 0 to {classes - 1}.")

    def check_batches(self) -> None:
        """Refuse batches that the network's norms cannot be trained with. Local; the same on all ranks."""
        sampler, left = self.sampler, self.total_steps * self.config.train.accumulate
        if self.done:
            return
        check_norms(self.graph, self.plan, min(sampler.batch, sampler.length))
        if sampler.last < sampler.batch and 1 < sampler.steps_per_epoch <= left:
            check_norms(self.graph, self.plan, sampler.last, last=True)

    # One epoch and its steps.

    def train(self) -> Iterator[dict[str, Any]]:
        """Train to the end; yields the record of each epoch (as in ``metrics.jsonl``).

        Raises
        ------
        TrainingError
            The loss is not finite (names the step and the first layer whose output is not), or has grown `DIVERGED` times.
        """
        while not self.done:
            yield self.train_epoch()

    @property
    def stopped(self) -> bool:
        """Whether early stop has ended training."""
        return self.early_stop is not None and self.early_stop.stop

    @property
    def batches_left(self) -> int:
        """Batches that the next `train_epoch` takes, unless ``train.max_steps`` ends it."""
        left = self.sampler.steps_per_epoch - self.batches
        return min(left, (self.total_steps - self.step) * self.config.train.accumulate)

    @property
    def between_updates(self) -> bool:
        """Whether the batches so far are all in the weights, so that this moment can be saved."""
        whole = self.batches % self.config.train.accumulate == 0 or self.batches == self.sampler.steps_per_epoch
        return whole and not self.under_way

    @property
    def under_way(self) -> int:
        """Batches that have begun, but not all stages have been updated with."""
        return 0 if self.delayed is None else len(self.delayed)

    @property
    def done(self) -> bool:
        """Whether nothing is left to train."""
        return self.epoch >= self.config.train.epochs or self.step >= self.total_steps or self.stopped

    def train_epoch(self, on_step: OnStep | None = None) -> dict[str, Any]:
        """One pass over the training data (or what is left of it), evaluated if that is due.

        ``on_step(result, lr)`` is called after each batch; if it raises, `train_epoch` goes on there when it is called again.
        Losses and hits in the record are those of the whole epoch, times, rates and bytes those of this call.

        Raises
        ------
        ConfigError
            A batch gives a norm a single value per channel; before the first step.
        """
        self.check_batches()
        began, sent_before, waited_before = perf_counter(), self._sent(), self.waited
        read_before = self.volumes.bytes_read
        number, totals, samples_before = self.epoch + 1, self.totals, self.totals.samples
        lr = self.schedule(max(0, self.step - 1))  # of the last update, should no batch be left
        dataset = self._epoch_data()
        sizes = self.sampler.sizes()
        batches = list(self.sampler.batches(self.epoch, self.batches + self.under_way))
        every = self.config.train.accumulate
        first: Mode = "reduce" if every == 1 else "accumulate"
        for n in set(sizes):
            self.worker.executor(n, first)  # made here: the reading thread only looks it up

        with read_ahead(self._reader(dataset, first), batches, self.config.data.prefetch) as feeds:
            for batch, feed in zip(batches, self._await(feeds), strict=False):  # it may end before the feeds do
                i = self.batches + self.under_way
                group = sizes[i - i % every : i - i % every + every]
                last = i % every == every - 1 or i == len(sizes) - 1
                mode: Mode = "reduce" if every == 1 else "last" if last else "accumulate"
                for result, lr in self._turn(feed, len(batch), mode, len(batch) / sum(group)):
                    self._count(result, lr, last, on_step)
                if self.step + self.under_way >= self.total_steps:
                    break
        for result, lr in self._drain():
            self._count(result, lr, True, on_step)
        if self.batches == len(sizes):
            self.epoch, self.batches, self.totals = number, 0, Totals()
        seconds, samples = perf_counter() - began, totals.samples - samples_before
        record: dict[str, Any] = {"epoch": number, "step": self.step, **totals.record()}
        record |= {"lr": lr, "seconds": seconds, "images_per_s": samples / seconds}
        if self.scaler is not None:
            record |= {"loss_scale": self.scaler.scale, "skipped": self.scaler.skipped}
        read, wanted = (self.volumes.bytes_read - read_before).tolist()
        record["steps"] = {"input": {"seconds": self.waited - waited_before, "bytes": read, "wanted": wanted}}
        return self._finish_epoch(record, sent_before)

    def _await(self, feeds: Iterable[Feed]) -> Iterator[Feed]:
        """The feeds; the time until each is there counts as waited."""
        ready = iter(feeds)
        while True:
            began = perf_counter()
            feed = next(ready, None)
            self.waited += perf_counter() - began
            if feed is None:
                return
            yield feed

    def _count(self, result: StepResult, lr: float, last: bool, on_step: OnStep | None) -> None:
        """Count a batch that is done; ``last``: with it an update is."""
        self.totals.add(result)
        self.batches += 1
        self.trained += 1
        self.step += last
        if on_step is not None:
            on_step(result, lr)

    def _turn(self, feed: Feed, samples: int, mode: Mode, weight: float) -> Iterator[tuple[StepResult, float]]:
        """Train on a batch; yields the result and the rate of each that is done then: of this one, or of an older one, or of several."""
        lr = self.schedule(self.step + self.under_way)
        if self.delayed is None:
            yield self._step(feed, samples, mode, lr, weight), lr
            return
        entering = Entered(feed, samples, MicroBatch(self.config.train.seed, self.micro), lr)
        self.micro += 1
        yield from self._go(entering)
        checkpoint = self.config.run.checkpoint
        if checkpoint and checkpoint.every_steps and (self.step + self.under_way) % checkpoint.every_steps == 0:
            self.pause = True
        if self.pause:
            yield from self._drain()

    def _drain(self) -> Iterator[tuple[StepResult, float]]:
        """Go on with the batches under way until none is left."""
        while self.under_way:
            yield from self._go(None)
        self.pause = False

    def _go(self, entering: Entered | None) -> Iterator[tuple[StepResult, float]]:
        assert self.delayed is not None
        step = self.step + self.under_way + (entering is not None)
        with self.tracer.batch(self.delayed.program(entering), self.epoch + 1, step) as tracer:
            left = self.delayed.go(entering, tracer)
        if left is not None:
            assert left.result is not None
            self._check_loss(left.result.loss, left.feed, left.samples, left.micro_batch)
            yield left.result, left.lr

    def _step(self, feed: Mapping[str, Array], samples: int, mode: Mode, lr: float, weight: float) -> StepResult:
        executor = self.worker.executor(samples, mode)
        scale = 1.0 if self.scaler is None else self.scaler.scale
        micro_batch = MicroBatch(self.config.train.seed, self.micro, weight, scale)

        clipped: list[Callable[[], float]] = []

        def update(params: Mapping[str, Array], grads: Mapping[str, Array]) -> None:
            # The loss is there since the forward pass: asking for it costs no wait, and nothing is spoilt yet.
            self._check_loss(float(executor.value("loss")), feed, samples, micro_batch)
            if self.scaler is not None and not self.scaler.unscale(grads):
                return
            if self.config.train.clip_norm is not None:
                clipped.append(clip_by_global_norm(grads, self.config.train.clip_norm, self.norms, self.engine))
            self.optimizer.step(params, grads, lr, self.norms)

        executor.on_update = update
        with self.tracer.batch(executor.program, self.epoch + 1, self.step + 1) as executor.tracer:
            result = self.worker.run(feed, samples, mode, micro_batch)
        self._check_loss(result.loss, feed, samples, micro_batch)
        try:
            for norm in clipped:
                norm()
        except TrainingError as error:
            raise TrainingError(f"step {self.step + 1}: {error}") from error
        self.micro += 1
        return result

    def _check_loss(
        self,
        loss: float,
        feed: Mapping[str, Array],
        samples: int,
        micro_batch: MicroBatch,
        tested: Dataset | None = None,
    ) -> None:
        """Also refuse a loss of training that has grown so far that there is nothing to go on with. Collective over all ranks."""
        # Not of an evaluation: running statistics that are still far off may make its loss large and mean no harm.
        if tested is None and loss > DIVERGED * max(1.0, self._first_loss):
            raise TrainingError(
                f"step {self.step + 1}: the loss is {loss:.3g}, in the first step it was {self._first_loss:.3g}: "
                f"training diverges. {REMEDY}."
            )
        super()._check_loss(loss, feed, samples, micro_batch, tested)
        if tested is None and isinf(self._first_loss):
            self._first_loss = loss

    def _finish_epoch(self, record: dict[str, Any], before: Mapping[str, int]) -> dict[str, Any]:
        steps: dict[str, dict[str, float]] = {k: {"seconds": s} for k, s in self.worker.spent().items()}
        for kind, sent in self._sent().items():
            steps.setdefault(kind, {})["bytes"] = sent - before.get(kind, 0)
        record["steps"] |= steps
        due = record["epoch"] % self.config.train.evaluate.every_epochs == 0 or self.done
        if self.test is not None and due:
            record |= self.evaluate()
        whole = (
            not self.batches
        )  # or `max_steps` has ended it: then test data say as much of the weights, training data do not
        if self.early_stop is not None and whole:
            self.early_stop.update(record)
        if self.best is not None and (whole or self.best.metric.startswith("test_")):
            self.best.update(record)
        return record

    def _sent(self) -> dict[str, int]:
        """Bytes sent so far, per kind of step."""
        kinds, out = self.worker.move_kinds(), dict[str, int]()
        for (kind, tag), sent in self.transport.counter.items().items():
            # Halos and other point-to-point moves are one operation for the transport, but time is kept for each.
            kind = kinds.get(tag, kind) if kind == "exchange" else kind
            out[kind] = out.get(kind, 0) + sent.bytes
        return out

    def _epoch_data(self) -> Dataset:
        return augmented(self.dataset.at(self.epoch), self.config.data.augment, self.config.train.seed, self.epoch)

    # Checkpoints.

    @property
    def improved(self) -> bool:
        """Whether the weights of this moment are the best so far."""
        return self.best is not None and self.best.step == self.step

    def save(self, directory: str | Path, later: Later | None = None) -> None:
        """Write a checkpoint of this moment, which must be `between_updates`; keep the newest few, and the best.

        ``later``, if given, gets a function to call that writes it (`lbpar.checkpoint.saving.save`).
        """
        keep = self.config.run.checkpoint.keep if self.config.run.checkpoint else 1
        meta: dict[str, Any] = {"epoch": self.epoch, "batches": self.batches, "micro": self.micro, **self._fixed()}
        meta |= {"totals": asdict(self.totals), "lr": self.schedule(self.step), "normalisation": self._normalisation()}
        if self.scaler is not None:
            meta["loss_scale"] = self.scaler.state_dict()
        if self.best is not None:
            meta["best"] = self.best.state_dict()
        if self.early_stop is not None:
            meta["early_stop"] = self.early_stop.state_dict()
        save(as_path(directory), self.worker, self.optimizer, self.step, meta, keep, later)

    def resume(self, directory: str | Path) -> bool:
        """Go on from the newest checkpoint of a directory, whatever grid wrote it; False if there is none.

        Raises
        ------
        CheckpointError
            It is damaged, or of another network, optimizer or seed; on all ranks alike.
        """
        found: bool = self.transport.bcast(newest(as_path(directory)) is not None)
        if found:
            self.load(directory)
        return found

    def load(self, directory: str | Path, which: str | int = "last") -> None:
        """Take weights, optimizer state and counters of a checkpoint; as `Evaluator.load` otherwise."""
        path = self.find(directory, which)
        meta = load(path, self.worker, self.optimizer, lambda meta: self._check_fixed(path, meta))
        self.step, self.epoch, self.micro = int(meta["step"]), int(meta["epoch"]), int(meta["micro"])
        self.batches, self.totals = int(meta["batches"]), Totals.of(meta.get("totals", {}))
        if self.early_stop is not None and "early_stop" in meta:
            self.early_stop.load_state_dict(meta["early_stop"])
        if self.scaler is not None and "loss_scale" in meta:
            self.scaler.load_state_dict(meta["loss_scale"])
        best = Best(**(meta.get("best") or {"metric": None}))
        there = best.step is not None and checkpoint_path(path.parent, best.step).is_dir()
        if self.best is not None and best.metric == self.best.metric and self.transport.bcast(there):
            self.best = best
        if self.transport.rank == 0:
            self._warn_of_changes(path, meta)

    def _warn_of_changes(self, path: Path, meta: Mapping[str, Any]) -> None:
        now, before = self.schedule(self.step), meta.get("lr")
        if before is not None and not self.done and not isclose(now, before, rel_tol=1e-6):
            log.warning(
                "train.schedule: the learning rate is %.4g from step %d on, but the run that wrote %s would have gone on with %.4g: "
                "the schedule, the rate or the number of steps has changed.",
                now,
                self.step + 1,
                path,
                before,
            )
        if meta.get("normalisation") not in (None, self._normalisation()):
            log.warning("data.train: scale, mean and std are not those of the run that wrote %s.", path)

    def _normalisation(self) -> dict[str, Any] | None:
        """As a checkpoint keeps it; JSON values."""
        return None if self.normalisation is None else self.normalisation.state_dict()

    def _fixed(self) -> dict[str, int]:
        """What decides which samples a step sees."""
        t = self.config.train
        return {"seed": t.seed, "samples": len(self.dataset), "batch": t.batch, "accumulate": t.accumulate}

    def _check_fixed(self, path: Path, meta: Mapping[str, Any]) -> None:
        """The seed must be the checkpoint's; data and batch may change between epochs, but not within one."""
        require(path, meta, ("epoch", "batches", "micro", *self._fixed()))
        for name, now in self._fixed().items():
            if meta[name] != now and (name == "seed" or meta["batches"]):
                where = "data.train: number of samples" if name == "samples" else f"train.{name}"
                raise CheckpointError(
                    f"{path}: {where}: got {now}, but the checkpoint was written with {meta[name]}; use that to resume."
                )
