"""`lbpar slurm write`: a script for one run file, what the planner expects of it, and what it refuses."""

from __future__ import annotations

import subprocess
from math import inf
from pathlib import Path

import pytest

from lbpar.slurm import main, seconds_of

RUN = """
model: {input: [8, 8, 1], layers: [{op: conv, filters: 4, kernel: 3}, {op: global_avg_pool}, {op: linear, features: 3}]}
data: {train: synthetic, samples: 100}
train: {batch: 8, epochs: 3}
machine: MACHINE
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.yaml").write_text(RUN.replace("MACHINE", "perlmutter-a100"))
    return tmp_path


LINE = [
    "write",
    "--config",
    "net.yaml",
    "--nodes",
    "2",
    "--ntasks-per-node",
    "4",
    "--cpus-per-task",
    "8",
    "--time",
    "1:30:00",
]


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_writes_a_script_that_starts_the_run_file(
    folder: Path, launcher: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [
        "--set",
        "train.batch=16",
        "--sbatch",
        "partition=long",
        "--sbatch",
        "exclusive=user",
        "--launcher",
        launcher,
    ]
    assert main([*LINE, *more, "--out", "j.sbatch"]) == 0
    told = capsys.readouterr().out
    assert "8 ranks on 2 nodes" in told and "21 steps" in told and "per rank, of 40 GB" in told
    text = (folder / "j.sbatch").read_text()
    for line in (
        "nodes=2",
        "ntasks-per-node=4",
        "cpus-per-task=8",
        "time=1:30:00",
        "job-name=net",
        "signal=B:USR1@120",
        "partition=long",
        "exclusive=user",
    ):
        assert text.count(f"#SBATCH --{line}\n") == 1
    assert "# change: one per socket" not in text and text.index("#SBATCH --partition") < text.index("set -euo")
    # What it starts, seen by a launcher that prints its command line.
    for name in ("srun", "mpirun"):
        (folder / name).write_text('#!/bin/bash\necho "$@"\n')
        (folder / name).chmod(0o755)
    (folder / "bin").mkdir()
    (folder / "bin/activate").touch()
    env = {"PATH": f"{folder}:/usr/bin:/bin", "LBPAR_ENV": str(folder), "SLURM_CPUS_PER_TASK": "8"}
    env |= {"SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_NUM_NODES": "2"}
    done = subprocess.run(
        ["bash", "j.sbatch", "--set", "train.epochs=9"], env=env, capture_output=True, text=True, check=True
    )
    assert (
        "python -m lbpar.train --resume auto --config net.yaml --set train.batch=16 --set train.epochs=9" in done.stdout
    )


@pytest.mark.parametrize(
    ("more", "notice"),
    [
        ([], "B:USR1@120"),
        (["--time", "3"], "B:USR1@90"),  # half of it
        (["--sbatch", "signal=TERM@60"], "TERM@60"),
        (
            ["--set", "model.layers=[{op: flatten}, {op: linear, features: 80000000}]"],
            "B:USR1@832",
        ),  # 20.8 GB, momentum too
    ],
)
def test_asks_for_a_signal_that_leaves_time_to_save(folder: Path, more: list[str], notice: str) -> None:
    (folder / "net.yaml").write_text(RUN.replace("MACHINE", "auto"))
    assert main([*LINE, *more, "--out", "j.sbatch"]) == 0
    signals = [x for x in (folder / "j.sbatch").read_text().splitlines() if "--signal=" in x]
    assert signals == [f"#SBATCH --signal={notice}"]


def test_says_what_does_not_fit_or_takes_several_jobs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = [
        "--set",
        "model.input=[4096,4096,64]",
        "--set",
        "train.batch=64",
        "--set",
        "train.epochs=100000",
        "--set",
        "parallel.strategy=data",
    ]
    assert main([*LINE, *large, "--out", "j.sbatch"]) == 0
    told = capsys.readouterr().out
    assert "this does not fit" in told and "each goes on where the one before was ended" in told


@pytest.mark.parametrize(
    ("change", "steps"),
    [("train.accumulate=2", 39), ("train.max_steps=5", 5), ("data.drop_last=true", 36), ("data.samples=3", 3)],
)
def test_counts_the_batches_that_training_takes(
    folder: Path, change: str, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 100 samples in batches of 8, three times."""
    assert main([*LINE, "--set", change, "--out", "j.sbatch"]) == 0
    assert f" {steps} steps" in capsys.readouterr().out
    assert main([*LINE, "--set", "train.accumulate=2", "--set", "train.max_steps=5", "--out", "j.sbatch"]) == 0
    assert " 10 steps" in capsys.readouterr().out  # max_steps counts updates, of two batches each


def test_fills_the_template_of_gpus_with_no_more_than_it_must_know(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["write", "--config", "net.yaml", "--nodes", "8", "--ntasks-per-node", "4", "--time", "2:00:00"]
    gpu = ["--set", "engine.name=cupy"]
    assert main([*line, *gpu, "--gpus-per-node", "4"]) == 0
    told, text = capsys.readouterr().out, (folder / "net.sbatch").read_text()
    assert "net.sbatch: 32 ranks on 8 nodes" in told and "16 cores a rank, as the template has it" in told
    assert "#SBATCH --gpus-per-node=4\n" in text and "#SBATCH --cpus-per-task=16" in text and "NCCL" in text
    assert "cupy needs GPUs" not in told
    assert main([*line, *gpu, "--sbatch", "gres=gpu:4"]) == 0
    assert "cupy needs GPUs" not in capsys.readouterr().out
    assert main([*line, *gpu]) == 0
    assert "cupy needs GPUs, for which this script does not ask" in capsys.readouterr().out
    assert "gpus-per-node" not in (folder / "net.sbatch").read_text()
    assert main([*line, "--gpus-per-node", "4"]) == 0
    assert "auto takes no GPU, but this script asks for some" in capsys.readouterr().out


def test_a_machine_to_be_measured_promises_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "net.yaml").write_text(RUN.replace("MACHINE", "auto"))
    assert main([*LINE, "--out", "j.sbatch"]) == 0
    assert "name one with --machine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--nodes", "0"], "--nodes: got 0"),
        (["--time", "soon"], "--time: got soon"),
        (["--gpus-per-node", "2"], "--gpus-per-node: got 2 with 4 ranks a node"),
        (["--gpus-per-node", "4", "--launcher", "mpirun"], "no template for GPUs"),
        (["--sbatch", "long"], "expected NAME=VALUE"),
        (["--sbatch", "time=1"], "give --time 1"),
        (["--set", "parallel.procs=3"], "asks for 3, but this job has 8"),
        (["--machine", "nowhere"], "nowhere"),
        (["--out", "net.yaml"], "is no script"),
    ],
)
def test_refuses(folder: Path, more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "net.yaml").read_text()
    assert main([*LINE, "--out", "j.sbatch", *more]) == 2
    assert words in capsys.readouterr().err
    assert (folder / "net.yaml").read_text() == before and not (folder / "j.sbatch").exists()


def test_times_of_slurm() -> None:
    times = {"90": 5400, "1:30": 90, "1:30:00": 5400, "2-12": 216000, "1-0:30": 88200, "1-01:00:05": 90005}
    assert {t: seconds_of(t) for t in times} == times
    assert [seconds_of(t) for t in ("0", "0:00:00", "0-0")] == [inf] * 3  # no limit, says sbatch


def test_a_job_without_a_limit_is_one_job(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, "--time", "0", "--out", "j.sbatch"]) == 0
    assert "jobs" not in capsys.readouterr().out
    text = (folder / "j.sbatch").read_text()
    assert "#SBATCH --time=0\n" in text and "#SBATCH --signal=B:USR1@120\n" in text
