"""What the planner minimises against the price of the program that runs: python tests/bench/objective.py [--plans 50] [--models …] [--procs …].

For the optimum and for random plans over the candidates, the relative difference of the tables' total from all steps of the program, lowered,
fused and with gradients in messages, one after the other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import numpy as np

from lbpar.cost.machine import find_machine
from lbpar.graph.models.registry import build_model
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.plan.candidates import planning_grid
from lbpar.plan.choose import Settings, plan_of
from lbpar.plan.pricing import Pricing
from lbpar.plan.tables import build_tables
from lbpar.solver.search import minimise

#: Networks and samples per step.
BATCHES = {"resnet50": 256, "densenet121": 256, "vgg16": 256, "inception_v3": 256, "unet3d": 4, "cosmoflow": 64}
PROCS = (4, 16, 64)
MACHINES = ("perlmutter-a100", "abci-v100")


def differences(model: str, procs: int, machine: str, plans: int) -> Iterator[float]:
    """Objective / price - 1: of the optimum, then of random plans."""
    graph, m, grid = build_model(model).with_loss(CrossEntropy()), find_machine(machine), planning_grid(procs)
    tables = build_tables(graph, BATCHES.get(model, 64), Pricing(m, grid))
    settings, rng = Settings(graph, BATCHES.get(model, 64), m, "float32", "momentum"), np.random.default_rng(0)
    optimum = minimise({n: t.seconds for n, t in tables.nodes.items()}, tables.edges).choice
    chosen = [{n: int(rng.integers(len(t.grids))) for n, t in tables.nodes.items()} for _ in range(plans)]
    for choice in (optimum, *chosen):
        yield tables.total(choice) / settings.outcome("", plan_of(tables, choice, grid)).price.seconds - 1


def main() -> int:
    """Print a row per case; 1 if any plan differs by more than a percent."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--plans", type=int, default=50)
    p.add_argument("--models", nargs="+", default=list(BATCHES))
    p.add_argument("--procs", type=int, nargs="+", default=list(PROCS))
    p.add_argument("--machines", nargs="+", default=list(MACHINES))
    args = p.parse_args()
    print("| network | processes | machine | optimum % | worst of random plans % |\n| --- | --- | --- | --- | --- |")
    worst = 0.0
    for model in args.models:
        for procs in args.procs:
            for machine in args.machines:
                first, *rest = (100 * d for d in differences(model, procs, machine, args.plans))
                most = max(rest, key=abs, default=0.0)
                worst = max(worst, abs(first), abs(most))
                print(f"| {model} | {procs} | {machine} | {first:+.3f} | {most:+.3f} |", flush=True)
    return int(worst > 1)


if __name__ == "__main__":
    sys.exit(main())
