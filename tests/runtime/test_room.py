"""Whether a program can fit is asked before anything is allocated."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from lbpar.engine.half import NumpyHalves
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.errors import EngineError
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.models.registry import build_model
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.runtime import room


def test_a_program_larger_than_the_node_is_refused_with_its_largest_array(monkeypatch: pytest.MonkeyPatch) -> None:
    program = lower(build_model("lenet").with_loss(CrossEntropy()), Plan(Grid(), {}), 64)
    engine = NumpyEngine("float32")
    room.check_room(program, engine)
    monkeypatch.setattr(room, "node_memory", lambda: 1 << 20)
    with pytest.raises(
        EngineError, match=r"at least 4\.31 MB \(the largest array is relu1:y with 1\.2 MB\), but there are 1\.05 MB"
    ):
        room.check_room(program, engine)


def test_of_an_engine_with_memory_of_its_own_the_node_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    program, engine = (
        lower(build_model("lenet").with_loss(CrossEntropy()), Plan(Grid(), {}), 64),
        NumpyEngine("float32"),
    )
    monkeypatch.setattr(room, "node_memory", lambda: 1 << 20)
    engine.capacity = 1 << 30
    room.check_room(program, engine)
    engine.capacity = 1 << 21
    with pytest.raises(EngineError, match=r"at least 4\.31 MB .* but there are 2\.1 MB on this GPU"):
        room.check_room(program, engine)


def test_half_types_take_half(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ml_dtypes")
    program = lower(build_model("lenet").with_loss(CrossEntropy()), Plan(Grid(), {}), 64)
    monkeypatch.setattr(room, "node_memory", lambda: 3_500_000)
    room.check_room(program, NumpyHalves("bfloat16"))
    with pytest.raises(EngineError, match="on this node"):
        room.check_room(program, NumpyEngine("float32"))


def test_a_limit_of_the_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    free = room.node_memory()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (12345, 12345))
    assert room.node_memory() == 12345 < free


LEAVE = r"""
import re, sys
import numpy as np
from lbpar.runtime.room import leave_libraries

def size(kind):
    return int(re.search(kind + r": *(\d+) kB", open("/proc/self/smaps_rollup").read())[1])

a = np.arange(10000.0).reshape(100, 100)
before = a @ a, size("Rss"), size("Anonymous")
leave_libraries()
own, left = size("Anonymous"), before[1] - size("Rss")
assert np.array_equal(a @ a, before[0])
assert abs(own - before[2]) < 500
print(left)
"""


def test_libraries_let_go_of_what_they_only_read_and_work_on() -> None:
    if not os.path.exists("/proc/self/smaps_rollup"):
        pytest.skip("not Linux")
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5000  # kB; Python, NumPy and BLAS have 15,000
