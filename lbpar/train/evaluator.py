"""A network on this rank's share, with the weights of a training run or of a checkpoint: evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field
from math import isfinite, prod
from pathlib import Path
from typing import Any, Self

import numpy as np

from lbpar.checkpoint.find import find_checkpoint
from lbpar.checkpoint.saving import load
from lbpar.config.paths import as_path
from lbpar.config.run_file import RunConfig
from lbpar.data.arrays import ArrayDataset
from lbpar.data.checksum import checksum, dataset_facts
from lbpar.data.dataset import Dataset
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.normalise import Normalisation
from lbpar.data.open import check_dataset
from lbpar.data.patches import check_patches
from lbpar.data.prefetch import read_ahead
from lbpar.data.sampler import Sampler
from lbpar.data.sliding import slide
from lbpar.data.volume_dataset import VolumeDataset
from lbpar.engine.registry import build_engine
from lbpar.errors import ConfigError, DataError, TrainingError
from lbpar.graph.graph import Graph
from lbpar.models.load import load_weights
from lbpar.program.plan import Plan
from lbpar.runtime.binding import MicroBatch
from lbpar.runtime.feeds import read_feeds
from lbpar.runtime.totals import Totals
from lbpar.runtime.worker import Mode, Worker
from lbpar.train.predict import check_shape, gather, output_shape, predict, predict_parts
from lbpar.train.setup import build_dataset, loss_of, wanted_data
from lbpar.transport.base import Transport
from lbpar.transport.together import check_alike, together

Array = Any
REMEDY = "Lower the learning rate, or use warm-up or clip_norm"


def share_statistics(dataset: Dataset | None, transport: Transport) -> None:
    """Let each rank read its share of the samples once and tell the others their statistics. Collective over all ranks."""
    if not isinstance(dataset, Hdf5Dataset):
        return
    with together(transport):
        own = dataset.own_statistics((transport.rank, transport.size))
    for found in transport.allgather_obj(own):
        dataset.statistics |= found


@dataclass
class Evaluator:
    """Evaluates a network on this rank's share. Making one is local; every method is collective over all ranks.

    Parameters
    ----------
    config : RunConfig
    graph : Graph
        With its loss.
    plan : Plan
    transport : Transport
        Of the plan's grid.

    Attributes
    ----------
    step : int
        Updates that the weights have seen.
    normalisation : Normalisation or None
        Of the data that the network was trained with, which holds for all that it sees; None for synthetic data.
    test : Dataset or None
        The test split of the run file.
    """

    config: RunConfig
    graph: Graph
    plan: Plan
    transport: Transport
    step: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        c = self.config
        self.engine = build_engine(c.engine)
        self.normalisation: Normalisation | None = None
        self.test: Dataset | None = None
        given = load_weights(c.model)
        self._drawn = checksum(given.values()) if given else "drawn"
        self.worker = Worker(self.graph, self.plan, self.engine, self.transport, c.train.seed, weights=given)
        self.worker.progress = None if c.engine.progress == "auto" else c.engine.progress

    @classmethod
    def alike(cls, config: RunConfig, graph: Graph, plan: Plan, transport: Transport) -> Self:
        """One on each rank, all with the same data. Collective over all ranks.

        Raises
        ------
        LbparError
            It cannot be made, or ranks differ in data, initial weights or engine; on all ranks alike.
        """
        with together(transport):
            made = cls(config, graph, plan, transport)
            facts = made.facts() if transport.size > 1 else {}
        check_alike(transport, facts)
        made.share()
        return made

    @classmethod
    def restored(
        cls, config: RunConfig, graph: Graph, plan: Plan, transport: Transport, directory: Path, which: str | int
    ) -> Self:
        """One on each rank, with the weights of a checkpoint and the test data, if any. Collective over all ranks.

        Raises
        ------
        LbparError
            As for `alike`, and what `load` raises.
        """
        made = cls.alike(config, graph, plan, transport)
        made.worker.executor(made.batch, "evaluate")  # makes the arrays
        made.load(directory, which)
        with together(transport):
            made.open_test()
            facts = made.facts() if transport.size > 1 else {}
        check_alike(transport, facts)
        share_statistics(made.test, transport)
        return made

    def share(self) -> None:
        """Let ranks tell each other what each has found out about its share of the data. Collective over all ranks."""
        for dataset in self.datasets().values():
            share_statistics(dataset, self.transport)

    def open_test(self) -> None:
        """Open the test split, to be read like the data that the network was trained with. Local."""
        share = self.transport.rank, self.transport.size
        self.test = build_dataset(self.config, self.graph, "test", self.engine.dtype, self.normalisation, share)

    def datasets(self) -> dict[str, Dataset | None]:
        """Data that are open, by field of the run file."""
        return {"data.test": self.test}

    def facts(self) -> dict[str, object]:
        """What must be the same on all ranks besides the run file, the network and the plan. Local."""
        facts: dict[str, object] = {
            "engine": f"{self.engine.name}, {self.engine.dtype}",
            "initial weights": self._drawn,
        }
        for name, dataset in self.datasets().items():
            if dataset is not None:
                facts |= dataset_facts(name, dataset)
        return facts

    def close(self) -> None:
        """Close the data files, so that others may write them; what is asked for later opens them again. Local."""
        for dataset in self.datasets().values():
            if dataset is not None:
                dataset.close()

    # Weights.

    def weights(self) -> dict[str, Array]:
        """All parameters and running statistics by name, whole on all ranks."""
        worker, host = self.worker, self.engine.to_host
        return {n: gather(worker.layouts[n], host(a), self.transport) for n, a in worker.state.items()}

    def load(self, directory: str | Path, which: str | int = "last") -> None:
        """Take the weights of a checkpoint of a directory; `lbpar.checkpoint.find.find_checkpoint` says which.

        Raises
        ------
        CheckpointError
            There is none, or it is damaged or of another network; on all ranks alike.
        """
        path = self.find(directory, which)
        meta = load(path, self.worker, None, lambda meta: None)
        self.step = int(meta["step"])
        if meta.get("normalisation"):
            self.normalisation = Normalisation.of(meta["normalisation"])

    def find(self, directory: str | Path, which: str | int = "last") -> Path:
        """The checkpoint that rank 0 finds."""
        with together(self.transport):
            found = find_checkpoint(as_path(directory), which) if self.transport.rank == 0 else None
        path: Path = self.transport.bcast(found)
        return path

    # Samples.

    @property
    def batch(self) -> int:
        """Samples at a time."""
        return self.config.train.evaluate.batch or self.config.train.batch

    def evaluate(self, dataset: Dataset | None = None) -> dict[str, Any]:
        """Loss, accuracies and ``train.evaluate.metrics`` on a dataset (default: the test split), with running statistics and no dropout.

        Raises
        ------
        TrainingError
            The loss is not finite; names the first layer whose output is not.
        """
        data = self.test if dataset is None else self._own(dataset, "evaluate")
        if data is None:
            raise ConfigError("data.test: not given; evaluation needs test data.")
        if self.config.data.patches is not None:
            return self._evaluate_whole(data)
        if dataset is not None:
            with together(self.transport):
                check_dataset(data, **wanted_data(self.graph), share=(self.transport.rank, self.transport.size))
        totals = Totals()
        batches = list(Sampler(len(data), self.batch, shuffle=False).batches(0))
        for n in {len(b) for b in batches}:
            self.worker.executor(n, "evaluate")
        with read_ahead(self._reader(data, "evaluate"), batches, self.config.data.prefetch) as feeds:
            for batch, feed in zip(batches, feeds, strict=True):
                result = self.worker.run(feed, len(batch), "evaluate")
                self._check_loss(result.loss, feed, len(batch), MicroBatch(self.config.train.seed), data)
                totals.add(result)
        elements = prod(self.graph.shapes(1)[self.graph.output])
        return totals.record("test_", loss_of(self.graph).metrics, elements)

    def _evaluate_whole(self, data: Dataset) -> dict[str, Any]:
        """Accuracy and metrics of whole samples, predicted by windows; there is no loss of these."""
        loss, shape = loss_of(self.graph), self.graph.shapes(1)
        with together(self.transport):
            check_patches(data, shape["input"][1:], shape[self.graph.output][1:], loss.labels)
        totals = Totals(samples=len(data))
        for (rows, planes), part in self.parts(data):
            with together(self.transport):
                if part is not None:
                    box = tuple(((0, e),) for e in data.target_shape[1:])
                    truth = data.read_targets(np.array([rows.start]), (((planes.start, planes.stop),), *box))
                    totals.add_whole(
                        part, truth, getattr(loss, "ignore_index", None) if loss.labels else None, loss.labels
                    )
        record: dict[str, Any] = {}
        if self.transport.rank == 0:
            record = totals.record("test_", loss.metrics, prod(self.output_shape(data.sample_shape)))
            del record["test_loss"]
        found: dict[str, Any] = self.transport.bcast(record)
        return found

    def parts(self, data: Dataset) -> Iterator[tuple[tuple[slice, ...], Array | None]]:
        """The network's output in order, as (where, part): on rank 0, None elsewhere; of whole samples, where it sees patches."""
        patches = self.config.data.patches
        if patches is None:
            return predict_parts(self.worker, data, self.batch)
        shape = output_shape(self.worker.graph)
        return slide(data, shape, patches.overlap, lambda windows: predict_parts(self.worker, windows, self.batch))

    def output_shape(self, sample: tuple[int, ...]) -> tuple[int, ...]:
        """Of a sample of the given shape."""
        shape = output_shape(self.worker.graph)
        return shape if self.config.data.patches is None else (*sample[:-1], shape[-1])

    def _check_given(self, data: Dataset) -> None:
        """Refuse samples of another shape than the network takes, or takes patches of."""
        if self.config.data.patches is None:
            check_shape(data, self.worker.graph)
            return
        wanted = self.graph.shapes(1)["input"][1:]
        got = data.sample_shape
        if len(got) != len(wanted) or got[-1] != wanted[-1] or any(a < b for a, b in zip(got, wanted, strict=True)):
            raise DataError(
                f"predict: got samples of shape {got}, expected at least {wanted}, of which patches are cut."
            )

    def _reader(self, dataset: Dataset, mode: Mode) -> Callable[[np.ndarray], dict[str, Array]]:
        """Reads this rank's part of a batch, as training, evaluation and prediction all do."""

        def read(batch: np.ndarray) -> dict[str, Array]:
            program = self.worker.executor(len(batch), mode).program
            return read_feeds(program, self.transport.rank, dataset, batch, np.dtype(self.engine.dtype))

        return read

    def _own(self, dataset: Dataset, use: str) -> Dataset:
        """A caller's data as this network takes them: the same on all ranks, with the mean and std of the training data."""
        if self.transport.size > 1:
            check_alike(self.transport, dataset_facts(use, dataset))
        if isinstance(dataset, Hdf5Dataset | VolumeDataset) and self.normalisation is not None:
            dataset = copy(dataset)
            with together(self.transport):
                dataset.normalise_like(self.normalisation)
            share_statistics(dataset, self.transport)
        return dataset

    def predict(self, x: Array | Hdf5Dataset | VolumeDataset, normalised: bool = False) -> Array:
        """The network's output, whole on all ranks.

        Parameters
        ----------
        x : (n, [D, H, W], C) array, Hdf5Dataset or VolumeDataset
            The same on all ranks. An array as the training data are stored: scale, mean and std are applied as in training.
        normalised : bool
            The array needs no change.

        Raises
        ------
        DataError
            The samples do not have the network's input shape, or are real numbers where the training data are whole
            numbers, or the reverse.
        """
        data = self._given(x, normalised)
        if self.config.data.patches is None:
            return predict(self.worker, data, self.batch)
        with together(self.transport):
            self._check_given(data)
        out = np.zeros((len(data), *self.output_shape(data.sample_shape)), self.engine.dtype)
        for where, part in self.parts(data):
            out[where] = self.transport.bcast(part)
        return out

    def predict_to(
        self, path: str | Path, x: Array | Hdf5Dataset | VolumeDataset, labels: bool = False, overwrite: bool = False
    ) -> None:
        """Write the network's output to a file, part by part: no rank holds more of it than its own block and one part.

        Parameters
        ----------
        path : str or Path
            ``.h5`` (dataset ``y``), ``.npy``, ``.nii``, ``.nii.gz``, or, without suffix, a folder of a NIfTI file per volume.
        x
            As for `predict`, or a `VolumeDataset`. NIfTI takes its affine, its size before padding and the order of its axes.
        labels : bool
            Write the channel with the largest score: in HDF5 as dataset ``labels`` beside ``y``, else instead of the scores.
        overwrite : bool
            Replace the file.

        Raises
        ------
        DataError
            As for `predict`, or the file exists or cannot be written; on all ranks alike.
        """
        from lbpar.data.prediction_file import check_free, prediction_file  # no rank trains with it

        path, first = as_path(path), self.transport.rank == 0
        check_alike(self.transport, {"predict: file": str(path), "predict: labels": labels})
        data = self._given(x, False)
        self._check_given(data)
        shape = (len(data), *self.output_shape(data.sample_shape))
        with ExitStack() as stack:
            with together(self.transport):
                if first:
                    check_free(path, overwrite)
                    put = stack.enter_context(prediction_file(path, data, shape, np.dtype(self.engine.dtype), labels))
            for where, part in self.parts(data):
                with together(self.transport):
                    if part is not None:
                        put(where, part)
            with together(self.transport):
                stack.pop_all().close()

    def _given(self, x: Array | Hdf5Dataset | VolumeDataset, normalised: bool) -> Dataset:
        """What is predicted, as the network takes it."""
        if isinstance(x, Hdf5Dataset | VolumeDataset):
            return self._own(x, "predict")
        x = np.asarray(x)
        facts = {"shape and type": (x.shape, x.dtype), "normalised": normalised, "samples": checksum([x])}
        check_alike(self.transport, {f"predict: {name}": fact for name, fact in facts.items()})
        change = Normalisation() if normalised or self.normalisation is None else self.normalisation
        if not normalised:
            change.check_kind(x, "predict")
        return ArrayDataset(x, change, self.engine.dtype)

    def _check_loss(
        self,
        loss: float,
        feed: Mapping[str, Array],
        samples: int,
        micro_batch: MicroBatch,
        tested: Dataset | None = None,
    ) -> None:
        """Refuse a loss of training, or of a dataset that is ``tested``, that is not finite. Collective over all ranks."""
        if isfinite(loss):
            return
        layer = self.worker.first_bad_layer(feed, samples, micro_batch, training=tested is None)
        at = f"step {self.step + 1}" if tested is None else f"evaluation after step {self.step}"
        remedy = REMEDY
        if layer is None:
            where = "all layers' outputs are finite"
        elif self.graph[layer] in self.graph.inputs:
            data = self.datasets()["data.train"] if tested is None else tested
            where, remedy = "the data of this batch are not finite", f"Look for bad samples in {data and data.name}"
        else:
            where = f"the output of layer {layer!r} is the first that is not"
        raise TrainingError(f"{at}: the loss is {loss}, expected a finite number; {where}. {remedy}.")
