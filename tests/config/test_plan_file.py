"""Plan files."""

from __future__ import annotations

import pytest

from lbpar.config.plan_file import PlanFile, load_plan_file, save_plan_file
from lbpar.errors import ConfigError

PLAN = PlanFile(
    procs=12,
    grid=(2, 2, 3),
    model={"name": "resnet18", "classes": 10},
    batch=64,
    ops={"layer1.0.conv1": {"N": (0, 1), "H": (2,)}, "fc": {"F": 4}, "loss": {}},
    notes={"seconds": 0.25},
)


@pytest.mark.parametrize("name", ["plan.yaml", "plan.json"])
def test_round_trip(tmp_path, name: str) -> None:
    path = tmp_path / name
    save_plan_file(PLAN, path)
    assert load_plan_file(path) == PLAN
    assert path.read_text().startswith("{" if name.endswith("json") else "procs: 12")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("procs: 8\ngrid: [2, 2]", "grid: 2 x 2 = 4, expected the number of processes, 8"),
        ("procs: 4\ngrid: [2, 2]\nops: {a: {N: [2]}}", "ops.a.N: got axis 2, expected less than 2 axes"),
        ("procs: 4\ngrid: [2, 2]\nops: {a: {N: [0], H: [0]}}", "axis 0 splits both N and H"),
        ("procs: 4\ngrid: [2, 2]\nops: {a: {N: 3}}", "ops.a.N: got 3 ways, expected a divisor of 4"),
        ("procs: 4\ngrid: [2, 2]\nops: {a: {Q: 2}}", "ops.a.Q: got 'Q', expected one of"),
        ("procs: 4\ngird: [2, 2]", "gird: unknown field (got [2, 2]); did you mean 'grid'?"),
        ("procs: 4\ngrid: [4]\nmodel: 3", "model: got 3, expected the name of a network"),
        ("procs: 4", "grid: missing; it is required"),
    ],
)
def test_refused(tmp_path, text: str, words: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as e:
        load_plan_file(path)
    assert words in str(e.value)
    assert "plan.yaml" in str(e.value)


def test_missing_and_unwritable(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no such plan file"):
        load_plan_file(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot write the plan"):
        save_plan_file(PLAN, tmp_path / "no" / "such" / "plan.yaml")
