"""`python -m lbpar.selftest`: check an engine against the reference engine in float64, on one rank and on simulated ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from random import Random

from lbpar.engine.base import Engine
from lbpar.engine.registry import BFLOAT16, NAMES, get_engine
from lbpar.errors import LbparError
from lbpar.graph.graph import Graph
from lbpar.runtime.optim.rules import SGD
from lbpar.selftest.networks import networks
from lbpar.train.progress import print_table
from lbpar.verify.compare import Reference, Update, measure, verify_virtual
from lbpar.verify.oracle import oracle
from lbpar.verify.plans import random_plan
from lbpar.verify.run import TOLERANCES

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
    """Check an engine in every type that it has; 1 if something differs."""
    args = parser().parse_args(argv)
    rows, failed, left_out = [], False, ""
    for dtype, tolerance in TOLERANCES.items():
        try:
            engine = get_engine(args.engine, dtype)
        except LbparError as error:
            if dtype != BFLOAT16:
                raise
            left_out = f"; without bfloat16 ({error})"
            continue
        for name, graph in networks().items():
            alone, ranks = check(graph, engine, args.plans, dtype)
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
    print(f"selftest: {'FAILED' if failed else 'passed'}{left_out}", flush=True)
    return int(failed)


def check(graph: Graph, engine: Engine, plans: int, dtype: str | None = None) -> tuple[float, float]:
    """Worst relative differences: of one rank from the reference in float64, of random plans from one rank.

    ``dtype`` is that of `get_engine`; default: the engine's element type.
    """
    update = Update(graph, BATCH, SEED, lambda _: SGD(0.1, momentum=0.9, weight_decay=1e-3), 0.1)
    dtype, random = dtype or engine.dtype.name, Random(SEED)
    ours, exact = Reference(update, engine, measure(dtype)), Reference(update, oracle(dtype), measure(dtype))
    ranks = [verify_virtual(ours, random_plan(graph, BATCH, PROCS, random)).worst for _ in range(plans)]
    return max(exact.beside(ours).values()), max(ranks, default=0.0)
