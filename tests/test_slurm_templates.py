"""The Slurm templates, run with a launcher that only passes on the command: they train, and go on when started again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Those that train; `lbpar study --slurm` fills in the other (tests/study, tests/slurm).
TEMPLATES = [f for f in sorted((ROOT / "jobs" / "slurm").glob("*.sbatch")) if f.stem != "study"]
# Says which MPI it is, or notes its options and does what comes after them.
LAUNCHER = """#!/bin/bash
if [ "$1" = --version ]; then echo "$FLAVOUR"; exit; fi
printf "%s\\n" "$*" >>launched
env >environment
if [ -n "$STATUS" ]; then
    if [ -n "$ASKED" ]; then trap '' USR1; kill -USR1 $PPID; sleep 1; fi
    exit "$STATUS"
fi
until [ "$1" = python ]; do shift; done
shift
exec "$PYTHON" "$@"
"""
RUN = """
model: {input: [4], layers: [{op: linear, features: 2}]}
data: {train: synthetic, samples: 8}
train: {batch: 4, epochs: 1}
run: {out: runs/own}
"""


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda p: p.stem)
def test_states_nodes_tasks_and_cores(template: Path) -> None:
    said = re.findall(r"^#SBATCH --([\w-]+)=", template.read_text(encoding="utf-8"), re.MULTILINE)
    assert {"nodes", "ntasks-per-node", "cpus-per-task", "time", "output"} <= set(said)


Submit = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def submit(tmp_path: Path) -> Submit:
    """Runs a template as a job of 3 nodes with 2 tasks each, in the test's folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    (tmp_path / "net.yaml").write_text(RUN)
    for name in ("srun", "mpirun"):
        (tmp_path / "bin" / name).write_text(LAUNCHER)
        (tmp_path / "bin" / name).chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "PRTE_", "SLURM_"))}
    env |= {"PATH": f"{tmp_path / 'bin'}:{env['PATH']}", "LBPAR_ENV": str(tmp_path), "PYTHON": sys.executable}
    env |= {"PYTHONPATH": str(ROOT), "FLAVOUR": "mpirun (Open MPI) 5.0.11"}
    env |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NUM_NODES": "3"}

    def run(template: Path, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(template), *args]
        return subprocess.run(command, cwd=tmp_path, env=env | more, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda p: p.stem)
def test_trains_and_goes_on(template: Path, tmp_path: Path, submit: Submit) -> None:
    first = submit(template, "net.yaml", "--set", "train.batch=2")
    assert first.returncode == 0 and "-> runs/own" in first.stdout, first.stderr
    assert (tmp_path / "runs/own/metrics.jsonl").read_text().count('"step": 4') == 1
    again = submit(template, "net.yaml", "--set", "train.batch=2")
    assert again.returncode == 0 and "nothing left to train" in again.stdout, again.stderr
    other = submit(template, "net.yaml", "--set", "run.out=elsewhere")
    assert other.returncode == 0 and "-> elsewhere" in other.stdout, other.stderr
    launched = (tmp_path / "launched").read_text()
    assert "--ntasks-per-node=2 --cpus-per-task=1" in launched or "-n 6 --map-by ppr:2:node:pe=1" in launched
    assert submit(template).returncode == 2


def test_each_task_sees_all_gpus_of_its_node_and_takes_that_of_its_number(tmp_path: Path, submit: Submit) -> None:
    """Numbered as Slurm does, and with cores in the same order; docs/gpu.md says so."""
    template = ROOT / "jobs/slurm/gpu.sbatch"
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", template.read_text(encoding="utf-8"), re.MULTILINE))
    assert asked["gpus-per-node"] == asked["ntasks-per-node"]
    assert not {"gpus-per-task", "gpu-bind"} & set(asked)
    for given, order in (({}, "PCI_BUS_ID"), ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "FASTEST_FIRST")):
        done = submit(template, "net.yaml", **given)
        assert done.returncode == 0, done.stderr
        assert f"CUDA_DEVICE_ORDER={order}" in (tmp_path / "environment").read_text().splitlines()
    launched = (tmp_path / "launched").read_text()
    assert "--cpu-bind=cores --distribution=block:block" in launched and "--gpu" not in launched


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda p: p.stem)
def test_tasks_of_an_array_write_apart(template: Path, submit: Submit) -> None:
    for task in "12":
        done = submit(template, "net.yaml", SLURM_ARRAY_TASK_ID=task)
        assert done.returncode == 0 and f"-> runs/net-{task}" in done.stdout, done.stderr


def test_mpirun_of_mpich_gets_its_own_options(tmp_path: Path, submit: Submit) -> None:
    done = submit(ROOT / "jobs/slurm/mpirun.sbatch", "net.yaml", FLAVOUR="HYDRA build details:")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "launched").read_text().startswith("-n 6 -ppn 2 -bind-to core:1 python -m lbpar.train")


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda p: p.stem)
@pytest.mark.parametrize(
    ("status", "state", "asked", "requeued"),
    [
        ("75", "RUNNING", "", True),
        ("75", "CANCELLED", "", False),
        ("1", "RUNNING", "", False),
        ("1", "RUNNING", "yes", False),
        ("138", "RUNNING", "yes", True),  # ended by the signal before it could save
        ("138", "RUNNING", "", False),
    ],
)
def test_only_a_running_job_that_was_asked_to_end_is_requeued(
    template: Path, status: str, state: str, asked: str, requeued: bool, tmp_path: Path, submit: Submit
) -> None:
    for name, text in (("squeue", f"echo {state}"), ("scontrol", f'echo "$*" >{tmp_path}/requeued')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    assert submit(template, "net.yaml", STATUS=status, ASKED=asked, SLURM_JOB_ID="12").returncode == int(status)
    assert (tmp_path / "requeued").exists() == requeued
    assert not requeued or (tmp_path / "requeued").read_text() == "requeue 12\n"


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda p: p.stem)
def test_a_requeued_job_keeps_its_log(template: Path) -> None:
    text = template.read_text(encoding="utf-8")
    assert "#SBATCH --requeue" in text and "#SBATCH --open-mode=append" in text
