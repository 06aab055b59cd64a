"""The templates of jobs/slurm on a real Slurm of two nodes, with Open MPI and MPICH: to the end, requeued, at the time limit, cancelled, a rank killed, a node drained."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.slurm.cluster import Cluster, missing, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

ROOT = Path(__file__).parents[2]
CPU, GPU, MPIRUN = (ROOT / "jobs" / "slurm" / f"{name}.sbatch" for name in ("cpu", "gpu", "mpirun"))
RUN = """
model:
  input: [16, 16, 2]
  layers: [{op: conv, filters: 8, kernel: 3}, {op: norm}, {op: relu}, {op: dropout, rate: 0.2}, {op: global_avg_pool}, {op: linear, features: 3}]
data: {train: synthetic, samples: 64}
train: {batch: 2, epochs: EPOCHS, optimizer: {name: adam}}
parallel: {strategy: data}
engine: {name: numpy, threads: 1}
run: {out: runs/x, progress: none, checkpoint: {every_steps: 7}}
"""
EPOCHS = 12
#: A second environment, with MPICH: beside the one that runs the tests, as `make test` makes it.
MPICH = Path(os.environ.get("LBPAR_TEST_MPICH") or Path(sys.prefix, "mpich"))
OPTIONS = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--time=10")
#: With Open MPI; the template of GPUs on nodes that count some but have none: all that its script does.
EVERY = pytest.mark.parametrize("template", [CPU, GPU, MPIRUN], ids=lambda p: p.stem)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Weights of the same run, not interrupted, on two ranks without Slurm."""
    folder = tmp_path_factory.mktemp("expected")
    (folder / "run.yaml").write_text(RUN.replace("EPOCHS", str(EPOCHS)))
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [str(mpirun), "-n", "2", sys.executable, "-m", "lbpar.train", "--config", "run.yaml"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=_env())
    return weights(folder)


def _env() -> dict[str, str]:
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return os.environ | ours | {"OMPI_MCA_mpi_yield_when_idle": "1"}  # ranks share cores


def weights(folder: Path, run: str = "runs/x") -> dict[str, np.ndarray]:
    """Weights that a run left, from its newest checkpoint."""
    out = folder / f"{Path(run).name}.safetensors"
    command = [sys.executable, "-m", "lbpar.export", "--run", run, "--out", str(out)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=_env() | {"LBPAR_ALONE": "1"})
    return load_file(out)


class Job:
    """A template, submitted in a folder of its own."""

    def __init__(self, cluster: Cluster, folder: Path, template: Path, *options: str) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "run.yaml").write_text(RUN.replace("EPOCHS", str(EPOCHS)))
        gpus = ("--gpus-per-node=1",) if template == GPU else ()
        given = ("run.yaml",) if template in (CPU, GPU, MPIRUN) else ()  # a script that lbpar wrote names its own
        self.options = (*OPTIONS, *gpus, *options, str(template), *given)
        self.id = ""

    def submit(self) -> None:
        self.id = self.cluster.run("sbatch", "--parsable", *self.options, cwd=self.folder).strip()

    @property
    def epochs(self) -> int:
        file = self.folder / "runs/x/metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    @property
    def state(self) -> str:
        return self.cluster.fact(self.id, "JobState")

    @property
    def log(self) -> str:
        return "".join(f.read_text(errors="replace") for f in sorted(self.folder.glob("lbpar-*.log")))

    def seen(self) -> str:
        """What a failed test should show of it."""
        return f"Job {self.id} is {self.state}, {self.epochs} epochs. Nodes: {self.cluster.states()}. Log:\n{self.log}"

    def ended(self) -> bool:
        return self.state in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")

    def reach(self, epochs: int) -> None:
        """Wait until so many epochs are done, and it is still at work."""
        wait_for(lambda: self.epochs >= epochs or self.ended(), f"{epochs} epochs", self.seen)
        assert not self.ended(), self.seen()

    def end(self, state: str = "COMPLETED") -> None:
        """Wait for its end."""
        wait_for(self.ended, "end of the job", self.seen)
        assert self.state == state, self.seen()

    def processes(self, launchers: bool = False) -> list[int]:
        """Training processes of this job, or what launches them, by what Linux says of them."""
        found = []
        mine = f"SLURM_JOB_ID={self.id}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
                python = b"python" in words[0].rpartition(b"/")[2]
                if (
                    python != launchers
                    and b"lbpar.train" in words
                    and mine in (path / "environ").read_bytes().split(b"\0")
                ):
                    found.append(int(path.name))
            except OSError:
                continue
        return found


Submit = Callable[..., Job]


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Iterator[Submit]:
    """Submit a template: environment as a user of this Python would have it. What still runs at the end of a test is cancelled."""
    submitted = []
    cluster.env |= _env() | {"SLURM_CONF": str(cluster.conf), "LBPAR_ENV": sys.prefix, "LBPAR_SRUN_MPI": "pmix"}
    cluster.env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    def make(template: Path, *options: str, mpich: bool = False) -> Job:
        if template != MPIRUN and not mpich and "pmix" not in cluster.run("srun", "--mpi=list"):
            pytest.skip("this Slurm has no pmix: apt-get install libpmix2")
        if mpich and not (MPICH / "bin/mpirun").exists():
            pytest.skip(f"no environment with MPICH in {MPICH}, where `make test` puts one")
        if mpich:
            # What MPICH 5.0.2 says by UCX does not fit Slurm's lines, by chance (docs/mpi.md).
            cluster.env |= {"LBPAR_ENV": str(MPICH), "LBPAR_SRUN_MPI": "pmi2", "MPIR_CVAR_CH4_NETMOD": "ofi"}
        job = Job(cluster, tmp_path, template, *options)
        job.submit()
        submitted.append(job)
        return job

    yield make
    for job in submitted:
        if not job.ended():
            cluster.run("scancel", job.id)


def equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    """To the last bit."""
    return found.keys() == expected.keys() and all(np.array_equal(found[k], expected[k]) for k in expected)


@pytest.mark.parametrize("mpich", [False, True], ids=["openmpi", "mpich"])
@EVERY
def test_trains_to_the_end(template: Path, mpich: bool, submit: Submit, expected: dict[str, np.ndarray]) -> None:
    job = submit(template, mpich=mpich)
    job.end()
    assert job.epochs == EPOCHS and "-> runs/x" in job.log
    assert equal(weights(job.folder), expected)


@pytest.mark.parametrize("mpich", [False, True], ids=["openmpi", "mpich"])
@EVERY
def test_a_job_that_is_asked_to_end_saves_and_is_requeued(
    template: Path, mpich: bool, submit: Submit, cluster: Cluster, expected: dict[str, np.ndarray]
) -> None:
    job = submit(template, mpich=mpich)
    job.reach(1)
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    job.end()
    records = [json.loads(line) for line in (job.folder / "runs/x/metrics.jsonl").read_text().splitlines()]
    assert [r["epoch"] for r in records] == list(range(1, EPOCHS + 1))
    assert len(list(job.folder.glob("lbpar-*.log"))) == 1
    assert "exit status 75" in job.log and "resumed after epoch" in job.log
    assert equal(weights(job.folder), expected)


@pytest.mark.parametrize("template", [CPU, MPIRUN], ids=lambda p: p.stem)
def test_a_signal_while_ranks_start_loses_neither_the_job_nor_itself(
    template: Path, submit: Submit, cluster: Cluster, expected: dict[str, np.ndarray]
) -> None:
    """With MPICH: its mpiexec forgets what comes before its ranks are there, and Python ends by what comes before lbpar."""
    job = submit(template, mpich=True)
    wait_for(lambda: job.processes(launchers=True), "launcher")
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    job.end()
    assert cluster.fact(job.id, "Restarts") == "1"
    assert equal(weights(job.folder), expected)


@EVERY
def test_a_job_refuses_others_by_name_and_goes_on_after_its_time_limit(
    template: Path, submit: Submit, cluster: Cluster, expected: dict[str, np.ndarray]
) -> None:
    # Slurm looks for limits twice a minute.
    job = submit(template, "--nodes=1", "--ntasks-per-node=2", "--time=1", "--signal=B:USR1@10")
    job.reach(1)
    held = max(job.processes())
    os.kill(held, signal.SIGSTOP)  # so that the notice finds it at work
    other = Job(cluster, job.folder, CPU, "--nodes=1", "--output=other.log")
    other.submit()
    other.end("FAILED")
    refused = r"run.out: runs/x is in use: held by process \d+ on n[12], job (\d+), since"
    assert re.findall(refused, (job.folder / "other.log").read_text()) == [job.id]
    wait_for(lambda: pending(held, signal.SIGUSR1), "notice of the time limit")
    os.kill(held, signal.SIGCONT)
    job.end()
    assert "SIGUSR1: saved after step" in job.log and "resumed after epoch" in job.log
    assert equal(weights(job.folder), expected)


def pending(process: int, number: signal.Signals) -> bool:
    """Whether a signal waits for a process that is stopped."""
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(status.partition("ShdPnd:")[2].split()[0], 16) >> (number - 1) & 1)


def test_a_cancelled_job_saves_and_stays_away(
    submit: Submit, cluster: Cluster, expected: dict[str, np.ndarray]
) -> None:
    job = submit(CPU)
    job.reach(1)
    cluster.run("scancel", job.id)
    job.end("CANCELLED")
    # Slurm's own signal, or the one that the script makes of its own: whichever came first.
    assert re.search("SIG(TERM|USR1): saved after step", job.log), job.log
    job.submit()
    job.end()
    assert "resumed after epoch" in job.log
    assert equal(weights(job.folder), expected)


@EVERY
def test_a_killed_rank_ends_the_job_and_another_goes_on(
    template: Path, submit: Submit, expected: dict[str, np.ndarray]
) -> None:
    job = submit(template)
    job.reach(2)
    os.kill(max(job.processes()), signal.SIGKILL)
    job.end("FAILED")
    assert job.epochs < EPOCHS
    job.submit()
    job.end()
    assert equal(weights(job.folder), expected)


@EVERY
def test_a_job_on_a_drained_node_is_requeued_and_ends(
    template: Path, submit: Submit, cluster: Cluster, expected: dict[str, np.ndarray]
) -> None:
    job = submit(template)
    job.reach(2)
    cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    cluster.run("scontrol", "requeue", job.id)
    wait_for(lambda: job.state == "PENDING", "pending job")
    cluster.run("scontrol", "update", "nodename=n2", "state=resume")
    job.end()
    assert equal(weights(job.folder), expected)


def test_tasks_of_an_array_have_folders_of_their_own(
    submit: Submit, cluster: Cluster, expected: dict[str, np.ndarray]
) -> None:
    """Each is a job of its own, and each trains what one alone would."""
    job = submit(CPU, "--array=1-2", "--nodes=1", "--ntasks-per-node=2")
    wait_for(lambda: not cluster.run("squeue", "-h", "-j", job.id).strip(), "end of the array", job.seen)
    for task in (1, 2):
        assert f"-> runs/run-{task}" in job.log, job.log
        assert equal(weights(job.folder, f"runs/run-{task}"), expected)
    assert not (job.folder / "runs/x").exists()


def test_a_script_that_lbpar_writes_for_gpus_is_taken_and_trains(
    cluster: Cluster, tmp_path: Path, submit: Submit, expected: dict[str, np.ndarray]
) -> None:
    (tmp_path / "run.yaml").write_text(RUN.replace("EPOCHS", str(EPOCHS)))
    command = [sys.executable, "-m", "lbpar", "slurm", "write", "--config", "run.yaml", "--machine", "h100-nvl8"]
    command += [
        "--nodes",
        "2",
        "--ntasks-per-node",
        "1",
        "--gpus-per-node",
        "1",
        "--cpus-per-task",
        "1",
        "--time",
        "10",
    ]
    done = subprocess.run([*command, "--out", "job.sbatch"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "2 ranks on 2 nodes" in done.stdout and "expected on h100-nvl8" in done.stdout
    job = submit(tmp_path / "job.sbatch")
    job.end()
    assert cluster.fact(job.id, "TresPerNode").endswith("gpu:1") and job.epochs == EPOCHS
    assert equal(weights(job.folder), expected)


def test_a_study_is_one_job_array(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN.replace("EPOCHS", "1"))
    command = [sys.executable, "-m", "lbpar.study", "strong", "--config", "run.yaml", "--procs", "1,2", "--plans"]
    command += ["data", "--machine", "laptop", "--out", "study", "--steps", "2", "--warmup", "1", "--repeats", "2"]
    done = subprocess.run(
        [*command, "--slurm", "--time=5 --ntasks-per-node=2"],
        cwd=tmp_path,
        env=cluster.env | _env() | {"SLURM_CONF": str(cluster.conf)},
        capture_output=True,
        text=True,
        check=False,
    )
    logs = "".join(f.read_text() for f in tmp_path.glob("study/*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert len(list(tmp_path.glob("study/slurm-*.log"))) == 2
    rows = json.loads((tmp_path / "study/study.json").read_text())["rows"]
    assert [(r["procs"], r["seconds"] > 0) for r in rows] == [(1, True), (2, True)]
