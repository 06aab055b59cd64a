"""The Slurm templates, run with a launcher that only passes on the command: they train, and go on when started again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEMPLATES = sorted((ROOT / "jobs" / "slurm").glob("*.sbatch"))
# Notes its options, then does what comes after them.
LAUNCHER = (
    '#!/bin/bash\nprintf "%s\\n" "$*" >>launched\nuntil [ "$1" = python ]; do shift; done\nshift\nexec "$PYTHON" "$@"\n'
)
RUN = """
model: {input: [4], layers: [{op: linear, features: 2}]}
data: {train: synthetic, samples: 8}
train: {batch: 4, epochs: 1}
"""


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda p: p.stem)
def test_states_nodes_tasks_and_cores(template: Path) -> None:
    said = re.findall(r"^#SBATCH --([\w-]+)=", template.read_text(encoding="utf-8"), re.MULTILINE)
    assert {"nodes", "ntasks-per-node", "cpus-per-task", "time", "output"} <= set(said)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda p: p.stem)
def test_trains_and_goes_on(template: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    (tmp_path / "net.yaml").write_text(RUN)
    for name in ("srun", "mpirun"):
        (tmp_path / "bin" / name).write_text(LAUNCHER)
        (tmp_path / "bin" / name).chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "PRTE_", "SLURM_"))}
    env |= {"PATH": f"{tmp_path / 'bin'}:{env['PATH']}", "LBPAR_ENV": str(tmp_path), "PYTHON": sys.executable}
    env |= {
        "PYTHONPATH": str(ROOT),
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_NUM_NODES": "3",
    }

    def submit(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(template), *args], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    first = submit("net.yaml", "--set", "train.batch=2")
    assert first.returncode == 0 and "-> runs/net" in first.stdout, first.stderr
    assert (tmp_path / "runs/net/metrics.jsonl").read_text().count('"step": 4') == 1
    again = submit("net.yaml", "--set", "train.batch=2")
    assert again.returncode == 0 and "nothing left to train" in again.stdout, again.stderr
    launched = (tmp_path / "launched").read_text()
    assert "--ntasks-per-node=2 --cpus-per-task=1" in launched or "-n 6 --map-by ppr:2:node:pe=1" in launched
    assert submit().returncode == 2
