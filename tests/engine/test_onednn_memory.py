"""No kernel of the oneDNN engine reads stale memory or memory of others: a small part of the fuzz, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lbpar.engine.onednn import library
from lbpar.engine.registry import get_engine
from lbpar.errors import EngineError


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request):
    try:
        get_engine("onednn", request.param, 1)
    except EngineError as error:
        pytest.skip(str(error))
    return request.param


def fuzz(*words):
    command = [sys.executable, "-m", "tests.engine.fuzz_onednn", *words]
    waiting = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(command, check=False, env=waiting, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("threads", "cases"), [(1, 400), (2, 100)])
def test_small_and_odd_blocks(dtype, threads, cases):
    done = fuzz("--cases", str(cases), "--seed", str(threads), "--dtype", dtype, "--threads", str(threads))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_fuzz_finds_what_it_was_made_for():
    try:
        get_engine("onednn", "bfloat16", 1)
    except EngineError as error:
        pytest.skip(str(error))
    if library.load().version != (3, 2, 0):
        pytest.skip("another library than the one with the faults")
    done = fuzz("--cases", "0", "--raw")
    assert done.returncode == 1 and "wrong" in done.stdout, done.stdout + done.stderr
