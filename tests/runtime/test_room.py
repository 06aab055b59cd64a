"""Whether a program can fit is asked before anything is allocated."""

from __future__ import annotations

import resource

import pytest

from lbpar.errors import EngineError
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.models.registry import build_model
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.runtime import room


def test_a_program_larger_than_the_node_is_refused_with_its_largest_array(monkeypatch: pytest.MonkeyPatch) -> None:
    program = lower(build_model("lenet").with_loss(CrossEntropy()), Plan(Grid(), {}), 64)
    room.check_room(program, "float32")
    monkeypatch.setattr(room, "node_memory", lambda: 1 << 20)
    with pytest.raises(
        EngineError, match=r"at least 4\.31 MB \(the largest array is relu1:y with 1\.2 MB\), but there are 1\.05 MB"
    ):
        room.check_room(program, "float32")


def test_a_limit_of_the_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    free = room.node_memory()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (12345, 12345))
    assert room.node_memory() == 12345 < free
