"""A file that a command writes replaces its own kind, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from lbpar.config.output import write_output
from lbpar.errors import ConfigError

PLAN = "procs: 2\ngrid: [2]\nlayers: {}\n"


def test_its_own_kind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    for grid in ("[2]", "[1]"):
        write_output(path, PLAN.replace("[2]", grid), "the plan")
    assert "[1]" in path.read_text() and [p.name for p in tmp_path.iterdir()] == ["plan.yaml"]


@pytest.mark.parametrize(
    "text", ["model: {name: lenet}\ntrain: {batch: 2}\n", '{"model": 1}', "no fields", "a: [", "\x00"]
)
def test_anything_else_is_left(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="holds something else than the plan; it is left as it is"):
        write_output(path, PLAN, "the plan")
    assert path.read_text() == text


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no/plan.yaml: cannot write the plan: No such file"):
        write_output(tmp_path / "no" / "plan.yaml", PLAN, "the plan")
