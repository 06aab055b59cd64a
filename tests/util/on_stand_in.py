"""Run a module of lbpar on the stand-in for CuPy: ``python -m tests.util.on_stand_in MODULE ARGUMENTS``, also under mpirun."""

from __future__ import annotations

import os
import runpy
import sys

import pytest

from lbpar.launcher import launched_ranks
from lbpar.selftest import parts
from tests.util import fake_cupy

DEVICES = "STAND_IN_DEVICES"
"""Environment variable: devices of the pretended node."""


def main() -> None:
    patch = pytest.MonkeyPatch()
    fake_cupy.install(patch, devices=int(os.environ.get(DEVICES, "4")))
    if launched_ranks() is not None:
        from tests.util.fake_cupy import nccl_mpi

        patch.setitem(sys.modules, "cupy.cuda.nccl", nccl_mpi)
        patch.setattr(fake_cupy.cuda, "nccl", nccl_mpi)
        nccl_mpi.install(patch)
    fake_cupy.few_kernels(patch, 8)  # of any type: addresses are multiples of the largest one
    patch.setattr(parts, "PYTHON", (sys.executable, "-m", "tests.util.on_stand_in"))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
