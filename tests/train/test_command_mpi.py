"""The train command under mpirun: one clear error for the whole job, within seconds, whichever rank sees it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lbpar.launcher import launched_ranks
from lbpar.transport.stop import STOPPED
from tests.util.training import SMALL, measured, run_file, train

ROOT = Path(__file__).parents[2]

NET = '''
import os
from lbpar.graph.builder import GraphBuilder


def net(*, input=(6, 5, 2), classes=7):
    """A network whose second layer fails in the third step of rank 1, and one whose rank 1 reads another file."""
    from lbpar.runtime.worker import Worker

    run = Worker.run

    def fails(self, feeds, samples, mode="reduce", micro_batch=None):
        if self.transport.rank == 1 and micro_batch is not None and micro_batch.number == 2:
            raise RuntimeError("only here")
        return run(self, feeds, samples, mode, micro_batch)

    Worker.run = fails
    g = GraphBuilder(input=input)
    return g.build(g.linear(g.flatten(g.input), classes))


def lost(*, input=(6, 5, 2), classes=7):
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
        os.chdir("/")
    g = GraphBuilder(input=input)
    return g.build(g.linear(g.flatten(g.input), classes))
'''


@pytest.fixture
def command(tmp_path):
    if launched_ranks() is not None:
        pytest.skip("under a launcher already")
    pytest.importorskip("mpi4py")
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun")
    (tmp_path / "run.yaml").write_text(SMALL)
    (tmp_path / "net.py").write_text(NET)
    settings = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
    }

    def start(procs, *sets, program=("-m", "lbpar.train")):
        sets = ("parallel.strategy=data", *sets)  # unless said otherwise: `auto` would measure the machine first
        more = [part for s in sets for part in (("--set", s) if not s.startswith("--") else (s,))]
        line = [mpirun, "-n", str(procs), sys.executable, *program, "--config", "run.yaml", *more]
        return subprocess.Popen(
            line,
            cwd=tmp_path,
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    return start


def finish(job):
    out, err = job.communicate(timeout=60)  # without an end of their own the jobs would stand still for ever
    return job.returncode, out, err


def test_four_ranks_resume_on_two(command, tmp_path):
    mixed = "parallel.layers={conv1: {N: 2, H: 2}, conv2: {F: 2, C: 2}, fc: {F: 4}}"
    code, out, err = finish(command(4, "parallel.strategy=data", mixed, "train.epochs=2", "run.out=out"))
    assert code == 0, err
    assert out.count("epoch 2/2: loss") == 1
    assert "conv1" in out
    assert "halo(2)" in out
    code, out, err = finish(command(2, "parallel.strategy=filter", "run.out=out", "--resume"))
    assert code == 0, err
    assert "resumed after epoch 2, step 6" in out
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    for got, want in zip(records, train(run_file()).records, strict=True):
        for key, value in want.items():
            np.testing.assert_allclose(measured(got)[key], value, rtol=1e-9, err_msg=key)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["train.epoch=3"], "train.epoch: unknown field"),
        (["parallel.layers={fc: {F: 4}}"], "parallel.layers.fc: F 4 is 4 ways, which do not divide 2 processes"),
        (["data.train=missing.h5"], "missing.h5"),
        (["run.out=run.yaml/out"], "run.out: run.yaml/out cannot be written"),
        (["train.optimizer.lr=1e200"], "the loss is nan, expected a finite number; the output of layer"),
    ],
    ids=["field", "ways", "file", "directory", "nan"],
)
def test_what_all_ranks_see_is_said_once(command, tmp_path, sets, message):
    code, _, err = finish(command(2, "run.out=out", *sets))
    assert code != 0
    assert err.count("lbpar: error: ") == 1
    assert message in err
    assert "Traceback" not in err
    assert "Warning" not in err
    if "nan" not in message:
        assert not (tmp_path / "out").exists()


def test_what_one_rank_sees_ends_all_before_anything_is_written(command, tmp_path):
    with_files = ["model={python: 'net.py:lost'}", "data.train=data.h5", "run.out=out"]
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = np.zeros((22, 6, 5, 2), "f4"), np.zeros(22, "i8")
    code, _, err = finish(command(2, "--allow-code", "data.test=null", *with_files))
    assert code != 0
    assert err.count("lbpar: error: ") == 1
    assert "rank 1: " in err
    assert "data.h5" in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_one_rank_that_fails_in_a_step_ends_the_job(command):
    code, _, err = finish(command(2, "--allow-code", "model={python: 'net.py:net'}", "run.out=out"))
    assert code != 0
    assert "RuntimeError: only here" in err
    assert err.count("lbpar: error: rank 1: ") == 1


def test_a_checkpoint_that_rank_0_cannot_write_ends_the_job(command, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").write_text("mine")
    code, _, err = finish(command(2, "parallel.strategy=filter", "run.out=out"))
    assert code != 0
    assert err.count("lbpar: error: ") == 1
    assert "out/checkpoints" in err
    assert "Traceback" not in err
    assert (tmp_path / "out" / "checkpoints").read_text() == "mine"


def test_single_ranks_of_a_launcher_are_refused(tmp_path):
    (tmp_path / "run.yaml").write_text(SMALL)
    env = {**os.environ, "PMI_SIZE": "2", "PMI_RANK": "0", "PYTHONPATH": str(ROOT)}
    env.pop("LBPAR_ALONE", None)
    if launched_ranks() is not None:
        pytest.skip("under a launcher already")
    pytest.importorskip("mpi4py")
    line = [sys.executable, "-m", "lbpar.train", "--config", "run.yaml", "--set", "run.out=out"]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    if "Traceback" in done.stderr or done.returncode == 0 or "PMI" not in done.stderr:
        pytest.skip("this MPI takes PMI_SIZE for its own launcher's")
    assert "lbpar: error: launch: PMI_SIZE says that 2 ranks were started" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_interrupt_ends_the_job(command, tmp_path):
    job = command(2, "train.epochs=100000", "run.out=out", "run.checkpoint=null")
    assert "ready after" in job.stdout.readline()
    job.send_signal(signal.SIGINT)
    code, _, err = finish(job)
    assert code != 0
    assert "Traceback" not in err


EARLY = """
import sys
from lbpar.transport.stop import stop_signals
with stop_signals() as stop:
    print("up", flush=True)
    from lbpar.train.command import main
    from lbpar.transport.launch import run_main
    sys.exit(run_main(lambda: main(stop=stop)))
"""


def test_a_signal_that_a_launcher_hands_on_while_ranks_start_lets_them_save(command, tmp_path):
    """With Open MPI and MPICH alike: ``mpirun`` hands SIGUSR1 on, and no rank is ended by it."""
    job = command(2, "train.epochs=100000", "run.out=out", program=("-c", EARLY))
    assert [job.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    job.send_signal(signal.SIGUSR1)
    code, out, err = finish(job)
    assert code == STOPPED, err
    assert "SIGUSR1: saved after step 1" in out
    assert [p.name for p in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-000001"]
