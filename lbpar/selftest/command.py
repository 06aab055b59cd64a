"""`python -m lbpar.selftest`: check an engine against the reference engine in float64, on one rank and on simulated ranks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from lbpar.engine.base import Engine
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.registry import BFLOAT16, NAMES, get_engine
from lbpar.errors import LbparError
from lbpar.graph.graph import Graph
from lbpar.runtime.optim.rules import SGD
from lbpar.selftest import gpu
from lbpar.selftest.networks import networks
from lbpar.tables import print_table
from lbpar.verify.compare import Reference, Update, measure, verify_virtual, worst_of_large
from lbpar.verify.oracle import oracle
from lbpar.verify.plans import random_plan
from lbpar.verify.run import TOLERANCES

BATCH, PROCS, SEED = 5, 6, 1

HALF = 0.2
"""Relative difference that passes where activations are held in a half type: several roundings to 8 bits."""


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
    p.add_argument("--json", metavar="FILE", help="write everything that was found to a file")
    p.add_argument("--quick", action="store_true", help="of a GPU: leave out its speeds")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Check an engine in every type that it has; 1 if something differs."""
    args = parser().parse_args(argv)
    left_out, report = "", {"engine": args.engine}
    if args.engine == "cupy":
        report |= gpu.report(quick=args.quick)
        print_table(report["parts"], title="device")
    rows: list[dict[str, Any]] = []
    for dtype in TOLERANCES:
        try:
            engine = get_engine(args.engine, dtype)
        except LbparError as error:
            if dtype != BFLOAT16:
                raise
            left_out = f"; without bfloat16 ({error})"
            continue
        rows += [_row(name, graph, engine, args.plans, dtype) for name, graph in networks().items()]
    print_table(rows, title="worst relative differences of outputs, gradients, updated weights")
    for row in rows:
        if row[""] not in ("ok", "WRONG"):
            print(f"selftest: {row['network']}, {row['dtype']}: {row['']}")
    failed = any(row[""] != "ok" for row in rows) or any(part["failed"] for part in report.get("parts", ()))
    if args.json:
        text = json.dumps({**report, "networks": rows, "passed": not failed}, indent=1, default=str)
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    print(f"selftest: {'FAILED' if failed else 'passed'}{left_out}", flush=True)
    return int(failed)


def _row(name: str, graph: Graph, engine: Engine, plans: int, dtype: str) -> dict[str, Any]:
    """What a network gave; on a device a part that fails does not end the others."""
    row: dict[str, Any] = {"engine": engine.name, "dtype": dtype, "network": name}
    try:
        alone, ranks = check(graph, engine, plans, dtype)
    except Exception as error:
        if engine.host:
            raise
        return row | {"": f"{type(error).__name__}: {error}"}
    limit = HALF if engine.activations != engine.dtype else TOLERANCES[dtype]
    good = max(alone, ranks) <= limit
    return row | {"against float64": alone, f"{PROCS} ranks against 1": ranks, "": "ok" if good else "WRONG"}


def check(graph: Graph, engine: Engine, plans: int, dtype: str | None = None) -> tuple[float, float]:
    """Worst relative differences: of one rank from the reference in float64, of random plans from one rank.

    ``dtype`` is that of `get_engine`; default: the engine's element type. Where activations are held in a half type, random plans are
    compared with the reference as well, and small tensors are not.
    """
    update = Update(graph, BATCH, SEED, lambda _: SGD(0.1, momentum=0.9, weight_decay=1e-3), 0.1)
    dtype, random = dtype or engine.dtype.name, Random(SEED)
    half = engine.activations != engine.dtype
    ours = Reference(update, engine, measure(dtype))
    exact = Reference(update, NumpyEngine("float64") if half else oracle(dtype), measure(dtype))
    found = [verify_virtual(ours, random_plan(graph, BATCH, PROCS, random)) for _ in range(plans)]
    if half:
        ranks = [worst_of_large(exact, parity.tensors) for parity in found]
        return worst_of_large(exact, exact.beside(ours)), max(ranks, default=0.0)
    return max(exact.beside(ours).values()), max((parity.worst for parity in found), default=0.0)
