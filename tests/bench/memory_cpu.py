"""Peak resident memory of one process that trains: measured for lbpar and PyTorch, beside what lbpar's cost model says.

    python tests/bench/memory_cpu.py [--steps 3] [--threads 1] [NAME ...]

Every measurement is a process of its own. Its peak is the operating system's (VmHWM), less what was resident when all was
imported and nothing made yet. Networks, batches and optimizer are those of ``training_cpu.py``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (the peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def measure(side: str, case: str, steps: int, threads: int) -> None:
    """Train a few steps and print the figures as JSON (in a process of its own)."""
    sys.argv = ["training_cpu.py", "--threads", str(threads)]
    sys.path.insert(0, str(ROOT))
    from tests.bench import training_cpu as bench

    bench.torch.set_num_threads(threads)
    base = resident("VmRSS")
    ours = bench.Lbpar(case) if side == "lbpar" else bench.Described(case)
    found: dict[str, float] = {}
    if side == "lbpar":
        from lbpar.cost.memory import memory

        predicted = memory(ours.executor.program)
        found = {"predicted": predicted.peak / MIB}
        runner = ours
    else:
        runner = bench.Torch(ours, case, side == "channels-last")
    for _ in range(steps):
        runner.step()
    found |= {"base": base / MIB, "peak": (resident("VmHWM") - base) / MIB}
    if side == "lbpar":
        found["pool"] = ours.worker.engine.arena.held / MIB
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=["resnet50", "unet3d"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        measure(args.side, args.names[0], args.steps, args.threads)
        return
    for case in args.names:
        print(case)
        for side in ("lbpar", "channels-last", "NCHW"):
            command = [sys.executable, __file__, "--side", side, "--steps", str(args.steps)]
            run = subprocess.run(
                [*command, "--threads", str(args.threads), case], capture_output=True, text=True, check=False
            )
            if run.returncode:
                sys.exit(run.stderr)
            figures = json.loads(run.stdout.splitlines()[-1])
            name = side if side == "lbpar" else f"PyTorch {side}"
            print(f"  {name:22}" + "  ".join(f"{k} {v:8.0f} MiB" for k, v in figures.items()), flush=True)


if __name__ == "__main__":
    main()
