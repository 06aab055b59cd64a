"""What a run says of where it was made."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from lbpar import __version__
from lbpar.provenance import commit, hosts, provenance, timestamp


def git(folder: Path, *args: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=n@localhost", "-c", "init.defaultBranch=main")
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    done = subprocess.run(
        ["git", *identity, *args], cwd=folder, env=env, check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip()


@pytest.mark.parametrize("state", ["branch", "packed", "detached", "worktree"])
def test_the_commit_is_read_from_gits_files(tmp_path: Path, state: str) -> None:
    top = tmp_path / "a"
    top.mkdir()
    git(top, "init", "-q")
    git(top, "commit", "-q", "--allow-empty", "-m", "first")
    want = git(top, "rev-parse", "HEAD")
    if state == "packed":
        git(top, "pack-refs", "--all")
    elif state == "detached":
        git(top, "checkout", "-q", "--detach")
    elif state == "worktree":
        git(top, "worktree", "add", "-q", "-b", "other/name", str(tmp_path / "b"))
        top = tmp_path / "b"
    assert commit(top) == want


def test_other_folders_have_no_commit(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    (tmp_path / ".git").write_text("gitdir: nowhere\n")
    assert commit(tmp_path) is None


def test_command_job_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "-m", "lbpar.train", "--config", "my run.yaml"])
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    found = provenance()
    assert found["command"].endswith(" -m lbpar.train --config 'my run.yaml'")
    assert found["job"] == "77"
    assert found["versions"]["lbpar"] == __version__
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "numpy" in found["versions"]


def test_ranks_by_host_and_times_with_their_zone() -> None:
    assert hosts(["a", "b", "a"]) == {"a": [0, 2], "b": [1]}
    early, late = datetime.fromisoformat(timestamp(90.0)), datetime.fromisoformat(timestamp())
    assert early.utcoffset() is not None
    assert 89 < (late - early).total_seconds() < 120
