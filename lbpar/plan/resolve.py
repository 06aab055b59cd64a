"""From a run file's ``parallel`` section or a plan file to a plan."""

from __future__ import annotations

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
from lbpar.plan.asked import check_layer, check_stages, given_grids, micro_batches, stages_each
from lbpar.plan.assign import assign
from lbpar.plan.segments import recomputed
from lbpar.plan.strategies import strategy_plan
from lbpar.program.plan import Pipeline, Plan
from lbpar.text import nearest

if TYPE_CHECKING:
    from lbpar.cost.machine import Machine

#: Machine on which stages of named strategies are balanced: the same on every rank, whatever the job runs on.
CUT_ON = "laptop"
#: Fields of a run file that a plan file decides.
PIPELINE = ("stages", "schedule", "micro_batches", "interleave", "stage")


def is_chosen(parallel: ParallelConfig, procs: int) -> bool:
    """Whether a run file leaves the plan, or what of it is computed again, to the cost model."""
    return (parallel.strategy == "auto" and procs > 1) or parallel.memory is not None or parallel.recompute == "auto"


def check_wanted(parallel: ParallelConfig, graph: Graph, batch: int, procs: int, most_axes: int | None = None) -> None:
    """Refuse what a plan that is to be chosen cannot be, before a machine is measured for it.

    Parameters
    ----------
    parallel, graph, batch, procs
        As for `resolve_plan`.
    most_axes : int, optional
        Of the planner.

    Raises
    ------
    PlanError
        As `resolve_plan`.
    """
    from lbpar.plan.candidates import MOST_AXES, planning_grid

    Plan(Grid(), {}, recompute=recomputed(parallel.recompute, graph) or ()).check(graph, batch)
    for name in parallel.stage:
        check_layer(name, graph, "parallel.stage")
    if parallel.strategy != "auto":
        resolve_plan(parallel, graph, batch, procs)
        return
    samples, places = check_stages(parallel, batch, procs)
    given_grids(parallel.layers, graph, samples, planning_grid(procs // places, most_axes or MOST_AXES))


def chosen_plan(config: RunConfig, graph: Graph, batch: int, procs: int, machine: Machine) -> Plan:
    """The cheapest plan on a machine, with the run file's memory limit, type, optimizer and exceptions per layer."""
    from lbpar.plan.choose import choose_plan  # rank 0 alone chooses
    from lbpar.plan.lean import fitted
    from lbpar.plan.priced import Settings
    from lbpar.plan.stage_search import best_stages

    parallel, dtype, optimizer = config.parallel, config.engine.arithmetic, optimizer_name(config.train.optimizer)
    known: dict[str, Any] = {"dtype": dtype, "optimizer": optimizer, "prefetch": config.data.prefetch}
    known |= config.engine.planned
    limit, settings = parallel.memory, Settings(graph, batch, machine, **known)
    if parallel.strategy == "auto":
        samples, places = check_stages(parallel, batch, procs)
        best = best_stages(settings, parallel, procs) if places > 1 else None
        if best is not None:
            return complete(best.priced.plan, graph)
        asked: dict[str, Any] = {"layers": parallel.layers, "recompute": parallel.recompute}
        choice = choose_plan(graph, samples, procs // places, machine, memory_limit=limit, **asked, **known)
        plan = staged(choice.plan, parallel, graph, samples, machine, dtype)
        if plan.pipeline is None:
            return complete(choice.plan, graph)
    else:
        plan = resolve_plan(parallel, graph, batch, procs)
    if limit is not None or parallel.recompute == "auto":
        may = recomputed(parallel.recompute, graph) is None
        plan = fitted(settings, parallel.strategy, plan, machine.memory if limit is None else limit, may).plan
    plan.check(graph, batch)
    return complete(plan, graph)


def staged(
    inner: Plan, parallel: ParallelConfig, graph: Graph, samples: int, machine: Machine | None, dtype: str
) -> Plan:
    """The plan with the stages and micro-batches (of so many samples) of a run file, if it has any."""
    for name in parallel.stage:
        check_layer(name, graph, "parallel.stage")
    micros, each = micro_batches(parallel), stages_each(parallel)
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
        exceptions = given_grids(parallel.layers, graph, batch, plan.grid)
        plan = replace(plan, ops={**plan.ops, **exceptions})
        theirs = {} if plan.pipeline is None else {"schedule": plan.pipeline.schedule}
        for name in PIPELINE:
            if getattr(parallel, name) not in (ParallelConfig.model_fields[name].get_default(), theirs.get(name)):
                raise PlanError(
                    f"parallel.{name}: stages, schedule and micro-batches are those of the plan file, {parallel.plan_file}; change its "
                    "`pipeline`, or name a strategy."
                )
        if plan.micro_batches > batch:
            raise PlanError(
                f"{parallel.plan_file}: pipeline.micro_batches: got {plan.micro_batches} parts of {batch} samples, expected at most {batch}."
            )
    else:
        samples, places = check_stages(parallel, batch, procs)
        grid = Grid.of(procs // places)
        given = given_grids(parallel.layers, graph, samples, grid)
        name = parallel.strategy
        if name == "auto":
            name = "data" if samples >= grid.size else "spatial"
        plan = strategy_plan(name, graph, grid, samples, given)
        plan = staged(plan, parallel, graph, samples, None, "float32")
    again = recomputed(parallel.recompute, graph)
    plan = plan if again is None else replace(plan, recompute=again)
    plan.check(graph, batch)
    return complete(plan, graph)


def complete(plan: Plan, graph: Graph) -> Plan:
    """The same plan with an entry for every layer: in a file, layers that are not named split their samples."""
    return replace(plan, ops={n.name: plan[n.name] for n in graph.ops})


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
        return replace(strategy_plan("data", graph, grid, batch, given), recompute=file.recompute)
    p = file.pipeline
    plan = Plan(grid, given, Pipeline(p.axes, p.stages, p.schedule, p.micro_batches), file.recompute)
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
    return {
        "procs": plan.grid.size,
        "grid": plan.grid.sizes,
        "ops": ops,
        "pipeline": pipeline,
        "recompute": plan.recompute,
    }
