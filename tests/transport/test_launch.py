from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lbpar.errors import CommError, ConfigError
from lbpar.launcher import launched_ranks
from lbpar.layout.grid import Grid
from lbpar.transport import launch
from lbpar.transport.checked import CheckedTransport
from lbpar.transport.launch import check_world, connect, run_main, self_test
from lbpar.transport.single import SingleTransport
from lbpar.transport.virtual import VirtualWorld
from lbpar.transport.watch import START, Watch, hang_seconds

OPENMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
SBATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_NNODES": "2"}
SRUN = {**SBATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}


@pytest.mark.parametrize(
    ("env", "want"),
    [
        ({}, None),
        (OPENMPI, (4, 2, "OMPI_COMM_WORLD_SIZE")),
        ({"PMI_SIZE": "3", "PMI_RANK": "0"}, (3, 0, "PMI_SIZE")),
        (SRUN, (4, 3, "SLURM_STEP_NUM_TASKS")),
        ({**SRUN, "PMI_SIZE": "4", "PMI_RANK": "3"}, (4, 3, "PMI_SIZE")),
        (SBATCH, None),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}, None),
        # srun of an old Slurm that does not set SLURM_STEP_NUM_TASKS: all ranks but the first can tell.
        ({**SBATCH, "SLURM_PROCID": "2"}, (3, 2, "SLURM_PROCID")),
        # mpirun inside a step of Slurm, one rank of its own on purpose.
        ({**SRUN, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, (1, 0, "OMPI_COMM_WORLD_SIZE")),
        ({"PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.7.0"}, (6, 5, "PMIX_RANK")),
        ({**OPENMPI, "LBPAR_ALONE": "1"}, None),
        ({"PMI_SIZE": "many", "PMI_RANK": "0"}, None),
    ],
)
def test_launched_ranks(env: dict[str, str], want: tuple[int, int, str] | None) -> None:
    assert launched_ranks(env) == want


def test_single_ranks_of_a_launcher_are_refused_with_the_remedy() -> None:
    for env in (OPENMPI, SRUN, {"PMIX_RANK": "5", "PMIX_NAMESPACE": "x"}):
        with pytest.raises(CommError) as e:
            check_world(1, env)
        for remedy in ("srun --mpi=list", "--mpi=pmix", "--mpi=pmi2", "mpirun", "LBPAR_ALONE=1"):
            assert remedy in str(e.value)
    check_world(4, OPENMPI)
    check_world(1, SBATCH)
    check_world(1, {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"})


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LBPAR_ALONE", "1")


def test_connect_without_a_launcher_is_one_rank(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(connect(), SingleTransport)
    assert connect(Grid((1,))).grid == Grid((1,))
    with pytest.raises(CommError, match="has 4 processes, expected 1"):
        connect(Grid.of(4))
    monkeypatch.setenv("LBPAR_ALONE", "perhaps")
    with pytest.raises(ConfigError, match="LBPAR_ALONE='perhaps', expected 0 or 1"):
        connect()


def test_self_test_passes_and_is_not_counted() -> None:
    world = VirtualWorld(Grid((2, 2)))
    world.run(self_test)
    assert world.transport(0).counter.items() == {}
    world.run(lambda t: self_test(CheckedTransport(t)))


@pytest.mark.parametrize("fault", ["sum", "message", "version"])
def test_self_test_finds_a_broken_transport(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = VirtualWorld(Grid((3,)))
    t = world.transport(1)
    if fault == "sum":
        real = t.allreduce
        monkeypatch.setattr(t, "allreduce", lambda buf, *a, **k: real(buf * 0 + 7, *a, **k))
    elif fault == "message":
        send = t.exchange
        monkeypatch.setattr(t, "exchange", lambda s, *a, **k: send({r: b + 1 for r, b in s.items()}, *a, **k))
    else:
        share = t.allgather_obj
        monkeypatch.setattr(t, "allgather_obj", lambda o: share(("lbpar 0.0.1", "elsewhere")))
    message = {
        "sum": "came out as",
        "message": "message of rank 1 arrived damaged",
        "version": "rank 1 on elsewhere has",
    }
    with pytest.raises(CommError, match="self-test: .*" + message[fault]):
        world.run(self_test)


def test_run_main_on_one_rank(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: BaseException) -> int:
        def main() -> int:
            raise error

        return run_main(main)

    assert run_main(lambda: None) == 0
    assert run_main(lambda: 3) == 3
    assert capsys.readouterr().err == ""
    assert fail(ConfigError("run.yaml: no such file")) == 1
    assert capsys.readouterr().err == "lbpar: error: run.yaml: no such file\n"
    assert fail(SystemExit(2)) == 2
    assert fail(SystemExit(0)) == 0
    assert fail(KeyboardInterrupt()) == 130
    assert "Traceback" not in capsys.readouterr().err
    assert fail(ZeroDivisionError("1/0")) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and "ZeroDivisionError: 1/0" in err and "in run_main" not in err


JOB = """
import os, signal, sys, time
if int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0) == 1:
    if sys.argv[1] == "stopped before":
        os.kill(os.getpid(), signal.SIGSTOP)
    if sys.argv[1] == "no MPI":
        sys.modules["mpi4py"] = None
import numpy as np
from lbpar.errors import ConfigError
from lbpar.transport.launch import connect, run_main

def main():
    mode = sys.argv[1]
    if mode == "all fail before":
        raise ConfigError("run.yaml: field is wrong")
    t = connect()
    if mode == "all differ":
        t.exchange({(t.rank + 1) % t.size: np.ones(10**6)}, {}, "f8", t.grid.axes)   # left under way
        raise ConfigError(f"mine is {t.rank // 2}")
    if t.rank == 1:
        if mode == "one fails":
            raise ConfigError("only here")
        if mode == "bug":
            return 1 // 0
        if mode == "hang":
            time.sleep(600)
        if mode == "exit 0":
            sys.exit(0)
    t.allreduce(np.ones(4), t.grid.axes, tag="never").wait()

sys.exit(run_main(main))
"""


@pytest.fixture
def mpirun(tmp_path: Path) -> list[str]:
    if launched_ranks() is not None:
        pytest.skip("under a launcher already")
    pytest.importorskip("mpi4py")
    found = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun")
    job = tmp_path / "job.py"
    job.write_text(JOB)
    return [found, "-n", "3", sys.executable, str(job)]


def job(mpirun: list[str], mode: str, **env: str) -> subprocess.CompletedProcess[str]:
    settings = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    # The jobs would stand still for ever if their failure did not end them; they take 2 to 5 seconds.
    return subprocess.run(
        [*mpirun, mode],
        check=False,
        env={**os.environ, **settings, **env},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
    )


def test_one_failing_rank_ends_the_job(mpirun: list[str]) -> None:
    done = job(mpirun, "one fails")
    assert done.returncode != 0
    assert done.stderr.count("lbpar: error: rank 1: only here") == 1
    assert "Traceback" not in done.stderr


def test_a_bug_on_one_rank_ends_the_job_with_its_traceback(mpirun: list[str]) -> None:
    done = job(mpirun, "bug")
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1
    assert "return 1 // 0" in done.stderr and "lbpar: error: rank 1: ZeroDivisionError" in done.stderr


def test_ranks_that_fail_alike_say_it_once(mpirun: list[str]) -> None:
    done = job(mpirun, "all fail before")
    assert done.returncode != 0
    assert done.stderr.count("lbpar: error:") == 1
    assert "lbpar: error: run.yaml: field is wrong" in done.stderr


def test_ranks_that_fail_differently_each_speak(mpirun: list[str]) -> None:
    done = job(mpirun, "all differ")
    assert done.returncode != 0
    assert done.stderr.count("lbpar: error:") == 2
    assert "rank 0: mine is 0" in done.stderr and "rank 2: mine is 1" in done.stderr


def test_a_hanging_job_shows_the_stacks_of_every_rank_and_ends(mpirun: list[str], tmp_path: Path) -> None:
    done = job(mpirun, "hang", LBPAR_HANG_SECONDS="1", LBPAR_STACKS=str(tmp_path / "stacks"))
    assert done.returncode != 0
    assert "the job is ended" in done.stderr
    texts = [(tmp_path / "stacks" / f"rank{r}.txt").read_text() for r in range(3)]
    assert "rank 0: no progress" in texts[0] and "waiting for allreduce 'never'" in texts[0]
    assert "not waiting for other ranks" in texts[1]
    assert all("job.py" in t and "in main" in t for t in texts)


def test_a_rank_without_mpi_says_so(mpirun: list[str]) -> None:
    done = job(mpirun, "no MPI")
    assert done.returncode != 0
    assert done.stderr.count("lbpar: error: rank 1: MPI: mpi4py cannot be used") == 1


@pytest.mark.slow
def test_a_rank_that_does_not_come_ends_the_job(mpirun: list[str]) -> None:
    done = job(mpirun, "stopped before", LBPAR_HANG_SECONDS="2")
    assert done.returncode != 0
    assert re.search(
        r"lbpar: error: rank [02]: no progress for \d+ s, waiting for all ranks of the job to start MPI", done.stderr
    )


@pytest.mark.slow
def test_one_rank_that_exits_in_peace_ends_the_job_of_those_who_wait_for_it(mpirun: list[str]) -> None:
    done = job(mpirun, "exit 0", LBPAR_HANG_SECONDS="5")
    assert done.returncode != 0
    assert re.search(r"lbpar: error: rank [02]: no progress .*waiting for allreduce 'never'", done.stderr)
    assert "lbpar: error: rank 1" not in done.stderr


def test_the_watch_ends_those_who_wait_and_not_those_who_work(tmp_path: Path) -> None:
    with open(tmp_path / "stacks", "w+") as out:
        ended: queue.Queue[str] = queue.Queue()
        watch = Watch(3, 1e-3, ended.put, out)
        while "not waiting for other ranks. Stacks" not in (tmp_path / "stacks").read_text():
            pass
        watch.enter("allreduce 'conv1'")
        message = ended.get()
        watch.stop()
    assert message.startswith(
        "lbpar: error: rank 3: no progress for 0 s, waiting for allreduce 'conv1'; the job is ended."
    )
    assert "set LBPAR_HANG_SECONDS to more than 0.001" in message
    assert ended.empty()


@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="no SIGUSR2 here")
def test_sigusr2_shows_the_stacks_and_goes_on() -> None:
    code = (
        "import sys\nfrom lbpar.transport.launch import run_main\n"
        "def main():\n    print('ready', flush=True)\n    return int(input())\nsys.exit(run_main(main))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "LBPAR_ALONE": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR2)
        shown = process.stderr.readline()  # waits for the stacks; the reader may have buffered more than this line
        assert process.stdin is not None
        process.stdin.write("0\n")
        process.stdin.close()
        shown += process.stderr.read()
        process.wait(timeout=60)
    assert "most recent call first" in shown and "in main" in shown
    assert process.returncode == 0


def test_hang_seconds_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("soon", "-1", "inf", "nan"):
        monkeypatch.setenv("LBPAR_HANG_SECONDS", text)
        with pytest.raises(ConfigError, match=f"LBPAR_HANG_SECONDS='{text}'"):
            hang_seconds()
    monkeypatch.delenv("LBPAR_HANG_SECONDS")
    assert (hang_seconds(), hang_seconds(START)) == (600, 120)
    monkeypatch.setenv("LBPAR_HANG_SECONDS", "90")
    assert hang_seconds(START) == 90
    assert hang_seconds() == 90 and np.isfinite(hang_seconds())


def test_a_text_that_the_locale_cannot_write_is_told_in_words() -> None:
    with pytest.raises(UnicodeEncodeError) as caught:
        "läufe".encode("ascii")
    told = launch._describe(caught.value, 0, 1)
    assert "Traceback" not in told and "'l\\xe4ufe'" in told and "LC_ALL=C.UTF-8" in told
