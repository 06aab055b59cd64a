"""What a rank other than the first leaves unread: with thousands of ranks, imports are what starting takes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lbpar.launcher import launched_ranks

ROOT = Path(__file__).parents[2]
HEAVY = {
    *(
        "h5py",
        "onnx",
        "safetensors",
        "scipy",
        "PIL",
        "nibabel",
        "matplotlib",
        "rich",
        "tqdm",
        "tensorboard",
        "cupy",
        "torch",
    ),
    *("numpy.testing", "numpy.ma", "pycparser", "asyncio", "multiprocessing"),
    *("lbpar.calibrate", "lbpar.cost", "lbpar.solver", "lbpar.plan.choose", "lbpar.study", "lbpar.models.onnx_import"),
}
RANK = """
import json, sys
from lbpar.threads import limit_libraries
limit_libraries()
from lbpar.train.command import main
from lbpar.launcher import launched_ranks
from lbpar.transport.launch import run_main
code = run_main(main)
if launched_ranks()[1] == 1:
    print("modules", json.dumps(list(sys.modules)))
sys.exit(code)
"""
RUN = """
model: {name: lenet}
data: {train: synthetic, samples: 8}
train: {batch: 8, epochs: 1}
machine: laptop
run: {out: run, report: false, progress: none, checkpoint: null}
"""


@pytest.mark.parametrize("strategy", ["data", "auto"])
def test_a_rank_reads_no_module_that_it_does_not_use(strategy: str, tmp_path: Path) -> None:
    if launched_ranks() is not None:
        pytest.skip("under a launcher already")
    pytest.importorskip("mpi4py")
    folder = str(Path(sys.executable).parent)
    mpirun = shutil.which("mpirun", path=folder) or shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun")
    (tmp_path / "run.yaml").write_text(RUN)
    command = [
        mpirun,
        "-n",
        "2",
        sys.executable,
        "-c",
        RANK,
        "--config",
        "run.yaml",
        f"--set=parallel.strategy={strategy}",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("modules")]
    modules = set(json.loads(line.removeprefix("modules")))
    assert "lbpar.train.trainer" in modules
    read = sorted(m for m in modules if any(m == heavy or m.startswith(f"{heavy}.") for heavy in HEAVY))
    assert read == []
