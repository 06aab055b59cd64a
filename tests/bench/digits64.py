"""64 ranks against one: the same losses, how long it takes to start and to train, and what each rank holds.

    python tests/bench/digits64.py              (a few minutes on 2 cores)
    python tests/bench/digits64.py --steps 3

Prints a table and fails if a loss, an accuracy or a final weight differs by more than 1e-8, or if it takes 5 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "jobs" / "digits64.yaml"
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
MEASURED = ("loss", "accuracy", "top5", "test_loss", "test_accuracy", "test_top5")


def run(folder: Path, data: Path, procs: int, steps: int | None) -> dict[str, Any]:
    """Train on so many ranks; returns the report with all records and the seconds of the whole command."""
    out = folder / f"ranks{procs}"
    sets = [f"run.out={out}", "run.progress=none", f"data.train={data}", f"data.test={data}"]
    sets += [f"train.max_steps={steps}"] if steps else []
    line = [sys.executable, "-m", "lbpar.train", "--config", str(CONFIG)]
    if procs > 1:
        mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
        line = [mpirun, "-n", str(procs), *line]
    else:
        sets += ["parallel.procs=1", "parallel.layers={}"]
    start = time.perf_counter()
    subprocess.run([*line, *(part for s in sets for part in ("--set", s))], env={**os.environ, **SETTINGS}, check=True)
    report = json.loads((out / "report.json").read_text())
    records = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    return {**report, "records": records, "command_seconds": time.perf_counter() - start, "out": out}


def weights(out: Path) -> dict[str, np.ndarray]:
    """Whole tensors of the last checkpoint."""
    from lbpar.checkpoint.files import latest, open_checkpoint

    path = latest(out / "checkpoints")
    assert path is not None
    with open_checkpoint(path) as saved:
        return {n: saved.read(n, tuple(((0, e),) for e in shape)) for n, (shape, _) in saved.tensors.items()}


def worst_difference(one: dict[str, Any], many: dict[str, Any]) -> float:
    """Largest relative difference of what was measured and of the final tensors."""
    worst = 0.0
    for a, b in zip(one["records"], many["records"], strict=True):
        for key in MEASURED:
            worst = max(worst, abs(a[key] - b[key]) / (abs(a[key]) or 1.0)) if key in a else worst
    there, here = weights(many["out"]), weights(one["out"])
    for name, array in here.items():
        worst = max(worst, float(np.abs(there[name] - array).max() / (np.abs(array).max() or 1.0)))
    return worst


def compare(folder: Path, procs: int, steps: int | None) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Both runs and their worst difference."""
    from lbpar.data.make import make_digits

    data = folder / "digits.h5"
    make_digits(data)
    one, many = run(folder, data, 1, steps), run(folder, data, procs, steps)
    return one, many, worst_difference(one, many)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--procs", type=int, default=64)
    parser.add_argument("--steps", type=int, help="stop after so many updates")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        one, many, worst = compare(Path(folder), args.procs, args.steps)
    for key in ("startup_seconds", "total_seconds", "command_seconds", "state_bytes", "loss", "test_accuracy"):
        print(f"{key:16}  1 rank {one[key]:12.6g}   {args.procs} ranks {many[key]:12.6g}")
    print(f"worst relative difference {worst:.1e}")
    return int(worst > 1e-8 or many["command_seconds"] > 300)


if __name__ == "__main__":
    sys.exit(main())
