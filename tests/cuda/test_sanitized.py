"""The kernels' tests once more, in child processes under the address and undefined-behaviour sanitizers, and with threads in other orders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda.beside import Beside, beside
from tests.cuda.emulator import ORDER, compiler_found, sanitized

pytestmark = [
    pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler"),
    pytest.mark.timeout(1800),  # compiling takes long on a loaded machine
]
HERE = Path(__file__).resolve().parent
FILES = sorted(
    p.name
    for p in HERE.glob("test_*.py")
    if p.stem.split("_")[1] not in ("sanitized", "emulation", "mutations", "compile", "whole")
)
ELSEWHERE = "not (faults or limit or wrong)"
"""Tests of what is built otherwise, and fails: no sanitizer has more to say of them."""


def child(file: str, order: str | None) -> subprocess.CompletedProcess[str]:
    """Run a file's quick tests under sanitizers, or in an order of threads."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--timeout", "900", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", *options, "-k", ELSEWHERE, str(HERE / file)]
    if order is None:
        return sanitized(command)
    return subprocess.run(command, env={**os.environ, ORDER: order}, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def done(request: pytest.FixtureRequest) -> Iterator[Beside]:
    yield from beside(request, child, "file", "order")


@pytest.mark.parametrize(
    "file", [pytest.param(f, marks=[] if f == "test_dropout.py" else pytest.mark.slow) for f in FILES]
)
def test_nothing_is_read_or_written_outside(done: Beside, file: str) -> None:
    ran = done(file, None)
    assert ran.returncode == 0 and " passed" in ran.stdout, (ran.stdout + ran.stderr)[-6000:]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("order", ["1", "5"])
def test_threads_may_run_in_any_order(done: Beside, file: str, order: str) -> None:
    ran = done(file, order)
    assert ran.returncode == 0 and " passed" in ran.stdout, (ran.stdout + ran.stderr)[-6000:]
