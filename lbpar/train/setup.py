"""From a run file to what training needs: the network with its loss, the plan, the engine, the transport, the data."""

from __future__ import annotations

from typing import Any

from lbpar.calibrate.machine import AUTO, machine_of
from lbpar.config.run_file import RunConfig
from lbpar.config.training import TrainConfig
from lbpar.cost.machine import find_machine
from lbpar.data.dataset import Dataset, open_dataset
from lbpar.data.normalise import Normalisation
from lbpar.errors import ConfigError
from lbpar.graph.graph import TARGET, Graph
from lbpar.graph.load import load_graph
from lbpar.graph.ops.losses import CrossEntropy, Loss, make_loss
from lbpar.layout.grid import Grid
from lbpar.plan.resolve import chosen_plan, is_chosen, resolve_plan
from lbpar.program.plan import Plan
from lbpar.transport.base import Transport
from lbpar.transport.launch import connect
from lbpar.transport.together import check_alike, together


def build_graph(config: RunConfig) -> Graph:
    """The network of a run file, with the norm statistics of ``parallel.norm``, followed by its loss."""
    return load_graph(config.model, config.parallel.norm).with_loss(build_loss(config.train))


def build_loss(train: TrainConfig) -> Loss:
    """The loss of a run file."""
    if train.label_smoothing and train.loss != CrossEntropy.kind:
        raise ConfigError(
            f"train.label_smoothing: got {train.label_smoothing} with loss {train.loss}; it needs cross_entropy."
        )
    return make_loss(train.loss, train.label_smoothing)


def check_procs(config: RunConfig, procs: int) -> None:
    """Refuse to train on another number of processes than the run file asks for."""
    wanted = config.parallel.procs
    if wanted is not None and wanted != procs:
        raise ConfigError(
            f"parallel.procs: the run file asks for {wanted}, but this job has {procs}; start {wanted} or change the field."
        )


def build_plan(
    config: RunConfig, graph: Graph, procs: int, batch: int | None = None, transport: Transport | None = None
) -> Plan:
    """The plan that a run file asks for on so many processes, chosen by cost where it says ``auto``.

    With a transport, rank 0 chooses for all (two ranks may price differently in the last digit), and the call is collective.
    """
    batch = config.train.batch if batch is None else batch
    if not is_chosen(config.parallel, procs):
        return resolve_plan(config.parallel, graph, batch, procs)
    if transport is None or transport.size == 1:
        return chosen_plan(config, graph, batch, procs, machine_of(config.machine, config.engine))
    measured = machine_of(AUTO, config.engine, transport) if config.machine == AUTO else None
    plan = None
    with together(transport):
        if transport.rank == 0:
            plan = chosen_plan(config, graph, batch, procs, measured or find_machine(config.machine))
    chosen: Plan = transport.bcast(plan)
    return chosen


def check_ranks(config: RunConfig, graph: Graph, plan: Plan, transport: Transport) -> None:
    """Refuse ranks that would train different things. Collective over all ranks."""
    check_alike(transport, {"network": graph, "plan": plan, "section `train` of the run file": config.train})


def connect_to(grid: Grid, transport: Transport | None = None) -> Transport:
    """A transport over the given grid. Collective over all ranks."""
    if transport is None or transport.grid != grid:
        if transport is not None:
            transport.close()
        return connect(grid)
    return transport


def build_dataset(
    config: RunConfig, graph: Graph, split: str, dtype: Any, like: Normalisation | None = None
) -> Dataset | None:
    """One split of a run file's data, checked against the network; None for a test split that is not given."""
    if split == "test" and config.data.test is None:
        return None
    shapes = graph.shapes(1)
    loss = graph.loss
    classes = shapes[graph.output][-1] if isinstance(loss.op, Loss) and loss.op.labels else None  # type: ignore[union-attr]
    return open_dataset(
        config.data,
        split,
        input_shape=shapes["input"][1:],
        target_shape=shapes[TARGET][1:],
        classes=classes,
        dtype=dtype,
        seed=config.train.seed,
        like=like,
    )
