"""`python -m lbpar.verify`: does a plan compute what one process computes?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from lbpar.config.arguments import add_run_file, given_run
from lbpar.config.output import write_output
from lbpar.config.paths import path_option
from lbpar.engine.registry import BFLOAT16, NAMES
from lbpar.json_text import dumps
from lbpar.tables import print_table
from lbpar.transport.arguments import Parser
from lbpar.transport.launch import connect
from lbpar.verify.run import TOLERANCES, Verification, verify


def parser() -> argparse.ArgumentParser:
    """Command-line options."""
    p = Parser(
        prog="lbpar verify",
        description="Run one training step on P ranks, and on one by NumPy in float64, on random samples, and compare every tensor. "
        "Under mpirun the ranks are real; otherwise they are simulated in this process (--procs).",
    )
    add_run_file(p)
    p.add_argument("--procs", type=int, help="ranks to simulate (default: parallel.procs of the run file, or 4)")
    p.add_argument("--plan", type=path_option, metavar="FILE", help="plan file, instead of the run file's strategy")
    p.add_argument("--random-plans", type=int, default=0, metavar="N", help="also try N plans of random legal grids")
    p.add_argument("--seed", type=int, default=1, help="of the random plans, weights and samples")
    p.add_argument("--batch", type=int, help="samples (default: the run file's)")
    p.add_argument("--engine", choices=NAMES, help="kernels of the ranks (default: numpy for float64, else auto)")
    p.add_argument("--dtype", choices=tuple(TOLERANCES), default="float64", help="type that the ranks compute in")
    p.add_argument(
        "--tolerance",
        type=float,
        help="largest relative difference that passes (default: by type, and what rounding explains)",
    )
    p.add_argument(
        "--json", type=path_option, metavar="FILE", help='write {"worst", "tensors", "bytes", "plans", "merged_norms"}'
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Compare as the command line says; 1 if a difference exceeds the tolerance. Collective over all ranks."""
    args = parser().parse_args(argv)
    config = given_run(args)
    if args.plan is not None:
        parallel = config.parallel.model_copy(update={"strategy": args.plan, "layers": {}})
        config = config.model_copy(update={"parallel": parallel})
    transport = connect()
    root = transport.rank == 0
    result = verify(
        config,
        procs=args.procs,
        random_plans=args.random_plans,
        seed=args.seed,
        batch=args.batch,
        engine=args.engine,
        dtype=args.dtype,
        transport=transport,
    )
    if root:
        _report(args, result)
    return 0 if result.equal(args.tolerance) else 1


def _report(args: argparse.Namespace, result: Verification) -> None:
    kind = "simulated ranks" if result.simulated else "ranks"
    theirs = result.dtype if result.half and result.engine != "cupy" else "float64"
    ours, theirs = f"{result.engine} {result.dtype}", f"numpy {theirs}"
    print_table(result.rows(), title=f"{result.procs} {kind} ({ours}) against one ({theirs}), relative differences")
    verdict = "equal" if result.equal(args.tolerance) else "DIFFERENT"
    limit = TOLERANCES[result.dtype] if args.tolerance is None else args.tolerance
    print(f"{verdict}: worst {result.worst:.3g}, tolerance {limit:g}; counted bytes equal the programs'", flush=True)
    for line in _notes(args, result):
        print(line, flush=True)
    if args.json:
        sent = [parity.sent for parity in result.plans.values()]
        plans = [
            {"name": r["plan"], "worst": r["worst"], "tensor": r["tensor"], "bytes": s}
            for r, s in zip(result.rows(), sent, strict=True)
        ]
        content = {"worst": result.worst, "tensors": result.tensors, "bytes": sent[0], "plans": plans}
        content["merged_norms"] = result.merged
        write_output(args.json, dumps(content, indent=1) + "\n", "the report")


def _notes(args: argparse.Namespace, result: Verification) -> Iterator[str]:
    """What the reader must know of norms and rounding to read the verdict."""
    if result.merged:
        names = ", ".join(result.merged[:3]) + (f" and {len(result.merged) - 3} more" if len(result.merged) > 3 else "")
        yield (
            f"note: the statistics of {names} differ from those of one rank by design (stats: local or sample); "
            "compared was the step with the statistics of all norms merged over all ranks (parallel.norm: global)"
        )
    if result.rounding and args.tolerance is None:
        tensors = result.tensors
        first = max(tensors, key=lambda t: tensors[t] / result.allowed(t))
        half = result.half or result.dtype == BFLOAT16
        what = f"rounding to {result.dtype}" if half else "another order of summation"
        yield (
            f"note: {first} differs by {tensors[first]:.3g}, and {what} on one rank changes it by {result.rounding[first]:.3g}; "
            f"up to {result.margin} times as much passes"
        )
