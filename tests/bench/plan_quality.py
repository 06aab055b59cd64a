"""Are predicted step times right, and right about which plan is fastest?

    mpirun -n 2 python tests/bench/plan_quality.py [--engine onednn] [--random 20] [--machine own|auto|m.yaml] [--json FILE]

Five small networks; all named strategies, the planner's choice and random plans are run and timed, in turn; medians count. Per network: the
rank correlation of predicted and measured times, the regret of the planner's choice (measured, against the best measured), and by how
much predictions are off. Plans that are the same program are measured once. `--machine own` (the default) does what `lbpar calibrate --config` would do for each network, `--parts` times, with
a part of the measurements after each, because cores are tens of percents faster at some times than at others. The planner chooses by the first; each part is
compared with the calibration before it, and the median of these comparisons counts. A calibration that would be refused is done again, as its user would.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from lbpar.calibrate.command import SECONDS
from lbpar.calibrate.machine import machine_of, measure_machine
from lbpar.calibrate.samples import samples
from lbpar.config.engine import EngineConfig
from lbpar.cost.machine import Machine
from lbpar.engine.registry import get_engine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.models.registry import build_model
from lbpar.plan.choose import choose_plan
from lbpar.plan.priced import PricedPlan, Settings
from lbpar.program.random_plan import random_plan
from lbpar.runtime.executor import Executor
from lbpar.runtime.initial import initial_state
from lbpar.runtime.optim.rules import SGD
from lbpar.transport.base import Transport
from lbpar.transport.launch import connect, run_main


def wide() -> Graph:
    """Three wide linear layers."""
    g = GraphBuilder(input=(2048,))
    x = g.relu(g.linear(g.input, 2048))
    return g.build(g.linear(g.relu(g.linear(x, 2048)), 1024))


def vgg_like() -> Graph:
    """Six convolutions and three linear layers on 32^2."""
    g = GraphBuilder(input=(32, 32, 3))
    x = g.input
    for filters in (16, 32, 64):
        x = g.relu(g.conv(x, filters, 3, pad=1))
        x = g.max_pool(g.relu(g.conv(x, filters, 3, pad=1)), 2)
    x = g.relu(g.linear(g.flatten(x), 512))
    return g.build(g.linear(g.relu(g.linear(x, 512)), 10))


def volume() -> Graph:
    """A 3-D network on 64^3."""
    g = GraphBuilder(input=(64, 64, 64, 1))
    x = g.input
    for filters in (8, 16, 32, 32):
        x = g.max_pool(g.relu(g.conv(x, filters, 3, pad=1)), 2)
    return g.build(g.linear(g.flatten(x), 8))


NETWORKS: dict[str, tuple[Callable[[], Graph], int]] = {
    "CIFAR ResNet": (lambda: build_model("resnet18", input=(32, 32, 3), classes=10, width=0.25), 32),
    "VGG-like": (vgg_like, 32),
    "wide FC": (wide, 64),
    "U-Net 512": (lambda: build_model("unet2d", input=(512, 512, 1), width=0.0625), 1),
    "3-D CNN 64": (volume, 2),
}


#: Calibrations until one is not in doubt.
TRIES = 4


class Timed:
    """A plan made ready to run on this rank."""

    def __init__(self, settings: Settings, priced: PricedPlan, engine: Any, transport: Any) -> None:
        program = priced.program
        rank, dtype = transport.rank, np.dtype(engine.dtype)
        drawn = initial_state(settings.graph.params(), program.params, rank, 1, dtype)
        state = {name: engine.from_host(a) for name, a in drawn.items()}
        self.transport = transport
        self.executor = Executor(program, engine, transport, state)
        self.feeds = {}
        rng = np.random.default_rng(0)
        for buffer in program.feeds:
            info = program.buffers[buffer]
            shape = info.layout.local_shape(rank)
            labels = info.dtype == "int64"
            self.feeds[buffer] = np.zeros(shape, np.int64) if labels else rng.standard_normal(shape).astype(dtype)
        params = settings.graph.params()
        self.rule = SGD(1e-6, momentum=0.9)
        self.rule.engine = engine
        self.rule.init_state({n: a for n, a in state.items() if params[n].kind != "statistic"})
        self.executor.on_update = self.rule.step

    def step(self) -> float:
        """Run one step; seconds."""
        self.transport.barrier()
        start = perf_counter()
        self.executor.run(self.feeds)
        return perf_counter() - start

    def sample(self) -> float:
        """Seconds of the second of two steps: a training run finds its own arrays in the caches, not another plan's."""
        self.step()
        return self.step()


def calibrated(args: argparse.Namespace, graph: Graph, batch: int, transport: Transport) -> Machine:
    """The machine that predictions are made for."""
    engine = EngineConfig(name=args.engine, threads=1)
    if args.machine != "own":
        return machine_of(args.machine, engine, transport)
    for _ in range(TRIES):
        began = perf_counter()
        found = measure_machine(engine, samples(), 9, transport, SECONDS, network=(graph, batch))
        doubts = transport.bcast(found.trust.doubts())
        if transport.rank == 0:
            print(
                f"calibrated in {perf_counter() - began:.0f} s, whole steps {found.trust.whole.factor:.2f} times as long, moves of activations {found.trust.whole.between:.2f}; in doubt: {'; '.join(doubts) or 'nothing'}",
                flush=True,
            )
        if not doubts:
            break
    return Machine(found.file)


def ranks(values: list[float]) -> np.ndarray:
    """Place of each value in increasing order."""
    order = np.argsort(values)
    out = np.empty(len(values))
    out[order] = np.arange(len(values))
    return out


def main() -> int:
    """Measure all networks; rank 0 prints."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--engine", default="auto")
    p.add_argument("--machine", default="own")
    p.add_argument("--random", type=int, default=20)
    p.add_argument("--repeats", type=int, default=9)
    p.add_argument("--parts", type=int, default=3, help="calibrations of each network, and parts of the repeats")
    p.add_argument("--least", action="store_true", help="the least of all repeats counts: for a machine that is busy")
    p.add_argument("--networks", nargs="+", default=list(NETWORKS))
    p.add_argument("--all", action="store_true", help="print every plan")
    p.add_argument("--json")
    args = p.parse_args()
    transport = connect()
    report: dict[str, Any] = {}
    errors: dict[str, float] = {}
    if transport.rank == 0:
        print(
            "| network | plans | rank correlation | chosen | best measured | regret | predicted / measured | mean error | worst |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in args.networks:
        make, batch = NETWORKS[name]
        graph = make().with_loss(CrossEntropy())
        machines = [calibrated(args, graph, batch, transport)]
        choice = choose_plan(graph, batch, transport.size, machines[0])
        settings = Settings(graph, batch, machines[0], "float32", "momentum")
        rng = Random(1)
        outcomes = [
            choice.priced,
            *(settings.priced(o.name, o.plan) for o in choice.others if o.name != choice.priced.name),
        ]
        plans = [random_plan(graph, batch, transport.size, rng) for _ in range(args.random)]
        outcomes += [settings.priced(f"random {i}", plan) for i, plan in enumerate(plans)]
        outcomes = [
            o for i, o in enumerate(outcomes) if all(o.program.steps != other.program.steps for other in outcomes[:i])
        ]
        taken: list[list[list[float]]] = []
        for part in range(args.parts):
            if args.machine == "own" and part:
                machines.append(calibrated(args, graph, batch, transport))
            # Each has an engine to itself, and so memory, as a training run does; where that lies makes up to 15 % of a step.
            timed = [Timed(settings, o, get_engine(args.engine, "float32", 1), transport) for o in outcomes]
            for t in timed:
                t.step()  # libraries warm up
            taken.append([[] for _ in outcomes])
            for _ in range(
                -(-args.repeats // args.parts)
            ):  # in turn, so that whatever else the machine does meets all plans alike
                for t, seconds in zip(timed, taken[-1], strict=True):
                    seconds.append(t.sample())
        counts = min if args.least else median
        slowest = np.max(transport.allgather_obj(taken), axis=0)  # parts, plans, repeats
        measured = [counts(slowest[:, i].ravel()) for i in range(len(outcomes))]
        machines = machines if args.machine == "own" else machines * args.parts
        every = [
            [replace(settings, machine=m, known=[]).priced(o.name, o.plan).seconds for m in machines] for o in outcomes
        ]
        ratios = [
            median(said / counts(part[i]) for said, part in zip(seconds, slowest, strict=True))
            for i, seconds in enumerate(every)
        ]
        predicted = [median(seconds) for seconds in every]
        correlation = float(np.corrcoef(ranks(predicted), ranks(measured))[0, 1])
        best = int(np.argmin(measured))
        off = [r - 1 for r in ratios]
        errors |= {f"{name}, {o.name}": e for o, e in zip(outcomes, off, strict=True)}
        regret = measured[0] / measured[best] - 1
        rows = [
            {"plan": o.name, "predicted": a, "measured": b, "ratio": r}
            for o, a, b, r in zip(outcomes, predicted, measured, ratios, strict=True)
        ]
        report[name] = {"rank_correlation": correlation, "regret": regret, "plans": rows}
        if transport.rank == 0:
            print(
                f"{len(machines)} calibrations predict {100 * median(max(e) / min(e) - 1 for e in every):.0f} % apart",
                flush=True,
            )
            print(
                f"| {name} | {len(rows)} | {correlation:.2f} | {outcomes[0].name}, {1e3 * measured[0]:.1f} ms | {outcomes[best].name}, "
                f"{1e3 * measured[best]:.1f} ms | {100 * regret:.0f} % | {ratios[0]:.2f} "
                f"| {100 * np.mean(np.abs(off)):.0f} % | {100 * max(off, key=abs):+.0f} % |",
                flush=True,
            )
            if args.all:
                for o, a, b, r in zip(outcomes, predicted, measured, ratios, strict=True):
                    print(
                        f"    {o.name}: {1e3 * b:.2f} ms measured, {1e3 * a:.2f} predicted, {100 * (r - 1):+.0f} %",
                        flush=True,
                    )
    if transport.rank == 0:
        worst = max(errors, key=lambda plan: abs(errors[plan]))
        print(
            f"{len(errors)} plans: predictions are off by {100 * np.mean(np.abs(list(errors.values()))):.1f} % on average (10 wanted), by "
            f"{100 * errors[worst]:+.1f} % at worst (15 wanted; {worst})"
        )
    if args.json and transport.rank == 0:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(report, f, indent=2)
    transport.close()
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
