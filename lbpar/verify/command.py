"""`python -m lbpar.verify`: does a plan compute what one process computes?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from lbpar.config.run_file import RunConfig, load_run_file
from lbpar.errors import ConfigError
from lbpar.graph.graph import Graph
from lbpar.plan.resolve import resolve_plan
from lbpar.program.plan import Plan
from lbpar.train.optim.make import make_optimizer
from lbpar.train.progress import print_table
from lbpar.train.setup import build_engine, build_graph, connect_to
from lbpar.transport.launch import connect
from lbpar.verify.compare import Parity, Reference, verify_mpi, verify_virtual
from lbpar.verify.plans import random_plan


def parser() -> argparse.ArgumentParser:
    """Command-line options."""
    p = argparse.ArgumentParser(
        prog="lbpar verify",
        description="Run one training step on P ranks and on one, in float64 on random samples, and compare every tensor. "
        "Under mpirun the ranks are real; otherwise they are simulated in this process (--procs).",
    )
    p.add_argument("--config", required=True, help="run file (YAML)")
    p.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field of the run file")
    p.add_argument("--procs", type=int, help="ranks to simulate (default: parallel.procs of the run file, or 4)")
    p.add_argument("--plan", metavar="FILE", help="plan file, instead of the run file's strategy")
    p.add_argument("--random-plans", type=int, default=0, metavar="N", help="also try N plans of random legal grids")
    p.add_argument("--seed", type=int, default=1, help="of the random plans, weights and samples")
    p.add_argument("--batch", type=int, help="samples (default: the run file's)")
    p.add_argument(
        "--engine", choices=("numpy", "onednn", "auto"), default="numpy", help="kernels; the reference is numpy"
    )
    p.add_argument("--tolerance", type=float, default=1e-10, help="largest relative difference that passes")
    p.add_argument("--json", metavar="FILE", help='write {"worst", "tensors", "bytes", "plans"}')
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Compare as the command line says; 1 if a difference exceeds the tolerance. Collective over all ranks."""
    args = parser().parse_args(argv)
    config = load_run_file(args.config, args.set)
    graph = build_graph(config)
    batch = args.batch or config.train.batch
    transport = connect()
    real = transport.size > 1
    if real and args.procs not in (None, transport.size):
        raise ConfigError(
            f"--procs: got {args.procs}, but {transport.size} ranks were started; leave it out under mpirun."
        )
    procs = transport.size if real else args.procs or config.parallel.procs or 4
    plans = _plans(args, config, graph, batch, procs)
    engine = build_engine(config.engine.model_copy(update={"name": args.engine}), "float64")
    kinds = {name: p.kind for name, p in graph.params().items() if p.kind != "statistic"}
    reference = Reference(
        graph,
        batch,
        engine,
        args.seed,
        lambda: make_optimizer(config.train.optimizer, kinds, config.train.no_decay),
        config.train.optimizer.lr,
    )
    rows, tensors, sent = [], {}, {}  # type: ignore[var-annotated]
    for name, plan in plans:
        if real:
            transport = connect_to(plan.grid, transport)
            parity = verify_mpi(reference, plan, transport)
        else:
            parity = verify_virtual(reference, plan)
        rows.append(_row(name, parity))
        for tensor, difference in parity.tensors.items():
            tensors[tensor] = max(tensors.get(tensor, 0.0), difference)
        sent[name] = parity.sent
    worst = max(row["worst"] for row in rows)
    if transport.rank == 0:
        _report(args, rows, tensors, sent, worst, procs, real)
    transport.close()
    return 0 if worst <= args.tolerance else 1


def _plans(args: argparse.Namespace, config: RunConfig, graph: Graph, batch: int, procs: int) -> list[tuple[str, Plan]]:
    parallel = config.parallel
    if args.plan is not None:
        parallel = parallel.model_copy(update={"strategy": args.plan, "layers": {}})
    name = args.plan or parallel.strategy
    plans = [(name, resolve_plan(parallel, graph, batch, procs))]
    random = Random(args.seed)
    return plans + [(f"random {i + 1}", random_plan(graph, batch, procs, random)) for i in range(args.random_plans)]


def _row(name: str, parity: Parity) -> dict[str, Any]:
    where = max(parity.tensors, key=lambda t: parity.tensors[t], default="")
    total = sum(parity.sent.values())
    return {"plan": name, "worst": parity.worst, "tensor": where, "tensors": len(parity.tensors), "bytes sent": total}


def _report(args: Any, rows: Any, tensors: Any, sent: Any, worst: float, procs: int, real: bool) -> None:
    kind = "ranks" if real else "simulated ranks"
    print_table(rows, title=f"{procs} {kind} against one, float64, relative differences")
    verdict = "equal" if worst <= args.tolerance else "DIFFERENT"
    print(f"{verdict}: worst {worst:.3g}, tolerance {args.tolerance:g}; counted bytes equal the programs'", flush=True)
    if args.json:
        plans = [
            {"name": r["plan"], "worst": r["worst"], "tensor": r["tensor"], "bytes": sent[r["plan"]]} for r in rows
        ]
        content = {"worst": worst, "tensors": tensors, "bytes": sent[rows[0]["plan"]], "plans": plans}
        try:
            Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json: {args.json} cannot be written: {error.strerror}.") from None
