"""The launcher started one world, not n single ranks, and its ranks can talk."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.mpi


def test_launcher_and_mpi_agree_on_the_number_of_ranks() -> None:
    from mpi4py import MPI

    told = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE")
    if told is None:
        pytest.skip("this launcher does not say how many ranks it started")
    assert MPI.COMM_WORLD.size == int(told)


def test_ranks_reach_each_other() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert world.allgather(world.rank) == list(range(world.size))
