"""What `lbpar plan ... --quiet` takes, start-up, comparison and report included: python tests/bench/planner.py [--procs 64 1024 65536] [--json FILE].

Every case is the whole command in a process of its own. ``wall_s`` is the time until it ends, and ``limit_s`` what that is to keep on a
machine that does nothing else, with two cores; ``cpu_s`` is the processor time of all its processes, user and system; ``peak_mb`` the most
memory that one of them held.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

#: Network and samples per step for 64, 1,024 and 65,536 processes.
CASES = {
    "resnet50": (256, 4096, 65536),
    "inception_v3": (256, 4096, 65536),
    "densenet121": (256, 4096, 65536),
    "resnet152": (256, 4096, 65536),
    "unet3d": (4, 16, 64),
}
#: Processes, and seconds that the command may take.
LIMITS = {64: 3, 1024: 3, 65536: 4}
#: MB that it may hold.
MEMORY = 1000


def one(model: str, batch: int, procs: int, machine: str, axes: int | None) -> dict[str, object]:
    """Run one command and say what it took and found."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.json")
        command = [
            sys.executable,
            "-m",
            "lbpar.cli",
            "plan",
            "--model",
            model,
            "--batch",
            str(batch),
            "--procs",
            str(procs),
        ]
        command += ["--machine", machine, "--quiet", "--json", str(file), *(["--axes", str(axes)] if axes else [])]
        started = perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        wall = perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
        found = json.loads(file.read_text(encoding="utf-8"))
    space = found["space"]
    return {
        "model": model,
        "batch": batch,
        "procs": procs,
        "wall_s": round(wall, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "peak_mb": used.ru_maxrss // 1024,
        "grid": "·".join(map(str, found["grid"])),
        "plans": space["plans"],
        "exact": space["exact"],
        "step_ms": round(1e3 * found["step"]["seconds"], 2),
        "limit_s": LIMITS.get(procs, ""),
    }


def main() -> int:
    """Run all cases and print a table; 1 if any took more than its limit."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--procs", type=int, nargs="+", default=list(LIMITS))
    p.add_argument("--models", nargs="+", default=list(CASES))
    p.add_argument("--machine", default="perlmutter-a100")
    p.add_argument("--axes", type=int, help="grid axes at most")
    p.add_argument("--json", help="write the rows here")
    args = p.parse_args()
    rows: list[dict[str, object]] = []
    for procs in args.procs:
        for model in args.models:
            batch = dict(zip(LIMITS, CASES[model], strict=True)).get(procs, 256)
            rows.append(one(model, batch, procs, args.machine, args.axes))
            if len(rows) == 1:
                print("| " + " | ".join(rows[0]) + " |")
                print("|" + " --- |" * len(rows[0]))
            print("| " + " | ".join(map(str, rows[-1].values())) + " |", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return int(any(r["wall_s"] > (r["limit_s"] or float("inf")) or r["peak_mb"] > MEMORY for r in rows))  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())
