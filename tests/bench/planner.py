"""How long planning takes and how much memory: python tests/bench/planner.py [--procs 64 1024 65536] [--json FILE].

Each case runs in a process of its own. Times are of pricing all candidate grids and searching, without comparing named strategies;
"cpu" is the processor time of the whole process, start included, and does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from time import perf_counter, process_time

#: Network and samples per step for 64, 1,024 and 65,536 processes.
CASES = {
    "resnet50": (256, 4096, 65536),
    "inception_v3": (256, 4096, 65536),
    "densenet121": (256, 4096, 65536),
    "resnet152": (256, 4096, 65536),
    "unet3d": (4, 16, 64),
}
PROCS = (64, 1024, 65536)
#: Seconds that a plan may take.
TARGETS = dict(zip(PROCS, (2, 10, 60), strict=True))


def one(model: str, batch: int, procs: int, machine: str, axes: int | None) -> dict[str, object]:
    """Plan one network in this process."""
    from lbpar.cost.machine import find_machine
    from lbpar.graph.ops.losses import CrossEntropy
    from lbpar.models.registry import build_model
    from lbpar.plan.candidates import MOST_AXES
    from lbpar.plan.choose import choose_plan

    graph, target = build_model(model).with_loss(CrossEntropy()), find_machine(machine)
    started, spent = perf_counter(), process_time()
    choice = choose_plan(graph, batch, procs, target, compare=False, most_axes=axes or MOST_AXES)
    seconds, cpu = perf_counter() - started, process_time() - spent
    return {
        "model": model,
        "batch": batch,
        "procs": procs,
        "grid": str(choice.plan.grid),
        "search_s": round(choice.search_seconds, 2),
        "with_pricing_s": round(seconds, 2),
        "cpu_s": round(cpu, 2),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "candidates": choice.space["candidates_most"],
        "plans": f"10^{len(str(choice.space['plans'])) - 1}",
        "width": choice.space["width"],
        "states": choice.space["states"],
        "exact": choice.space["exact"],
        "step_ms": round(1e3 * choice.priced.seconds, 2),
    }


def main() -> int:
    """Run all cases and print a table."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--procs", type=int, nargs="+", default=list(PROCS))
    p.add_argument("--models", nargs="+", default=list(CASES))
    p.add_argument("--machine", default="perlmutter-a100")
    p.add_argument("--axes", type=int, help="grid axes at most")
    p.add_argument("--json", help="write the rows here")
    p.add_argument("--one", nargs=3, metavar=("MODEL", "BATCH", "PROCS"), help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.one:
        model, batch, procs = args.one
        print(json.dumps(one(model, int(batch), int(procs), args.machine, args.axes)))
        return 0
    rows = []
    for procs in args.procs:
        for model in args.models:
            batch = dict(zip(PROCS, CASES[model], strict=True)).get(procs, 256)
            extra = ["--axes", str(args.axes)] if args.axes else []
            command = [
                sys.executable,
                __file__,
                "--one",
                model,
                str(batch),
                str(procs),
                "--machine",
                args.machine,
                *extra,
            ]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            if len(rows) == 1:
                print("| " + " | ".join(rows[0]) + " | target_s |")
                print("|" + " --- |" * (len(rows[0]) + 1))
            print("| " + " | ".join(map(str, rows[-1].values())) + f" | {TARGETS.get(procs, '')} |", flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(rows, f, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
