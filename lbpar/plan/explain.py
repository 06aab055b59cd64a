"""Why a plan is what it is: per layer, in total, and beside others. The result is plain data that goes to JSON as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lbpar.cost.moves import Floats
from lbpar.cost.price import SLOTS, StepPrice, local_bytes
from lbpar.plan.choose import Choice
from lbpar.plan.priced import PricedPlan, Settings
from lbpar.plan.tables import Tables
from lbpar.program.words import layer_words
from lbpar.text import human_seconds, plan_count

#: What a step's time is spent on.
COMPUTE, AGAIN, WEIGHTS, STATISTICS, GHOSTS, PARTIAL, RESHARD, UPDATE = (
    "computation",
    "activations computed again",
    "sums of weight gradients",
    "statistics (norm, loss)",
    "ghosts (halo exchange)",
    "sums of partial results",
    "moving activations between layouts",
    "optimizer",
)


def spent_on(step: StepPrice) -> str:
    """What a step's time is spent on."""
    if step.kind == "update":
        return UPDATE
    if step.again:
        return AGAIN
    if not step.moves:
        return COMPUTE
    if ":grad" in step.what:
        return WEIGHTS
    if step.kind in ("halo", "accumulate"):
        return GHOSTS
    name = step.what.split("@")[0].rpartition(":")[2]
    if step.kind in ("allreduce", "reduce_scatter"):
        return PARTIAL if name in ("y", "dy") or name.startswith("dx") else STATISTICS
    return RESHARD


def explain(choice: Choice, model: str | None = None) -> dict[str, Any]:
    """Everything about a choice.

    Parameters
    ----------
    choice : Choice
        From `choose_plan`.
    model : str, optional
        What the network was called on the command line.

    Returns
    -------
    dict
        ``step`` (seconds, bytes, messages of one training step), ``memory``, ``recompute`` (or None), ``layers``, ``comparison``, ``space``, ``limits``,
        ``notes`` and what they were made from.
    """
    o = choice.priced
    graph, grid = o.program.graph, o.plan.grid
    machine = choice.machine.file
    rivals = runners_up(choice.tables, o) if grid == _grid(choice) else {}
    return {
        "network": model or graph.name,
        "parameters": graph.parameter_count,
        "batch": choice.batch,
        "procs": grid.size,
        "grid": list(grid.sizes),
        "machine": {
            "name": machine.name,
            "latency": machine.latency,
            "levels": [level.model_dump() for level in machine.levels],
            "compute_source": machine.compute.source,
        },
        "dtype": choice.dtype,
        "optimizer": choice.optimizer,
        "strategy": o.name,
        "step": step_numbers(o, choice.batch),
        "memory": o.memory.as_dict() | {"largest": dict(o.memory.largest), "limit": choice.limit},
        "recompute": None if o.kept is None else recomputation(o, o.kept),
        "layers": layer_rows(o, choice, rivals),
        "comparison": comparison(choice),
        "space": choice.space | {"plans": plan_count(choice.space["plans"]), "search_seconds": choice.search_seconds},
        "limits": limits(o),
        "notes": list(choice.notes),
    }


def _grid(choice: Choice) -> Any:
    sizes = choice.space["grid"]
    assert isinstance(sizes, list)
    return type(choice.plan.grid)(tuple(sizes))


def step_numbers(o: PricedPlan, batch: int) -> dict[str, Any]:
    """Totals of one step."""
    return {
        "seconds": o.seconds,
        "samples_per_second": batch / o.seconds,
        "sum": o.price.seconds,
        "compute": o.step.compute,
        "communication": o.step.communication,
        "exposed": o.step.exposed,
        "stages": len(o.plan.places),
        "bytes": o.price.bytes,
        "messages": o.price.messages,
        "by_phase": o.price.by(lambda s: s.phase),
        "by_purpose": o.price.by(spent_on),
        "by_kind": o.price.by(lambda s: s.kind),
    }


def recomputation(lean: PricedPlan, kept: PricedPlan) -> dict[str, Any]:
    """The layers that are computed again, and peak and step time with and without."""
    return {
        "layers": list(lean.plan.recompute),
        "memory": lean.memory.peak,
        "memory_kept": kept.memory.peak,
        "seconds": lean.seconds,
        "seconds_kept": kept.seconds,
    }


def limits(o: PricedPlan) -> str:
    """One sentence: what the step time is limited by."""
    if len(o.plan.places) > 1:
        delayed = ""
        if o.plan.delayed:
            delayed = (
                " Gradients are delayed, which changes the arithmetic: a step is the time from one batch to the next."
            )
        return (
            f"The busiest stage computes {100 * o.step.compute / o.seconds:.0f} % of the step, and waits for others and for communication in the "
            f"rest; on the mean stages do not compute {100 * o.step.bubble:.0f} % of it.{delayed}"
        )
    purposes = o.price.by(spent_on)
    moves = {k: v for k, v in purposes.items() if k not in (COMPUTE, AGAIN, UPDATE)}
    if not moves or o.step.exposed < 0.1 * o.seconds:
        share = o.step.compute / o.seconds if o.seconds else 1.0
        return f"Computation takes {100 * share:.0f} % of the step; communication is hidden or small."
    most = max(moves, key=lambda k: moves[k])
    return (
        f"Communication that computation does not hide takes {100 * o.step.exposed / o.seconds:.0f} % of the step; most of it is "
        f"{most} ({human_seconds(moves[most])} of {human_seconds(o.step.communication)})."
    )


def layer_rows(o: PricedPlan, choice: Choice | Settings, rivals: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per layer; ``choice`` says how it was priced."""
    program, grid = o.program, o.plan.grid
    moves: dict[str, list[StepPrice]] = {}
    compute: dict[str, float] = {}
    for s in o.price.steps:
        if s.moves and (s.bytes or s.group > 1):
            moves.setdefault(s.node, []).append(s)
        elif not s.moves:
            compute[s.node] = compute.get(s.node, 0.0) + s.seconds
    stored: dict[str, int] = {}
    for p in program.params:
        owner = p.rpartition(".")[0]
        copies = 1 if ".running_" in p else 2 + SLOTS[choice.optimizer]
        stored[owner] = stored.get(owner, 0) + copies * local_bytes(
            program, p, choice.dtype, choice.machine.half_arrays
        )
    outputs: dict[str, int] = {}
    for b in program.buffers:
        owner, _, value = b.partition("#")[0].split("@")[0].rpartition(":")
        if value == "y":
            outputs[owner] = max(
                outputs.get(owner, 0), local_bytes(program, b, choice.dtype, choice.machine.half_arrays)
            )
    rows = []
    for node in program.graph.ops:
        op_grid, again = o.plan[node.name], node.name in o.plan.recompute
        mine = moves.get(node.name, [])
        rows.append(
            {
                "layer": node.name,
                "op": node.op.kind,
                "grid": {loop: grid.ways(axes) for loop, axes in op_grid.items() if axes},
                "axes": {loop: list(axes) for loop, axes in op_grid.items() if axes},
                "words": layer_words(o.plan, node.name),
                "collectives": [
                    {
                        "kind": s.kind,
                        "group": s.group,
                        "array": s.what,
                        "phase": s.phase,
                        "purpose": spent_on(s),
                        "bytes": s.bytes,
                        "messages": s.messages,
                        "seconds": s.seconds,
                    }
                    for s in mine
                ],
                "bytes": sum(s.bytes for s in mine),
                "messages": sum(s.messages for s in mine),
                "communication_seconds": sum(s.seconds for s in mine),
                "compute_seconds": compute.get(node.name, 0.0),
                "memory_bytes": stored.get(node.name, 0) + (0 if again else outputs.get(node.name, 0)),
                "recompute": again,
                "runner_up": rivals.get(node.name),
            }
        )
    return rows


def comparison(choice: Choice) -> list[dict[str, Any]]:
    """The chosen plan and all others, priced the same way."""
    rows = []
    chosen = choice.priced.figures
    for o in (chosen, *(x for x in choice.others if (x.name, x.plan) != (chosen.name, chosen.plan))):
        fits = choice.limit is None or o.memory.peak <= choice.limit
        rows.append(
            {
                "strategy": o.name,
                "seconds": o.seconds,
                "ratio": o.seconds / choice.priced.seconds,
                "sum": o.sum,
                "compute": o.step.compute,
                "communication": o.step.communication,
                "exposed": o.step.exposed,
                "bytes": o.bytes,
                "memory": o.memory.peak,
                "fits": fits,
            }
        )
    return rows


def conditional(tables: Tables, picked: Mapping[str, int], name: str) -> Floats:
    """Cost of every candidate of a group while all others keep theirs."""
    cost = tables.nodes[name].seconds.copy()
    for (a, b), e in tables.edges.items():
        if a == name:
            cost = cost + e.table[e.rows, e.columns[picked[b]]]
        elif b == name:
            cost = cost + e.table[e.rows[picked[a]], e.columns]
    return cost


def runners_up(tables: Tables, o: PricedPlan) -> dict[str, dict[str, Any]]:
    """For every group the next best grid while its neighbours keep theirs, and what it would cost more (sum of steps).

    Empty where a layer's grid is not among the candidates, as in a plan made elsewhere.
    """
    picked: dict[str, int] = {}
    for name in tables.groups:
        number = tables.number(name, dict(o.plan[name]))
        if number is None:
            return {}
        picked[name] = number
    out = {}
    for name, members in tables.groups.items():
        cost = conditional(tables, picked, name)
        mine = cost[picked[name]]
        cost[picked[name]] = float("inf")
        if len(cost) < 2:
            continue
        best = int(cost.argmin())
        grid = tables.nodes[name].grids[best]
        words = layer_words(o.plan, name, grid)
        if words == layer_words(o.plan, name):
            words += " on other axes"
        row = {"words": words, "extra_seconds": float(cost[best] - mine)}
        out.update({m: row for m in members})
    return out
