"""Whether a hill climb finds a faster plan than the planner: python tests/bench/hill_climb.py [--tries 1000] [--models …] [--procs …].

From the chosen plan, each try gives one to three neighbouring groups of layers other candidate grids, lowers, fuses and prices the program, and keeps
what has a shorter predicted step.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from lbpar.cost.machine import find_machine
from lbpar.graph.models.registry import build_model
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.plan.choose import Settings, choose_plan
from lbpar.program.plan import Plan
from tests.bench.objective import BATCHES, MACHINES, PROCS


def climb(model: str, procs: int, machine: str, tries: int, seed: int = 0) -> tuple[float, float]:
    """Step time of the chosen plan and of the best that the climb finds [s]."""
    graph, m, batch = build_model(model).with_loss(CrossEntropy()), find_machine(machine), BATCHES.get(model, 64)
    choice, rng = choose_plan(graph, batch, procs, m), np.random.default_rng(seed)
    settings, tables = Settings(graph, batch, m, "float32", "momentum"), choice.tables
    names = list(tables.nodes)
    beside = {n: [b if a == n else a for a, b in tables.edges if n in (a, b)] for n in names}
    ops, best = dict(choice.plan.ops), choice.outcome.seconds
    for _ in range(tries):
        picked = [names[rng.integers(len(names))]]
        while len(picked) < rng.integers(1, 4) and beside[picked[-1]]:
            picked.append(beside[picked[-1]][rng.integers(len(beside[picked[-1]]))])
        trial = dict(ops)
        for name in picked:
            grids = tables.nodes[name].grids
            op_grid = grids[rng.integers(len(grids))]
            trial.update(dict.fromkeys(tables.groups[name], op_grid))
        seconds = settings.outcome("try", Plan(choice.plan.grid, trial)).seconds
        if seconds < best:
            ops, best = trial, seconds
    return choice.outcome.seconds, best


def main() -> int:
    """Print a row per case; 1 if a climb gains more than half a percent anywhere."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--tries", type=int, default=1000)
    p.add_argument("--models", nargs="+", default=list(BATCHES))
    p.add_argument("--procs", type=int, nargs="+", default=list(PROCS))
    p.add_argument("--machines", nargs="+", default=list(MACHINES))
    args = p.parse_args()
    print("| network | processes | machine | chosen ms | climb ms | gain % |\n| --- | --- | --- | --- | --- | --- |")
    worst = 0.0
    for model in args.models:
        for procs in args.procs:
            for machine in args.machines:
                before, after = climb(model, procs, machine, args.tries)
                gain = 100 * (1 - after / before)
                worst = max(worst, gain)
                print(
                    f"| {model} | {procs} | {machine} | {1e3 * before:.3f} | {1e3 * after:.3f} | {gain:.2f} |",
                    flush=True,
                )
    return int(worst > 0.5)


if __name__ == "__main__":
    sys.exit(main())
