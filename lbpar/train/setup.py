"""From a run file to what training needs: the network with its loss, the plan, the engine, the transport, the data."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from lbpar.config.run_file import AUTO, RunConfig
from lbpar.data.dataset import Dataset
from lbpar.data.normalise import Normalisation, Normalisations
from lbpar.data.open import open_dataset, open_named
from lbpar.data.patches.checks import check_patches
from lbpar.errors import ConfigError
from lbpar.graph.graph import TARGET, Graph
from lbpar.graph.norm_stats import with_norm_stats
from lbpar.layout.grid import Grid
from lbpar.models.load import load_graph, with_losses
from lbpar.plan.resolve import check_wanted, chosen_plan, is_chosen, resolve_plan
from lbpar.program.plan import Plan
from lbpar.runtime.devices import over_devices
from lbpar.text import flatten
from lbpar.transport.base import Transport
from lbpar.transport.launch import connect
from lbpar.transport.together import check_alike, together


def build_graph(config: RunConfig, graph: Graph | None = None) -> Graph:
    """The network of a run file, followed by its loss, or the one that is given; ``parallel.norm`` holds for both."""
    if graph is not None:
        return with_norm_stats(graph, config.parallel.norm)
    return with_losses(load_graph(config.model, config.parallel.norm), config.train, metrics=True)


def build_plan(
    config: RunConfig, graph: Graph, procs: int, batch: int | None = None, transport: Transport | None = None
) -> Plan:
    """The plan that a run file asks for on so many processes, chosen by cost where it says ``auto``.

    With a transport, rank 0 chooses for all (two ranks may price differently in the last digit), and the call is collective.
    """
    batch = config.train.batch if batch is None else batch
    if not is_chosen(config.parallel, procs):
        return resolve_plan(config.parallel, graph, batch, procs)
    alone, plan = transport is None or transport.size == 1, None
    with nullcontext() if transport is None else together(transport):
        if transport is None or transport.rank == 0:
            check_wanted(config.parallel, graph, batch, procs)
    if config.machine == AUTO or alone:
        from lbpar.calibrate.machine import machine_of  # imports what most ranks of a job never use

        measured = machine_of(config.machine, config.engine, transport)
    if transport is None or alone:
        return chosen_plan(config, graph, batch, procs, measured)
    with together(transport):
        if transport.rank == 0:
            from lbpar.cost.machine import find_machine

            plan = chosen_plan(
                config, graph, batch, procs, measured if config.machine == AUTO else find_machine(config.machine)
            )
    chosen: Plan = transport.bcast(plan)
    return chosen


def check_asked(transport: Transport, config: RunConfig, graph: Graph, **options: object) -> None:
    """Refuse ranks that were asked for different things; before anything else is done together. Collective over all ranks.

    Parameters
    ----------
    transport : Transport
    config, graph
        What each rank has read and built. Files of data may have another path on each rank; their content is compared later.
    **options
        What else was asked for, by name.
    """
    fields = flatten(config.model_dump(mode="json", by_alias=True), ".")
    for split in ("data.train", "data.test"):
        if fields[split] not in (None, "synthetic"):
            fields[split] = "a file"
    check_alike(transport, {**options, **fields, "network": graph})


def join(
    config: RunConfig,
    graph: Graph | None = None,
    plan: Plan | None = None,
    transport: Transport | None = None,
    own: bool = False,
    **options: object,
) -> tuple[Graph, Plan, Transport]:
    """Meet the other ranks, make sure that all were asked for the same, and agree on the plan. Collective over all ranks.

    Parameters
    ----------
    config, **options
        See `check_asked`.
    graph, plan, optional
        Default: the run file's.
    transport : Transport, optional
        Default: that of this job.
    own : bool
        The transport may be replaced by one of the plan's grid; so may the default.

    Returns
    -------
    Graph, Plan, Transport
        The last two of the same grid.

    Raises
    ------
    LbparError
        The ranks disagree, or their number, the plan and the transport do not fit.
    """
    graph = build_graph(config, graph)
    own, given = own or transport is None, plan is not None
    transport = connect() if transport is None else transport
    check_asked(transport, config, graph, **options, plan=given)
    procs, wanted = transport.size, config.parallel.procs
    if wanted not in (None, procs):
        raise ConfigError(
            f"parallel.procs: the run file asks for {wanted}, but this job has {procs}; start {wanted} or change the field."
        )
    if plan is None:
        plan = build_plan(config, graph, procs, transport=transport)
    check_alike(transport, {"plan": plan})
    if plan.grid.size != procs:
        raise ConfigError(f"plan: made for {plan.grid.size} processes, but {procs} were started.")
    if own:
        return graph, plan, over_devices(connect_to(plan.grid, transport), config.engine, plan)
    if transport.grid != plan.grid:
        raise ConfigError(
            f"transport: has the grid {transport.grid}, but the plan has {plan.grid}; make one of that grid."
        )
    return graph, plan, transport


def connect_to(grid: Grid, transport: Transport | None = None) -> Transport:
    """A transport over the given grid. Collective over all ranks."""
    if transport is None or transport.grid != grid:
        if transport is not None:
            transport.close()
        return connect(grid)
    return transport


def build_dataset(
    config: RunConfig,
    graph: Graph,
    split: str,
    dtype: Any,
    like: Normalisation | Normalisations | None = None,
    share: tuple[int, int] = (0, 1),
) -> Dataset | None:
    """One split of a run file's data, checked against the network; None for a test split that is not given."""
    if split == "test" and config.data.test is None:
        return None
    data, seed, cut = config.data, config.train.seed, config.data.patches is not None
    if cut and getattr(data, split) == "synthetic":
        raise ConfigError(f"data.patches: data.{split} is synthetic, of the network's own size; name a file.")
    dataset: Dataset
    if is_named(graph):
        changes = like if isinstance(like, Normalisations) else None
        dataset = open_named(data, split, *wanted_parts(graph), dtype=dtype, seed=seed, share=share, like=changes)
    else:
        assert not isinstance(like, Normalisations)
        wanted = wanted_data(graph, cut)
        dataset = open_dataset(data, split, **wanted, dtype=dtype, seed=seed, share=share, like=like)
    if cut:
        check_cut(graph, dataset)
    return dataset


def check_cut(graph: Graph, dataset: Dataset) -> None:
    """Refuse samples that a network's patches cannot be cut of."""
    shapes = {name: shape[1:] for name, shape in graph.shapes(1).items()}
    compared = {o: (target, shapes[o], loss.labels) for o, (target, loss) in graph.compared.items()}
    check_patches(dataset, {n.name: shapes[n.name] for n in graph.samples}, compared)


def wanted_data(graph: Graph, cut: bool = False) -> dict[str, Any]:
    """``input_shape``, ``target_shape`` (of patches none), and ``classes`` (with ``ignore``) or ``limits`` of the data that a network with a loss takes."""
    inputs, targets = wanted_parts(graph)
    shapes = dict.fromkeys(("input_shape", "target_shape")) if cut else {}
    return {**next(iter(inputs.values())), **next(iter(targets.values())), **shapes}


def wanted_parts(graph: Graph) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The same of each input, and of each target, by name."""
    shapes, targets = graph.shapes(1), dict[str, dict[str, Any]]()
    for output, (target, loss) in graph.compared.items():
        classes = {"classes": shapes[output][-1], "ignore": getattr(loss, "ignore_index", None)}
        checks = classes if loss.labels else {"limits": loss.limits}
        targets.setdefault(target, {"target_shape": shapes[target][1:], **checks})
    return {n.name: {"input_shape": shapes[n.name][1:]} for n in graph.samples}, targets


def is_named(graph: Graph) -> bool:
    """Whether inputs or targets of a network have names."""
    return (graph.samples[0].name, *(n.name for n in graph.targets)) != ("input", TARGET) or len(graph.samples) > 1
