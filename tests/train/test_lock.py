"""One job at a time in a run directory: refused at once by name, and never for a job that is gone."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from lbpar.errors import CheckpointError
from lbpar.train import command, lock
from lbpar.train.lock import RunLock, check_free
from tests.util.training import run_file


def held_by(path, **changes):
    """A lock as another job would have left it."""
    (path / "run.lock").write_text(json.dumps({**lock._me(), **changes}))
    return path / "run.lock"


def age(path, seconds):
    now = lock._now(path)
    os.utime(path, (now - seconds, now - seconds))


def dead():
    """A process number that was in use and is no more."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


@pytest.fixture
def no_sleep(monkeypatch):
    monkeypatch.setattr(lock.time, "sleep", lambda s: pytest.fail("waits"))


def test_held_released_and_held_again(tmp_path, monkeypatch, no_sleep):
    monkeypatch.setenv("SLURM_JOB_ID", "88412")
    with RunLock(tmp_path) as first:
        first.check()
        for other in (RunLock, check_free):
            with pytest.raises(CheckpointError) as e:
                other(tmp_path)
            assert f"process {os.getpid()} on {lock.platform.node()}, job 88412, since 2" in str(e.value)
            assert f"delete {tmp_path / 'run.lock'}" in str(e.value)
    check_free(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path):
        pass


def test_released_when_the_run_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), RunLock(tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("changes", [{"pid": None}, {"born": "1"}])
def test_a_dead_process_of_this_machine_is_seen_at_once(changes, tmp_path, no_sleep, caplog):
    """Also one whose number another process has got since."""
    held_by(tmp_path, **(changes if "born" in changes else {"pid": dead()}))
    with caplog.at_level(logging.WARNING), RunLock(tmp_path) as ours:
        ours.check()
    assert "it is gone, its lock is removed" in caplog.text
    assert list(tmp_path.iterdir()) == []


ELSEWHERE = {"place": "another machine", "host": "node17", "pid": 5, "job": "3"}


def test_a_job_elsewhere_that_gave_no_sign_for_long_is_gone(tmp_path, no_sleep, caplog):
    age(held_by(tmp_path, **ELSEWHERE), lock.STALE + 5)
    with caplog.at_level(logging.WARNING), RunLock(tmp_path) as ours:
        ours.check()
    assert "held by process 5 on node17, job 3" in caplog.text


def test_a_job_elsewhere_is_alive_when_it_gives_a_sign(tmp_path, monkeypatch):
    path = held_by(tmp_path, **ELSEWHERE)
    age(path, 8)
    monkeypatch.setattr(lock.time, "sleep", lambda s: age(path, 0))
    with pytest.raises(CheckpointError, match="in use: held by process 5 on node17, job 3"):
        RunLock(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["run.lock"]


def test_a_job_elsewhere_that_ends_while_we_look(tmp_path, monkeypatch):
    path = held_by(tmp_path, **ELSEWHERE)
    monkeypatch.setattr(lock.time, "sleep", lambda s: path.unlink(missing_ok=True))
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_lock_without_a_name_is_judged_by_its_age(text, tmp_path, no_sleep):
    (tmp_path / "run.lock").write_text(text)
    age(tmp_path / "run.lock", lock.STALE + 5)
    with RunLock(tmp_path):
        pass


def test_the_lock_of_a_faster_job_is_not_removed(tmp_path, monkeypatch):
    """Between our look and our removal another job may have removed the dead one's lock and made its own."""
    held_by(tmp_path, pid=dead())
    real = type(tmp_path).rename

    def late(path, target):
        held_by(tmp_path)
        return real(path, target)

    monkeypatch.setattr(type(tmp_path), "rename", late)
    with pytest.raises(CheckpointError, match="in use"):
        RunLock(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["run.lock"]


def test_a_job_that_lost_its_lock_writes_nothing_more(tmp_path):
    with RunLock(tmp_path) as ours:
        held_by(tmp_path, **ELSEWHERE)
        with pytest.raises(CheckpointError, match="no longer this job's: held by process 5 on node17"):
            ours.check()
    assert (tmp_path / "run.lock").exists()  # theirs


def test_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.0)
    with RunLock(tmp_path) as ours:
        age(ours.path, 1000)
        beaten = ours.path.stat().st_mtime_ns
        while ours.path.stat().st_mtime_ns == beaten:  # the thread's next beat ends this
            pass


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
                command.start(config, graph, plan, transport, resume)

        before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
        VirtualWorld(plan.grid).run(job)
        assert {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()} == before
        seen.append(resume)

    def first(transport):
        trainer, goes_on = command.start(config, graph, plan, transport)

        def on_epoch(record):
            if transport.rank == 0:
                for resume in (False, True, "auto"):
                    second(resume)

        return command.run(trainer, goes_on, 0.0, on_epoch)

    VirtualWorld(plan.grid).run(first)
    assert len(seen) == 9
    assert not (tmp_path / "out" / "run.lock").exists()
