"""How good the planner's objective and its choice are: python tests/bench/objective.py [--plans 50] [--tries 1000] [--models …] [--procs …].

Objective: for the optimum and for random plans over the candidates, the relative difference of the tables' total from all steps of the program,
lowered, fused and with gradients in messages, one after the other. It should be within a percent.

Choice: a hill climb from the chosen plan. Each try gives one to three neighbouring groups of layers other candidate grids, and what has a shorter
predicted step is kept. Tries whose total by the tables is much longer than that of the best so far cannot be made good by overlap; they are
not lowered. It should gain no more than half a percent.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lbpar.cost.machine import find_machine
from lbpar.cost.price import price
from lbpar.cost.simulate import simulate
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.models.registry import build_model
from lbpar.plan.candidates import planning_grid
from lbpar.plan.choose import choose_plan, plan_of
from lbpar.plan.pricing import Pricing
from lbpar.plan.tables import Tables, build_tables
from lbpar.program.lowering import lower
from lbpar.program.order import BUCKET_BYTES
from lbpar.program.plan import Plan
from lbpar.solver.search import minimise

#: Networks and samples per step.
BATCHES = {"resnet50": 256, "densenet121": 256, "vgg16": 256, "inception_v3": 256, "unet3d": 4, "cosmoflow": 64}
PROCS = (4, 16, 64)
MACHINES = ("perlmutter-a100", "abci-v100")
#: Tries with a total so many times that of the best plan are not lowered.
HOPELESS = 1.02


class Climb(NamedTuple):
    """Predicted step of the chosen plan and of the best that was found [s], and the tries that were lowered."""

    before: float
    after: float
    lowered: int


class Case:
    """A network on so many processes of a machine."""

    def __init__(self, model: str, procs: int, machine: str) -> None:
        self.graph, self.batch = build_model(model).with_loss(CrossEntropy()), BATCHES.get(model, 64)
        self.machine, self.procs, self.grid = find_machine(machine), procs, planning_grid(procs)

    @cached_property
    def tables(self) -> Tables:
        """Its candidates and their costs."""
        return build_tables(self.graph, self.batch, Pricing(self.machine, self.grid))

    def seconds(self, plan: Plan) -> tuple[float, float]:
        """All steps of a plan's program one after the other, and the predicted step."""
        program = lower(self.graph, plan, self.batch, bucket_bytes=BUCKET_BYTES)
        priced = price(program, self.machine)
        return priced.seconds, simulate(program, priced, self.machine).seconds

    def differences(self, plans: int) -> Iterator[float]:
        """Objective / price - 1: of the optimum, then of random plans."""
        tables, rng = self.tables, np.random.default_rng(0)
        optimum = minimise({n: t.seconds for n, t in tables.nodes.items()}, tables.edges).choice
        chosen = [{n: int(rng.integers(len(t.grids))) for n, t in tables.nodes.items()} for _ in range(plans)]
        for choice in (optimum, *chosen):
            yield tables.total(choice) / self.seconds(plan_of(tables, choice, self.grid))[0] - 1

    def climb(self, tries: int, seed: int = 0) -> Climb:
        """A hill climb of so many tries from the chosen plan."""
        plan = choose_plan(self.graph, self.batch, self.procs, self.machine).plan
        tables, rng = self.tables, np.random.default_rng(seed)
        names = list(tables.nodes)
        beside = {n: [b if a == n else a for a, b in tables.edges if n in (a, b)] for n in names}
        ops, best = dict(plan.ops), self.seconds(plan)[1]
        numbers = {n: tables.number(n, dict(plan[n])) for n in names}
        known = all(
            i is not None for i in numbers.values()
        )  # else a named strategy's, whose total the tables do not know
        total, first, lowered = self._total(numbers) if known else np.inf, best, 0
        for _ in range(tries):
            picked = [names[rng.integers(len(names))]]
            while len(picked) < rng.integers(1, 4) and beside[picked[-1]]:
                picked.append(beside[picked[-1]][rng.integers(len(beside[picked[-1]]))])
            trial = {n: int(rng.integers(len(tables.nodes[n].grids))) for n in picked}
            if known and self._total(numbers | trial) > HOPELESS * total:
                continue
            changed = ops | {m: tables.nodes[n].grids[i] for n, i in trial.items() for m in tables.groups[n]}
            seconds = self.seconds(Plan(self.grid, changed))[1]
            lowered += 1
            if seconds < best:
                ops, best, numbers = changed, seconds, numbers | trial
                total = self._total(numbers) if known else np.inf
        return Climb(first, best, lowered)

    def _total(self, numbers: Mapping[str, int | None]) -> float:
        return self.tables.total({n: i for n, i in numbers.items() if i is not None})


def main() -> int:
    """Print a row per case; 1 if a plan's objective differs by more than a percent, or a climb gains more than half a percent."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--plans", type=int, default=50)
    p.add_argument("--tries", type=int, default=1000)
    p.add_argument("--models", nargs="+", default=list(BATCHES))
    p.add_argument("--procs", type=int, nargs="+", default=list(PROCS))
    p.add_argument("--machines", nargs="+", default=list(MACHINES))
    args = p.parse_args()
    print(
        "| network | processes | machine | optimum % | worst random plan % | chosen ms | climb gains % | tries lowered |"
    )
    print("| --- |" + " --- |" * 7)
    bad = False
    for model, procs, machine in ((m, n, x) for m in args.models for n in args.procs for x in args.machines):
        case, row = Case(model, procs, machine), f"| {model} | {procs} | {machine} |"
        if args.plans:
            first, *rest = (100 * d for d in case.differences(args.plans))
            most = max(rest, key=abs)
            bad |= max(abs(first), abs(most)) > 1
            row += f" {first:+.3f} | {most:+.3f} |"
        if args.tries:
            found = case.climb(args.tries)
            gain = 100 * (1 - found.after / found.before)
            bad |= gain > 0.5
            row += f" {1e3 * found.before:.3f} | {gain:.2f} | {found.lowered} |"
        print(row, flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
