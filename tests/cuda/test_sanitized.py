"""The kernels' tests once more, in child processes under the address and undefined-behaviour sanitizers, and with threads in other orders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.emulator import ORDER, compiler_found, sanitized

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
HERE = Path(__file__).resolve().parent
FILES = sorted(
    p.name
    for p in HERE.glob("test_*.py")
    if p.stem.split("_")[1] not in ("sanitized", "emulation", "mutations", "compile")
)


def command(file: str, *more: str) -> list[str]:
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--timeout", "900", "-m", "not slow"]
    return [sys.executable, "-m", "pytest", *options, *more, str(HERE / file)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "file", [pytest.param(f, marks=[] if f == "test_dropout.py" else pytest.mark.slow) for f in FILES]
)
def test_nothing_is_read_or_written_outside(file: str) -> None:
    done = sanitized(command(file))
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("order", ["1", "5"])
def test_threads_may_run_in_any_order(file: str, order: str) -> None:
    done = subprocess.run(command(file), env={**os.environ, ORDER: order}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
