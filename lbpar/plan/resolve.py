"""From a run file's ``parallel`` section or a plan file to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lbpar.config.optimizers import AnyOptimizer, Sgd
from lbpar.config.parallel import ParallelConfig
from lbpar.config.plan_file import PlanFile, load_plan_file, save_plan_file
from lbpar.config.run_file import RunConfig
from lbpar.errors import PlanError
from lbpar.graph.graph import Graph
from lbpar.layout.grid import Grid
from lbpar.plan.assign import assign
from lbpar.plan.strategies import strategy_plan
from lbpar.program.plan import OpGrid, Pipeline, Plan
from lbpar.text import nearest

if TYPE_CHECKING:
    from lbpar.cost.machine import Machine

#: Machine on which stages of named strategies are balanced: the same on every rank, whatever the job runs on.
CUT_ON = "laptop"
#: Micro-batches per stage where none are given: a fifth of the time or less is then idle.
MICRO_BATCHES = 4


def is_chosen(parallel: ParallelConfig, procs: int) -> bool:
    """Whether a run file leaves the plan to the cost model."""
    return parallel.strategy == "auto" and (procs > 1 or parallel.memory is not None)


def chosen_plan(config: RunConfig, graph: Graph, batch: int, procs: int, machine: Machine) -> Plan:
    """The cheapest plan on a machine, with the run file's memory limit, type, optimizer and exceptions per layer."""
    from lbpar.plan.choose import choose_plan  # rank 0 alone chooses

    parallel = config.parallel
    samples, places = check_stages(parallel, batch, procs)
    choice = choose_plan(
        graph,
        samples,
        procs // places,
        machine,
        memory_limit=parallel.memory,
        dtype=config.engine.dtype,
        optimizer=optimizer_name(config.train.optimizer),
        prefetch=config.data.prefetch,
        **config.engine.planned,
        layers=parallel.layers,
    )
    plan = staged(choice.plan, parallel, graph, samples, machine, config.engine.dtype)
    plan.check(graph, batch)
    return plan


def check_stages(parallel: ParallelConfig, batch: int, procs: int) -> tuple[int, int]:
    """Samples of a micro-batch, and places of stages; raises PlanError unless these fit the processes."""
    places = parallel.stages
    if procs % places:
        raise PlanError(
            f"parallel.stages: got {places}, which does not divide the {procs} processes of this job; start a multiple of {places}."
        )
    if parallel.interleave is not None and parallel.schedule != "interleaved":
        raise PlanError(
            f"parallel.interleave: got {parallel.interleave} with schedule {parallel.schedule}; only interleaved has several stages at a place."
        )
    if parallel.micro_batches is not None and parallel.micro_batches > batch:
        raise PlanError(
            f"parallel.micro_batches: got {parallel.micro_batches} parts of {batch} samples, expected at most {batch}."
        )
    return -(-batch // min(batch, _micro_batches(parallel))), places


def _micro_batches(parallel: ParallelConfig) -> int:
    return parallel.micro_batches or (MICRO_BATCHES * parallel.stages if parallel.stages > 1 else 1)


def staged(
    inner: Plan, parallel: ParallelConfig, graph: Graph, samples: int, machine: Machine | None, dtype: str
) -> Plan:
    """The plan with the stages and micro-batches (of so many samples) of a run file, if it has any."""
    for name in parallel.stage:
        check_layer(name, graph, "parallel.stage")
    micros, each = _micro_batches(parallel), 1
    if parallel.schedule == "interleaved":
        each = parallel.interleave or (2 if parallel.stages > 1 else 1)
    if parallel.stages == 1 and micros == 1:
        return inner
    from lbpar.cost.machine import find_machine  # most ranks never price anything
    from lbpar.plan.stages import stage_plan

    options: dict[str, Any] = {"schedule": parallel.schedule, "micro_batches": micros, "each": each}
    machine = machine or find_machine(CUT_ON)
    return stage_plan(inner, graph, samples, parallel.stages, machine, **options, given=parallel.stage, dtype=dtype)


def optimizer_name(optimizer: AnyOptimizer) -> str:
    """The optimizer as the cost model knows it: SGD with momentum keeps one more array."""
    if isinstance(optimizer, Sgd):
        return "momentum" if optimizer.momentum else "sgd"
    return optimizer.kind


def resolve_plan(parallel: ParallelConfig, graph: Graph, batch: int, procs: int) -> Plan:
    """The plan of a named strategy or a plan file, with exceptions per layer; ``auto`` means samples, or space where
    there are fewer samples than processes.

    Parameters
    ----------
    parallel : ParallelConfig
        Strategy or plan file, and exceptions per layer.
    graph : Graph
        The network, with its loss.
    batch : int
        Global number of samples.
    procs : int
        Number of processes.

    Raises
    ------
    PlanError
        A layer or loop does not exist, ways do not fit the processes, or a plan file is for something else.
    """
    if parallel.plan_file is not None:
        plan = plan_from_file(load_plan_file(parallel.plan_file), graph, batch, procs, parallel.plan_file)
        given = _given(parallel.layers, graph, batch, plan.grid)
        plan = replace(plan, ops={**plan.ops, **given})
        if parallel.stages > 1 or parallel.micro_batches is not None or parallel.stage:
            raise PlanError(
                f"parallel: stages and micro-batches are those of the plan file, {parallel.plan_file}; change its `pipeline`, or name a strategy."
            )
    else:
        samples, places = check_stages(parallel, batch, procs)
        grid = Grid.of(procs // places)
        given = _given(parallel.layers, graph, samples, grid)
        name = parallel.strategy
        if name == "auto":
            name = "data" if samples >= grid.size else "spatial"
        plan = strategy_plan(name, graph, grid, samples, given)
        plan = staged(plan, parallel, graph, samples, None, "float32")
    plan.check(graph, batch)
    return plan


def _given(
    layers: Mapping[str, Mapping[Any, int | Sequence[int]]], graph: Graph, batch: int, grid: Grid
) -> dict[str, OpGrid]:
    out: dict[str, OpGrid] = {}
    for name, ways in layers.items():
        check_layer(name, graph)
        out[name] = assign(f"parallel.layers.{name}", ways, grid)
    Plan(grid, out).check(graph, batch)  # here, where loops of one way still show
    return out


def check_layer(name: str, graph: Graph, where: str = "parallel.layers") -> None:
    """Raise PlanError, with the nearest name, if the graph has no op of this name."""
    names = [n.name for n in graph.ops]
    if name not in names:
        raise PlanError(
            f"{where}: {graph.name} has no layer {name!r}; {nearest(name, names)}its layers are {', '.join(names)}."
        )


def plan_from_file(file: PlanFile, graph: Graph, batch: int, procs: int, where: str = "plan file") -> Plan:
    """A stored plan, checked against the network, batch and processes of this run."""
    if file.procs != procs:
        raise PlanError(f"{where}: made for {file.procs} processes, but this run has {procs}; make a plan for {procs}.")
    if file.batch is not None and file.batch != batch:
        raise PlanError(
            f"{where}: made for batch {file.batch}, but this run has batch {batch}; change one of them, or remove `batch` from the plan to use it all the same."
        )
    if isinstance(file.model, str) and file.model != graph.name:
        raise PlanError(
            f"{where}: made for network {file.model!r}, but this is {graph.name!r}; make a plan for it, or remove `model` "
            "from the plan to try it all the same."
        )
    names = {n.name for n in graph.ops}
    missing, unknown = sorted(names - set(file.ops)), sorted(set(file.ops) - names)
    if unknown:
        raise PlanError(
            f"{where}: plans layer {unknown[0]!r}, which {graph.name} does not have; {nearest(unknown[0], names)}its layers are {', '.join(names)}."
        )
    grid = Grid(tuple(file.grid))
    if missing == sorted(names) and names:
        raise PlanError(f"{where}: gives no layer of {graph.name} a grid.")
    given = {name: assign(f"{where}: ops.{name}", ways, grid) for name, ways in file.ops.items()}
    if file.pipeline is None:
        return strategy_plan("data", graph, grid, batch, given)
    p = file.pipeline
    plan = Plan(grid, given, Pipeline(p.axes, p.stages, p.schedule, p.micro_batches))
    if missing:
        raise PlanError(
            f"{where}: plans stages, but gives layer {missing[0]!r} no grid; name every layer, with {{}} where nothing splits it."
        )
    return plan


def save_plan(plan: Plan, path: str | Path, *, model: str | None = None, batch: int | None = None) -> None:
    """Write a plan where `resolve_plan` can read it (YAML, or JSON by the file's ending)."""
    save_plan_file(PlanFile.model_validate({**plan_content(plan), "model": model, "batch": batch}), path)


def plan_content(plan: Plan) -> dict[str, Any]:
    """Processes, grids and stages as a plan file has them."""
    ops = {name: {loop: tuple(axes) for loop, axes in op_grid.items()} for name, op_grid in plan.ops.items()}
    pipeline = None if plan.pipeline is None else asdict(plan.pipeline)
    return {"procs": plan.grid.size, "grid": plan.grid.sizes, "ops": ops, "pipeline": pipeline}
