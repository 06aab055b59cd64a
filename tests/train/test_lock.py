"""One job at a time in a run directory: refused at once by name, and never for a job that is gone."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from lbpar.errors import CheckpointError
from lbpar.train import job as jobs
from lbpar.train import lock
from lbpar.train.lock import check_free, run_lock
from tests.util.training import run_file

HOLDER = """
import sys
from lbpar.train.lock import run_lock
with run_lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(path):
    with run_lock(path):
        pass


ELSEWHERE = json.dumps({"host": "node17", "pid": 5, "job": "3", "since": "2026-01-31 18:02:11"})


def test_held_released_and_held_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "88412")
    with run_lock(tmp_path) as check:
        check()
        for other in (hold, check_free):
            with pytest.raises(CheckpointError) as e:
                other(tmp_path)
            assert f"process {os.getpid()} on {lock.platform.node()}, job 88412, since 2" in str(e.value)
            assert f"delete {tmp_path / 'run.lock'}" in str(e.value)
    check_free(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with run_lock(tmp_path):
        pass


def test_released_when_the_run_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), run_lock(tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_a_job_that_is_gone_holds_nothing(how, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        for ours in (hold, check_free):
            with pytest.raises(CheckpointError, match=f"in use: held by process {other.pid} on"):
                ours(tmp_path)
        other.kill() if how == "is killed" else other.stdin.close()
        other.wait()
        check_free(tmp_path)
        with run_lock(tmp_path) as check:
            check()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", ELSEWHERE])
def test_what_an_earlier_job_left_is_taken_over(text, tmp_path):
    (tmp_path / "run.lock").write_text(text)
    check_free(tmp_path)
    with run_lock(tmp_path) as check:
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
        check()
        (tmp_path / "run.lock").write_text(text)
        who = (
            "process 5 on node17, job 3, since 2026-01-31 18:02:11" if text == ELSEWHERE else "a job that has not said"
        )
        with pytest.raises(CheckpointError, match=f"in use: held by {who}"):
            check_free(tmp_path)


def test_a_lock_that_was_released_while_we_opened_it_is_made_anew(tmp_path, monkeypatch):
    """The file that we have locked then is not the one that others see."""
    real, calls = lock.fcntl.flock, []

    def late(file, how):
        calls.append(file)
        if len(calls) == 1:
            (tmp_path / "run.lock").unlink()
        return real(file, how)

    monkeypatch.setattr(lock.fcntl, "flock", late)
    with run_lock(tmp_path) as check:
        check()
        with pytest.raises(CheckpointError, match="in use"):
            hold(tmp_path)
    assert len(calls) == 3


def test_without_locks_in_the_file_system_the_later_job_is_noticed(tmp_path, monkeypatch, caplog):
    def without(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", without)
    with run_lock(tmp_path) as check:
        check()
        (tmp_path / "run.lock").write_text(ELSEWHERE)
        with pytest.raises(CheckpointError, match="no longer this job's: held by process 5 on node17, job 3"):
            check()
    assert "cannot be locked: No locks available" in caplog.text


def test_a_job_that_lost_its_lock_writes_nothing_more(tmp_path):
    with run_lock(tmp_path) as check:
        (tmp_path / "run.lock").unlink()
        with pytest.raises(CheckpointError, match="no longer this job's: it was removed"):
            check()
        (tmp_path / "run.lock").write_text(ELSEWHERE)
        with pytest.raises(CheckpointError, match="no longer this job's: held by process 5 on node17"):
            check()
    assert (tmp_path / "run.lock").exists()  # theirs


def test_a_directory_that_cannot_be_written(tmp_path):
    with pytest.raises(CheckpointError, match="run.lock cannot be written: No such file or directory; choose another"):
        hold(tmp_path / "none")
    check_free(tmp_path / "none")


def test_a_second_job_is_refused_and_changes_nothing(tmp_path):
    """With and without --resume, before and after the first has saved; on all ranks alike."""
    config = run_file([f"run.out={tmp_path / 'out'}", "parallel.strategy=data"])
    from lbpar.api import make_plan
    from lbpar.train.setup import build_graph
    from lbpar.transport.virtual import VirtualWorld

    graph = build_graph(config)
    plan = make_plan(config, graph, 2)
    seen = []

    def second(resume):
        def job(transport):
            with pytest.raises(CheckpointError, match="rank 0: run.out: .*in use: held by process"):
                jobs.start(config, graph, plan, transport, resume=resume)

        before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
        VirtualWorld(plan.grid).run(job)
        assert {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()} == before
        seen.append(resume)

    def first(transport):
        trainer, goes_on = jobs.start(config, graph, plan, transport)

        def on_epoch(record):
            if transport.rank == 0:
                for resume in (False, True, "auto"):
                    second(resume)

        return jobs.run(trainer, goes_on, 0.0, on_epoch)

    VirtualWorld(plan.grid).run(first)
    assert len(seen) == 9
    assert not (tmp_path / "out" / "run.lock").exists()
