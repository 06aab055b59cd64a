"""The points of a study as the cost model sees them, for any number of processes, without running any."""

from __future__ import annotations

from typing import Any

from lbpar.config.run_file import RunConfig
from lbpar.cost.machine import Machine
from lbpar.errors import PlanError
from lbpar.plan.explain import step_numbers
from lbpar.plan.priced import Settings
from lbpar.plan.resolve import chosen_plan, optimizer_name
from lbpar.train.setup import build_graph


def predict(config: RunConfig, procs: int, machine: Machine) -> dict[str, Any]:
    """What the planner expects of a point: ``predicted``; ``idle_ranks``: how many processes get no sample in some layer; ``used_ranks``: over how many the
    layer is split that is split most, the others repeating what one of these does.

    Parameters
    ----------
    config : RunConfig
        Of the point; its plan is chosen where it says ``auto``.
    procs : int
    machine : Machine

    Returns
    -------
    dict
        As `lbpar.study.measure.measure` gives it, without measured figures; ``error`` where no plan fits.
    """
    graph, batch, parallel = build_graph(config), config.train.batch, config.parallel
    known = {"optimizer": optimizer_name(config.train.optimizer), **config.engine.planned}
    settings = Settings(graph, batch, machine, config.engine.arithmetic, prefetch=config.data.prefetch, **known)
    try:
        best = settings.priced(parallel.strategy, chosen_plan(config, graph, batch, procs, machine))
    except PlanError as error:
        return {"error": str(error)}
    ways = max((best.plan.grid.ways(best.plan[n.name].get("N", ())) for n in graph.ops), default=1)
    return {
        "predicted": step_numbers(best, batch) | {"memory": best.memory.peak},
        "grid": str(best.plan.grid),
        "machine": machine.name,
        "strategy": best.name,
        "idle_ranks": procs * (ways - batch) // ways if ways > batch else 0,
        "used_ranks": best.plan.used,
    }
