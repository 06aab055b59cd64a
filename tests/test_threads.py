"""Threads per process: the node's cores shared out, bindings kept."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lbpar import threads


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("OMP_NUM_THREADS", *threads._LOCAL_SIZES):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("node", "bound_to", "ranks", "want"),
    [
        (64, 64, None, 64),  # alone
        (64, 64, "4", 16),  # not bound
        (64, 16, "4", 16),  # bound to cores of its own
        (64, 16, "32", 2),  # bound to a quarter of the node together with seven others
        (64, 2, "4", 2),  # bound to fewer than its share
        (2, 2, "64", 1),  # more ranks than cores
    ],
)
def test_share(node, bound_to, ranks, want, monkeypatch):
    affinity = {0: range(bound_to), os.getppid(): range(node)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(affinity[pid]), raising=False)
    if ranks is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", ranks)
    assert threads.share() == want


@pytest.mark.parametrize(("text", "want"), [("3", 3), ("2,1", 2), ("many", None), ("0", None)])
def test_the_environment_wins(text, want, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert want is None or threads.share() == want
    assert threads.share() >= 1


@pytest.mark.parametrize(("name", "text"), [("SLURM_STEP_TASKS_PER_NODE", "4(x2)"), ("MPI_LOCALNRANKS", "4")])
def test_ranks_of_a_node(name, text, monkeypatch):
    assert threads.local_ranks() == 1
    monkeypatch.setenv(name, text)
    assert threads.local_ranks() == 4


def test_number_of_a_rank_on_its_node(monkeypatch):
    """Where the launcher does not say it, by the names of nodes."""
    for name in threads._LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_found", 0)
    assert threads.local_rank() == 0
    found = []
    for rank in range(5):
        threads.ranks_found(["a", "b", "a", "b", "a"], rank)
        found.append(threads.local_rank())
    assert found == [0, 0, 1, 1, 2]
    monkeypatch.setenv("FLUX_TASK_LOCAL_ID", "3")
    assert threads.local_rank() == 3


def test_libraries_are_limited_before_numpy_comes(monkeypatch):
    code = "import lbpar.threads as t, sys, os; t.limit_libraries(); print('numpy' in sys.modules, os.environ['MKL_NUM_THREADS'])"
    env = {**os.environ, "OMPI_COMM_WORLD_LOCAL_SIZE": "1000", "OPENBLAS_NUM_THREADS": "7"}
    env.pop("MKL_NUM_THREADS", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "1"]
