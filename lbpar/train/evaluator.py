"""A network on this rank's share, with the weights of a training run or of a checkpoint: evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from lbpar.data.named import NamedDataset
from lbpar.data.normalise import LARGE, Normalisation, Normalisations, largest
from lbpar.data.open import check_dataset
from lbpar.data.patches.sliding import slide
from lbpar.data.prefetch import read_ahead
from lbpar.data.sampler import Sampler
from lbpar.data.shared import explored, patched
from lbpar.data.targets import check_part
from lbpar.data.uneven import UnevenFiles
from lbpar.data.volume_dataset import VolumeDataset
from lbpar.engine.registry import build_engine
from lbpar.errors import ConfigError, DataError, TrainingError
from lbpar.graph.graph import Graph
from lbpar.layout.runs import whole
from lbpar.models.load import load_weights
from lbpar.program.plan import Plan
from lbpar.runtime.binding import MicroBatch
from lbpar.runtime.feeds import read_feeds
from lbpar.runtime.totals import Totals
from lbpar.runtime.worker import Mode, Worker
from lbpar.train.predict import check_shape, output_shape, predict, predict_parts
from lbpar.train.setup import build_dataset, check_cut, is_named, wanted_data, wanted_parts
from lbpar.transport.base import Transport
from lbpar.transport.together import check_alike, together
from lbpar.transport.wholes import gather

Array = Any
Given = Array | Hdf5Dataset | UnevenFiles | VolumeDataset
"""Samples of one input."""
REMEDY = "Lower the learning rate, or use warm-up or clip_norm (which delayed gradients cannot take)"


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
    normalisation : Normalisation, Normalisations or None
        Of the data that the network was trained with (of each of several inputs), which holds for all that it sees; None for synthetic data.
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
        self.normalisation: Normalisation | Normalisations | None = None
        self.test: Dataset | None = None
        self._held_out: tuple[Dataset, Dataset] | None = None
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
        Evaluator.share(made)
        return made

    def share(self) -> None:
        """Let ranks tell each other what each has found out about its share of the data. Collective over all ranks."""
        if self.test is not None:
            self.test = self._explored(self.test)

    def _explored(self, dataset: Dataset) -> Dataset:
        return explored(dataset, self.transport, self.config.data.nan == "skip")

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
        if dataset is not None:
            with together(self.transport):
                self._check_dataset(data)
        if self.config.data.patches is not None:
            return self._evaluate_whole(data)
        return self._record(self._totals(data), {name: prod(shape) for name, shape in self.graph.shapes(1).items()})

    def _record(self, totals: Totals, elements: Mapping[str, float]) -> dict[str, Any]:
        """What was measured; ``elements``: of each output, per sample of the sums."""
        of = {output: (loss.metrics, elements[output]) for output, (_, loss) in self.graph.compared.items()}
        return totals.record("test_", *of[self.graph.output], of)

    def _totals(self, data: Dataset) -> Totals:
        """Sums over all samples, in batches."""
        totals = Totals()
        batches = list(Sampler(len(data), self.batch, shuffle=False).batches(0))
        for n in {len(b) for b in batches}:
            self.worker.executor(n, "evaluate")
        with read_ahead(self._reader(data, "evaluate"), batches, self.config.data.prefetch) as feeds:
            for batch, feed in zip(batches, feeds, strict=True):
                result = self.worker.run(feed, len(batch), "evaluate")
                self._check_loss(result.loss, feed, len(batch), MicroBatch(self.config.train.seed), data)
                totals.add(result)
        return totals

    def _patched(self, volumes: Dataset, drawn: bool = True) -> Dataset:
        """Patches of samples; where these are ``drawn`` from, ranks tell each other."""
        options, patch = self.config.data.patches, output_shape(self.graph)[:-1]
        assert options is not None
        compared = [*self.graph.compared.values()]
        target, loss = next((c for c in compared if c[1].labels), compared[0])
        transport, ignore = self.transport if drawn else None, getattr(loss, "ignore_index", None)
        return patched(volumes, patch, options, self.config.train.seed, transport, volumes.part(target), ignore)

    def _check_dataset(self, data: Dataset) -> None:
        """Refuse a caller's data that do not fit the network."""
        cut = self.config.data.patches is not None
        share = (self.transport.rank, self.transport.size) if self.config.data.check_labels else None
        if not is_named(self.graph):
            return check_dataset(data, **wanted_data(self.graph, cut), share=share)
        inputs, targets = wanted_parts(self.graph)
        if not isinstance(data, NamedDataset) or set(data.parts) != {*inputs, *targets}:
            raise DataError(f"{data.name}: expected a NamedDataset with the parts {', '.join([*inputs, *targets])}.")
        for name, wanted in (inputs | targets).items():
            x, y = wanted.pop("input_shape", None), wanted.pop("target_shape", None)
            check_dataset(data.part(name), None if cut else x, None if cut else y, **wanted, share=share)

    def _evaluate_whole(self, data: Dataset) -> dict[str, Any]:
        """Accuracy and metrics of whole samples, predicted by windows, and the loss of patches, which are the same at all times."""
        with together(self.transport):
            check_cut(self.graph, data)
        if self._held_out is None or self._held_out[0] is not data:
            self._held_out = data, self._patched(data)
        look, found = self._looking(data), self._totals(self._held_out[1])
        totals = Totals(found.loss, found.samples, parts={n: Totals(p.loss, p.samples) for n, p in found.parts.items()})
        for output, (rows, *space), part in self.parts(data):
            with together(self.transport):
                if part is not None:
                    target, loss = self.graph.compared[output]
                    one = data.part(target)
                    box = tuple(((s.start, s.stop),) for s in space)
                    truth = one.read_targets(np.array([rows.start]), (*box, *whole(one.target_shape[len(box) :])))
                    look(target, truth, np.array([rows.start]))
                    end = space[0].stop == data.extents(rows.start)[0]
                    own, ignore = totals.parts.get(output, totals), getattr(loss, "ignore_index", None)
                    own.add_whole(part, truth, ignore, loss.labels, end)
        record: dict[str, Any] = {}
        if self.transport.rank == 0:
            places = sum(prod(data.extents(n)) for n in range(len(data))) / found.samples
            record = self._record(totals, {n: places * output_shape(self.graph, n)[-1] for n in self.graph.outputs})
        told: dict[str, Any] = self.transport.bcast(record)
        return told

    def parts(self, data: Dataset) -> Iterator[tuple[str, tuple[slice, ...], Array | None]]:
        """The network's outputs in order, as (output, where, part): on rank 0, None elsewhere; of whole samples, where it sees patches."""
        patches = self.config.data.patches
        if patches is None:
            return predict_parts(self.worker, data, self.batch)
        outputs = {name: output_shape(self.graph, name) for name in self.graph.outputs}
        return slide(data, outputs, patches.overlap, lambda windows: predict_parts(self.worker, windows, self.batch))

    def output_shape(self, sample: tuple[int, ...], output: str | None = None) -> tuple[int, ...]:
        """Of a sample of the given shape; of the main output unless another one is named."""
        shape = output_shape(self.graph, output)
        return shape if self.config.data.patches is None else (*sample[:-1], shape[-1])

    def _reader(self, dataset: Dataset, mode: Mode) -> Callable[[np.ndarray], dict[str, Array]]:
        """Reads this rank's part of a batch, as training, evaluation and prediction all do."""
        patches = self.config.data.patches
        look = self._looking(dataset, patches.per_sample if patches else 1)

        def read(batch: np.ndarray) -> dict[str, Array]:
            program = self.worker.executor(len(batch), mode).program
            return read_feeds(program, self.transport.rank, dataset, batch, np.dtype(self.engine.dtype), look)

        return read

    def _looking(self, dataset: Dataset, each: int = 1) -> Callable[[str, Array, Array], object]:
        """Refuses targets that were read if the loss cannot take them; ``each``: patches of a sample."""
        parts = wanted_parts(self.graph)[1].items()
        takes = {target: {k: v for k, v in wanted.items() if k != "target_shape"} for target, wanted in parts}
        return lambda name, part, samples: check_part(dataset.part(name), part, samples // each, **takes[name])

    def _own(self, dataset: Dataset, use: str) -> Dataset:
        """A caller's data as this network takes them: the same on all ranks, with the mean and std of the training data."""
        if self.transport.size > 1:
            check_alike(self.transport, dataset_facts(use, dataset))
        with together(self.transport):
            dataset = dataset.map(lambda name, one: self._like_training(one, name))
        return self._explored(dataset)

    def _like_training(self, dataset: Dataset, name: str | None = None) -> Dataset:
        """One input, with the mean and std of the training data."""
        if (
            isinstance(dataset, Hdf5Dataset | UnevenFiles | VolumeDataset)
            and (change := self._change(name)) is not None
        ):
            dataset = copy(dataset)
            dataset.normalise_like(change)
        return dataset

    def _change(self, name: str | None = None) -> Normalisation | None:
        """Of the training data, of one of several inputs."""
        return (
            self.normalisation.get(str(name)) if isinstance(self.normalisation, Normalisations) else self.normalisation
        )

    def predict(self, x: Given | Mapping[str, Given], normalised: bool = False) -> Array | dict[str, Array]:
        """The network's output, whole on all ranks; of several outputs a mapping of their names to them.

        Parameters
        ----------
        x : (n, [D, H, W], C) array, Hdf5Dataset or VolumeDataset, or a mapping of these
            The same on all ranks. An array as the training data are stored: scale, mean and std are applied as in training.
            For several inputs by their names.
        normalised : bool
            The array needs no change.

        Raises
        ------
        DataError
            The samples do not have the network's input shape, or are real numbers where the training data are whole
            numbers, or the reverse.
        """
        from lbpar.data.prediction_file import check_scores

        data = self._given(x, normalised)
        if self.config.data.patches is None:
            found = predict(self.worker, data, self.batch)
            for output, scores in found.items():
                check_scores(scores, output)
        else:
            with together(self.transport):
                check_shape(data, self.worker.graph, patches=True)
            shapes = {n: (len(data), *self.output_shape(data.sample_shape, n)) for n in self.graph.outputs}
            found = {name: np.zeros(shape, self.engine.dtype) for name, shape in shapes.items()}
            for output, where, part in self.parts(data):
                found[output][where] = self.transport.bcast(part)
                check_scores(found[output][where], output, where[0].start or 0)
        return found if self.graph.others else found[self.graph.output]

    def predict_to(
        self, path: str | Path, x: Given | Mapping[str, Given], labels: bool = False, overwrite: bool = False
    ) -> None:
        """Write the network's output to a file, part by part: no rank holds more of it than its own block and one part.

        Parameters
        ----------
        path : str or Path
            ``.h5`` (dataset ``y``, or of several outputs one by each name), ``.npy``, ``.nii``, ``.nii.gz``, or, without suffix, a folder of a NIfTI file per volume.
        x
            As for `predict`, or a `VolumeDataset`. NIfTI takes its affine, its size before padding and the order of its axes.
        labels : bool
            Write the channel with the largest score: in HDF5 as dataset ``labels`` beside ``y`` (of several outputs, of those with a
            loss of classes, as ``NAME_labels``), else instead of the scores.
        overwrite : bool
            Replace the file.

        Raises
        ------
        DataError
            As for `predict`, or the file exists or cannot be written; on all ranks alike.
        """
        from lbpar.data.prediction_file import check_free, check_scores  # no rank trains with it

        path, first = as_path(path), self.transport.rank == 0
        check_alike(self.transport, {"predict: file": str(path), "predict: labels": labels})
        data = self._given(x, False)
        check_shape(data, self.worker.graph, self.config.data.patches is not None)
        shape = (len(data), *self.output_shape(data.sample_shape))
        with ExitStack() as stack:
            with together(self.transport):
                if first:
                    check_free(path, overwrite)
                    put = stack.enter_context(self._file(path, data, shape, labels))
            for name, where, part in self.parts(data):
                with together(self.transport):
                    if part is not None:
                        check_scores(part, name, where[0].start or 0)
                        put(name, where, part)
            with together(self.transport):
                stack.pop_all().close()

    @contextmanager
    def _file(self, path: Path, data: Dataset, shape: Sequence[int], labels: bool) -> Iterator[Callable[..., None]]:
        """The file that predictions go to; a call that writes a part of an output."""
        from lbpar.data.prediction_file import prediction_file, several_in_hdf5

        dtype, graph = np.dtype(self.engine.dtype), self.graph
        if not graph.others:
            with prediction_file(path, getattr(data, "main", data), shape, dtype, labels) as put:
                yield lambda name, where, part: put(where, part)
            return
        if path.suffix not in (".h5", ".hdf5"):
            raise DataError(
                f"{path}: the network has the outputs {', '.join(graph.outputs)}, which only HDF5 takes; write .h5."
            )
        shapes = {name: (len(data), *self.output_shape(data.sample_shape, name)) for name in graph.outputs}
        classes = {n: f"{n}_labels" for n, (_, loss) in graph.compared.items() if labels and loss.labels}
        with several_in_hdf5(path, getattr(data, "main", data), shapes, dtype, classes) as put_named:
            yield put_named

    def _given(self, x: Given | Mapping[str, Given], normalised: bool) -> Dataset:
        """What is predicted, as the network takes it."""
        names = [n.name for n in self.graph.samples]
        if isinstance(x, Mapping):
            if set(x) != set(names):
                raise DataError(f"predict: got the inputs {', '.join(x)}, expected {', '.join(names)}.")
            return NamedDataset({n: self._given_one(x[n], normalised, n) for n in names}, {})
        if len(names) > 1 or names != ["input"]:
            raise DataError(f"predict: got a single input, expected a mapping with {', '.join(names)}.")
        return self._given_one(x, normalised)

    def _given_one(self, x: Given, normalised: bool, name: str | None = None) -> Dataset:
        if isinstance(x, Dataset):
            if self.transport.size > 1:
                check_alike(self.transport, dataset_facts("predict", x))
            with together(self.transport):
                data = self._like_training(x, name)
            return explored(data, self.transport)
        x = x if isinstance(x, np.memmap) else np.asarray(x)  # a file's name stays
        facts = {"shape and type": (x.shape, x.dtype), "normalised": normalised, "samples": checksum([x])}
        check_alike(self.transport, {f"predict: {name}": fact for name, fact in facts.items()})
        own = self._change(name)
        change = Normalisation() if normalised or own is None else own
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
            given = max(self.transport.allgather_obj(largest(feed.values())))
            if given > LARGE:
                remedy = f"Samples have values as large as {given:.3g}: normalise them (data.normalise), or give them a mean and a deviation"
        raise TrainingError(f"{at}: the loss is {loss}, expected a finite number; {where}. {remedy}.")
