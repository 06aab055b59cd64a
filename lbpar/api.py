"""Everything that the command lines do, as calls.

    from lbpar import api

    config = api.load_run("run.yaml", ["train.epochs=3"])
    with api.train(config) as trained:
        print(trained.records[-1]["loss"])

One process needs no MPI. Under mpirun every rank makes the same calls with the same arguments; those that are
collective say so. `docs/api.md` has an example of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, Self, TypeVar

import numpy as np

from lbpar.config.parallel import ParallelConfig
from lbpar.config.paths import as_path
from lbpar.config.run_file import RunConfig
from lbpar.config.run_file import load_run_file as load_run
from lbpar.data.dataset import Dataset
from lbpar.graph.graph import Graph
from lbpar.plan.resolve import resolve_plan, save_plan
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.words import program_rows
from lbpar.study.slice_figure import draw_slices
from lbpar.study.slices import slices
from lbpar.train import job
from lbpar.train.directory import Resume, run_config
from lbpar.train.evaluator import Evaluator, Given
from lbpar.train.setup import build_graph, build_plan, join
from lbpar.train.trainer import Trainer
from lbpar.transport.base import Transport
from lbpar.transport.launch import connect
from lbpar.transport.together import together
from lbpar.verify.run import Verification, verify

__all__ = [
    "RunConfig",
    "Trained",
    "Verification",
    "build_graph",
    "evaluate",
    "explain",
    "load_run",
    "lower",
    "make_plan",
    "restore",
    "save_plan",
    "train",
    "verify",
]

Array = Any
E = TypeVar("E", bound=Evaluator)
OnEpoch = Callable[[dict[str, Any]], object]


def make_plan(
    config: RunConfig, graph: Graph | None = None, procs: int | None = None, plan_file: str | Path | None = None
) -> Plan:
    """The plan that a run file asks for: for each layer, which grid axes split which of its loops. Local; needs no MPI.

    Parameters
    ----------
    config : RunConfig
        Its sections ``parallel`` and ``train.batch`` count.
    graph : Graph, optional
        With its loss; default: the network of the run file.
    procs : int, optional
        Processes to plan for; default ``parallel.procs``, else 1.
    plan_file : str or Path, optional
        A plan file to take instead of the run file's strategy.

    Raises
    ------
    PlanError
        A layer or loop does not exist, ways do not fit the processes, or the plan file is for something else.
    """
    graph = build_graph(config, graph)
    procs = procs or config.parallel.procs or 1
    if plan_file is not None:
        return resolve_plan(ParallelConfig(strategy=str(plan_file)), graph, config.train.batch, procs)
    return build_plan(config, graph, procs)


def explain(
    graph: Graph, plan: Plan, batch: int, rank: int = 0, dtype: str = "float32", training: bool = True
) -> list[dict[str, Any]]:
    """What a plan does, a row per layer: its grid, its collectives with group sizes, bytes that a rank sends per step.

    Local; needs no MPI, whatever the number of processes.

    Parameters
    ----------
    graph : Graph
        With its loss, if ``training``.
    plan : Plan
    batch : int
        Global number of samples.
    rank : int
        Whose bytes are counted.
    dtype : str
        The network's element type.
    training : bool
        A training step; otherwise a forward pass.

    Returns
    -------
    list of dict
        With the keys ``layer``, ``op``, ``grid``, ``collectives`` and ``bytes/step``.
    """
    return program_rows(lower(graph, plan, batch, training=training), rank, np.dtype(dtype))


@dataclass
class Trained(Generic[E]):
    """A network that was trained, spread over the ranks as the plan says. Close it, or use it in a ``with`` block.

    Attributes
    ----------
    trainer : Trainer, or Evaluator if restored
        Holds this rank's share; a trainer's ``save(directory)`` writes a checkpoint.
    records : list of dict
        One per epoch, as in ``metrics.jsonl``: epoch, step, loss, accuracy, test_loss, seconds, images_per_s, ...
    """

    trainer: E
    records: list[dict[str, Any]] = field(default_factory=list)
    _close: bool = True

    def evaluate(self, dataset: Dataset | None = None) -> dict[str, float]:
        """``test_loss``, ``test_accuracy``, ... on a dataset (default: the run file's test split). Collective."""
        return self.trainer.evaluate(dataset)

    def predict(self, x: Given, normalised: bool = False) -> Array:
        """The network's output, whole on all ranks; see `lbpar.train.evaluator.Evaluator.predict`. Collective."""
        return self.trainer.predict(x, normalised)

    def predict_to(self, path: str | Path, x: Given, labels: bool = False, overwrite: bool = False) -> None:
        """The network's output in a file, written part by part; see `lbpar.train.evaluator.Evaluator.predict_to`. Collective."""
        self.trainer.predict_to(path, x, labels, overwrite)

    def picture(self, path: str | Path, samples: Sequence[int] | None = None) -> None:
        """Draw planes of test samples (default: of the first three): image, truth, prediction, difference. Collective.

        Of volumes, the plane with most labels that are not 0; the prediction comes together of this plane only.
        """
        found = slices(self.trainer, samples)
        with together(self.trainer.transport):
            if found is not None:
                draw_slices(found, path)

    def weights(self) -> dict[str, Array]:
        """All parameters and running statistics by name, whole on all ranks. Collective."""
        return self.trainer.weights()

    def close(self) -> None:
        """Close the data files and free the communicators that were made for it. Collective."""
        self.trainer.close()
        if self._close:
            self.trainer.transport.close()
            self._close = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # After a failure the others may not come to free communicators.
        self._close &= error is None or self.trainer.transport.size == 1
        self.close()


def train(
    config: RunConfig,
    graph: Graph | None = None,
    plan: Plan | None = None,
    *,
    transport: Transport | None = None,
    on_epoch: OnEpoch | None = None,
    write: bool = False,
    resume: Resume = False,
) -> Trained[Trainer]:
    """Train a network. Collective over all ranks.

    Parameters
    ----------
    config : RunConfig
    graph : Graph, optional
        With its loss; default: the network of the run file.
    plan : Plan, optional
        For as many processes as the job has; default: the run file's.
    transport : Transport, optional
        Default: that of this job, closed by ``Trained.close``.
    on_epoch : callable, optional
        Called with the record of each epoch, on every rank.
    write : bool
        Do what the command line does: progress and tables on standard output; plan, metrics, report and checkpoints in
        ``run.out``. Otherwise nothing is printed or written.
    resume : bool or "auto"
        With ``write``: go on from the newest checkpoint in ``run.out``; ``"auto"``: if there is one, else start anew.

    Raises
    ------
    LbparError
        Something does not fit; before training starts, and on all ranks.
    TrainingError
        The loss is not finite.
    """
    started = perf_counter()
    trainer, goes_on = job.start(config, graph, plan, transport, write, resume)
    trained = Trained(trainer, _close=transport is None)
    with ExitStack() as on_error:
        on_error.push(trained)
        if write:
            trained.records = job.run(trainer, goes_on, started, on_epoch)
        else:
            for record in trainer.train():
                trained.records.append(record)
                if on_epoch is not None:
                    on_epoch(record)
        on_error.pop_all()
    return trained


def evaluate(
    config: RunConfig,
    checkpoints: str | Path | None = None,
    graph: Graph | None = None,
    plan: Plan | None = None,
    *,
    transport: Transport | None = None,
    checkpoint: str | int = "last",
) -> dict[str, float]:
    """Evaluate a checkpoint of a run on its test data, on any grid. Collective over all ranks.

    Parameters
    ----------
    config : RunConfig
        The run's, with ``data.test``; the network must be that of the checkpoint.
    checkpoints : str or Path, optional
        The run directory, or that of its checkpoints; default ``run.out``.
    graph, plan, transport
        As in `train`.
    checkpoint : {"last", "best"} or int
        The newest, the best by the watched metric, or that of a step.

    Returns
    -------
    dict
        ``test_loss``, and for classes ``test_accuracy`` and ``test_top5``.

    Raises
    ------
    CheckpointError
        There is none, or it is of something else.
    ConfigError
        The run file names no test data.
    """
    with _restored(config, graph, plan, transport, transport is None, checkpoint, checkpoints) as trained:
        return trained.evaluate()


def restore(
    run: str | Path,
    checkpoint: str | int = "last",
    overrides: Sequence[str] = (),
    *,
    transport: Transport | None = None,
    allow_code: bool = False,
) -> Trained[Evaluator]:
    """The network of a run directory, with the weights of a checkpoint, on any number of ranks. Collective over all ranks.

    Parameters
    ----------
    run : str or Path
        The run directory. On as many ranks as it was trained on, its plan is used; otherwise that of its strategy, or the planner's where it names none.
    checkpoint : {"last", "best"} or int
        The newest, the best by the watched metric, or that of a step.
    overrides : sequence of str
        ``field.path=value`` each, as for `load_run`: other test data, another engine.
    transport : Transport, optional
        Default: that of this job, closed by ``Trained.close``.
    allow_code : bool
        Whether its run file may name a Python function.

    Raises
    ------
    LbparError
        The directory holds no run or no such checkpoint, or a file is damaged.
    """
    own = transport is None
    transport = connect() if transport is None else transport
    with together(transport):
        config = run_config(as_path(run), transport.size, overrides, allow_code)
        graph = build_graph(config)
    return _restored(config, graph, None, transport, own, checkpoint)


def _restored(
    config: RunConfig,
    graph: Graph | None,
    plan: Plan | None,
    transport: Transport | None,
    own: bool,
    checkpoint: str | int,
    checkpoints: str | Path | None = None,
) -> Trained[Evaluator]:
    graph, plan, transport = join(config, graph, plan, transport, own, checkpoint=checkpoint)
    folder = as_path(config.run.out if checkpoints is None else checkpoints)
    return Trained(Evaluator.restored(config, graph, plan, transport, folder, checkpoint), _close=own)
