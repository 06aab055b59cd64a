"""`python -m lbpar.selftest`: check an engine against the reference engine in float64, on one rank and on simulated ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from random import Random

import numpy as np

from lbpar.engine.base import Engine
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.registry import NAMES, get_engine
from lbpar.graph.graph import Graph
from lbpar.runtime.optim.sgd import SGD
from lbpar.selftest.networks import networks
from lbpar.train.progress import print_table
from lbpar.verify.compare import Reference, relative, verify_virtual
from lbpar.verify.plans import random_plan

TOLERANCES = {"float64": 1e-10, "float32": 2e-4}
BATCH, PROCS, SEED = 5, 6, 1


def parser() -> argparse.ArgumentParser:
    """Command-line options."""
    p = argparse.ArgumentParser(
        prog="lbpar selftest",
        description="Train small networks that use every op for one step, and compare every tensor with the reference engine in float64.",
    )
    p.add_argument("--engine", choices=NAMES, default="auto", help="the engine to check")
    p.add_argument(
        "--plans", type=int, default=3, metavar="N", help=f"random plans on {PROCS} simulated ranks per network"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Check an engine in float64 and float32; 1 if something differs."""
    args = parser().parse_args(argv)
    rows, failed = [], False
    for dtype, tolerance in TOLERANCES.items():
        engine = get_engine(args.engine, dtype)
        for name, graph in networks().items():
            alone, ranks = check(graph, engine, args.plans)
            good = max(alone, ranks) <= tolerance
            failed |= not good
            rows.append(
                {
                    "engine": engine.name,
                    "dtype": dtype,
                    "network": name,
                    "against float64": alone,
                    f"{PROCS} ranks against 1": ranks,
                    "": "ok" if good else "WRONG",
                }
            )
    print_table(rows, title="worst relative differences of outputs, gradients, updated weights")
    print("selftest: " + ("FAILED" if failed else "passed"), flush=True)
    return int(failed)


def check(graph: Graph, engine: Engine, plans: int) -> tuple[float, float]:
    """Worst relative differences: of one rank from the float64 reference, of random plans from one rank."""
    exact = _reference(graph, NumpyEngine(np.float64))
    ours = _reference(graph, engine)
    parts = {}
    for value, whole in exact.values.items():
        if value.rpartition(":")[2] in ("y", "dy", "grad") or ":" not in value:
            difference = np.abs(ours.values[value] - whole).max() if whole.size else 0.0
            parts[value] = float(difference), float(np.abs(whole).max()) if whole.size else 0.0
    random = Random(SEED)
    ranks = [verify_virtual(ours, random_plan(graph, BATCH, PROCS, random)).worst for _ in range(plans)]
    return max(relative([parts]).values()), max(ranks, default=0.0)


def _reference(graph: Graph, engine: Engine) -> Reference:
    return Reference(graph, BATCH, engine, SEED, lambda: SGD(0.1, momentum=0.9, weight_decay=1e-3), 0.1)
