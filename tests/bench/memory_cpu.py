"""Peak resident memory of one process that trains: measured for lbpar and PyTorch, beside what lbpar's cost model says.

    python tests/bench/memory_cpu.py [--steps 3] [--threads 1] [--dtype bfloat16] [--recompute 0.6] [NAME ...]

Every measurement is a process of its own. Its peak is the operating system's (VmHWM), less what was resident when all was
imported and nothing made yet. Networks, batches and optimizer are those of ``training_cpu.py``. With ``--recompute``, lbpar alone: as it is, and with
activations computed again until the prediction is that part of what it was.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (the peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def measure(side: str, case: str, args: argparse.Namespace) -> None:
    """Train a few steps and print the figures as JSON (in a process of its own)."""
    sys.argv = ["training_cpu.py", "--threads", str(args.threads)]
    sys.path.insert(0, str(ROOT))
    from tests.bench import training_cpu as bench

    bench.torch.set_num_threads(args.threads)
    ours, again = side.startswith("lbpar"), tuple(args.again.split(",")) if args.again else ()
    base = resident("VmRSS")
    runner = bench.Lbpar(case, args.dtype, bench.Plan(bench.Grid(), recompute=again)) if ours else bench.Described(case)
    found: dict[str, float] = {}
    if ours:
        from lbpar.cost.memory import memory

        engine = runner.worker.engine
        of = {"halves": engine.activations.itemsize == 2, "copies": engine.volume_copies}
        found = {"predicted": memory(runner.executor.program, args.dtype, **of).peak / MIB}
    else:
        runner = bench.Torch(runner, case, side == "channels-last")
    clock, busy = [], []
    for i in range(args.steps + 1):
        clock.append(time.perf_counter())
        busy.append(time.process_time())
        if i < args.steps:
            runner.step()
    found |= {"base": base / MIB, "peak": (resident("VmHWM") - base) / MIB}
    found["seconds"] = min(b - a for a, b in pairwise(clock))
    found["cpu"] = min(b - a for a, b in pairwise(busy))
    if ours:
        found["pool"] = runner.worker.engine.arena.held / MIB
    print(json.dumps(found))


def leaner(case: str, args: argparse.Namespace) -> list[str]:
    """Options of the measurement in which activations are computed again; here, so that planning is not measured."""
    sys.argv = ["training_cpu.py"]
    sys.path.insert(0, str(ROOT))
    from lbpar.cost.machine import find_machine
    from lbpar.plan.lean import fit
    from lbpar.plan.priced import Settings
    from tests.bench import training_cpu as bench

    net = bench.Described(case)
    settings = Settings(net.graph, net.batch, find_machine("laptop"), args.dtype, "momentum")
    kept = settings.priced(case, bench.Plan(bench.Grid()))
    lean = fit(settings, kept, int(args.recompute * kept.memory.peak))
    if lean is None:
        sys.exit(f"{case}: nothing fits in {args.recompute} of what it needs")
    return ["--again", ",".join(lean.plan.recompute)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=["resnet50", "unet3d"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--recompute", type=float, help="part of the prediction to come down to")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--again", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        measure(args.side, args.names[0], args)
        return
    sides = ("lbpar", "lbpar, leaner") if args.recompute else ("lbpar", "channels-last", "NCHW")
    for case in args.names:
        print(case)
        for side in sides:
            command = [sys.executable, __file__, "--side", side, "--steps", str(args.steps), "--dtype", args.dtype]
            command += ["--threads", str(args.threads), *(leaner(case, args) if side == "lbpar, leaner" else []), case]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode:
                sys.exit(run.stderr)
            figures = json.loads(run.stdout.splitlines()[-1])
            seconds, busy = figures.pop("seconds"), figures.pop("cpu")
            name = side if "lbpar" in side else f"PyTorch {side}"
            text = "  ".join(f"{k} {v:8.0f} MiB" for k, v in figures.items())
            print(f"  {name:22}{text}  {seconds:.2f} s a step, {busy:.2f} s of all threads", flush=True)


if __name__ == "__main__":
    main()
