"""`python -m lbpar.selftest`: check an engine against the reference engine in float64, on one rank and on simulated ranks."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from math import inf
from typing import Any

from lbpar.config.output import check_output, write_output
from lbpar.engine.registry import BFLOAT16, FLOAT16, NAMES, get_engine
from lbpar.errors import ConfigError, LbparError
from lbpar.selftest.checks import network_row
from lbpar.selftest.networks import PROCS, networks
from lbpar.tables import print_table
from lbpar.threads import cores
from lbpar.transport.stop import sigterm_exits
from lbpar.verify.run import TOLERANCES

BUDGET = 170.0
"""Seconds for all parts on a GPU."""

FINDINGS = "what a self-test found"

MOST_WORKERS = 6
"""Processes that share the GPU while results are checked, at most; each has a context of its own there."""


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
    gpu = p.add_argument_group("of a GPU")
    gpu.add_argument("--quick", action="store_true", help="leave out its speeds")
    gpu.add_argument(
        "--budget", type=float, metavar="SECONDS",
        help=f"what does not fit is left out, the least important first (default: {BUDGET:g})",
    )  # fmt: skip
    gpu.add_argument("--only", default="", metavar="PATTERN", help="parts whose names match a regular expression")
    gpu.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # sizes for tests of this
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Check an engine in every type that it has; 1 if something differs."""
    args = parser().parse_args(argv)
    _check(args)
    return _gpu(args) if args.engine == "cupy" else _engine(args)


def _check(args: argparse.Namespace) -> None:
    """Refuse what would change nothing, or end in an error after minutes."""
    for option, given in (("--quick", args.quick), ("--budget", args.budget is not None), ("--only", args.only)):
        if given and args.engine != "cupy":
            raise ConfigError(
                f"{option}: is for GPUs, but --engine is {args.engine}; leave it out, or give --engine cupy."
            )
    if args.plans < 0:
        raise ConfigError(f"--plans: got {args.plans}, expected 0 or more.")
    if args.budget is not None and not 0 < args.budget < inf:
        raise ConfigError(f"--budget: got {args.budget:g}, expected a number of seconds.")
    try:
        re.compile(args.only)
    except re.error as error:
        raise ConfigError(f"--only: got {args.only!r}, expected a regular expression: {error}.") from error
    if args.json:
        check_output(args.json, "--json", _findings(args, False), FINDINGS)


def _engine(args: argparse.Namespace) -> int:
    left_out, rows = "", list[dict[str, Any]]()
    for dtype in (d for d in TOLERANCES if d != FLOAT16):  # which is for GPUs
        try:
            engine = get_engine(args.engine, dtype)
        except LbparError as error:
            if dtype != BFLOAT16:
                raise
            left_out = f"; without bfloat16 ({error})"
            continue
        for name, graph in networks().items():
            row = {"engine": engine.name, "dtype": dtype, "network": name}
            rows.append(row | network_row(graph, engine, args.plans, dtype))
    print_table(rows, title="worst relative differences of outputs, gradients, updated weights")
    failed = any(row[""] != "ok" for row in rows)
    return _end(args, {"networks": rows}, failed, left_out)


def _gpu(args: argparse.Namespace) -> int:
    """Parts in processes of their own, one that fails beside the others, within the time that there is."""
    from lbpar.selftest import gpu, parts  # which knows of CuPy

    said = list[parts.Row]()

    def say(row: parts.Row) -> None:
        mark = "FAILED" if row["failed"] else "-" if row.get("left out") else "ok"
        print(f"{row['seconds']:6.1f} s  {mark:6s}  {row['part']}: {row['found']}", flush=True)
        said.append(row)
        _write(args, False, parts=said)  # for who is cut off

    everything, budget = gpu.parts(args.plans, args.quick, args.tiny), args.budget or BUDGET
    wanted = [p for p in everything if re.search(args.only, p.name)]
    if not wanted:
        names = dict.fromkeys(p.name.partition(",")[0] for p in everything)
        raise ConfigError(f"--only: no part's name matches {args.only!r}; names begin with {', '.join(names)}.")
    started, workers = time.monotonic(), max(1, min(MOST_WORKERS, cores() // 2))
    with sigterm_exits():  # parts end with it
        rows = parts.run(wanted[:1], budget, 1, say)
        if rows and rows[0]["failed"] and rows[0]["part"] == "versions":
            wanted = []  # nothing can be found out without a device
        if rows and rows[0].get("exclusive"):
            workers = 1
        rows += parts.run(wanted[1:], budget - (time.monotonic() - started), workers, say)
    for table in (row["table"] for row in rows if "table" in row):
        print_table(table["rows"], title=table["title"])
    if beside := _beside(rows):
        print_table(beside, title="samples per second")
    bad = [row for row in rows if row["failed"]]
    for row in bad:
        print(f"\n{row['part']}: {row['found']}\n{row.get('log', '')}", file=sys.stderr)
    out = [row["part"] for row in rows if row.get("left out")]
    left_out = f"; {len(out)} parts left out: {', '.join(out)}" if out else ""
    failed = bool(bad) or len(out) == len(rows)  # who found out nothing has not passed
    return _end(args, {"parts": rows, "beside": beside}, failed, left_out)


def _beside(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per network and batch: samples per second of lbpar and, where they were measured, of PyTorch, and how many times as many are
    the best of ours."""
    from lbpar.selftest.speeds import AUTOTUNE

    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "samples/s" in row:
            name, _, other = row["part"].partition(", PyTorch ")
            column = f"PyTorch {other}" if other else "lbpar"
            if name.endswith(AUTOTUNE):
                name, column = name.removesuffix(AUTOTUNE), f"lbpar{AUTOTUNE}"
            name += f" (batch {row['batch']})" if "batch" in row else ""
            found.setdefault(name, {"network": name})[column] = row["samples/s"]
    for line in found.values():
        ours, others = ([v for k, v in line.items() if k.startswith(of)] for of in ("lbpar", "PyTorch"))
        if ours and others:
            line["lbpar / best of PyTorch"] = max(ours) / max(others)
    return list(found.values())


def _end(args: argparse.Namespace, report: dict[str, Any], failed: bool, left_out: str) -> int:
    _write(args, True, not failed, **report)
    print(f"selftest: {'FAILED' if failed else 'passed'}{left_out}", flush=True)
    return int(failed)


def _write(args: argparse.Namespace, finished: bool, passed: bool = False, **report: Any) -> None:
    """Write what is known so far."""
    if args.json:
        write_output(args.json, _findings(args, finished, passed, **report), FINDINGS)


def _findings(args: argparse.Namespace, finished: bool, passed: bool = False, **report: Any) -> str:
    """Text of the file. Most fields are those of every self-test, so that one replaces the file of another."""
    found = {"engine": args.engine, "finished": finished, "passed": passed, **report}
    return json.dumps(found, indent=1, default=str) + "\n"
