"""Numbers of stages and schedules beside the plan without stages, as `lbpar plan` shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lbpar.config.parallel import ParallelConfig
from lbpar.errors import LbparError
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.models.registry import build_model
from lbpar.plan.command import main
from lbpar.plan.resolve import resolve_plan
from lbpar.program.plan import SCHEDULES


def test_the_command_compares_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every schedule of each number of stages, fastest first; the fastest plan is written where training reads it."""
    job = ["--model", "lenet", "--batch", "16", "--procs", "4", "--machine", "laptop"]
    files = ["--out", str(tmp_path / "plan.yaml"), "--json", str(tmp_path / "plan.json")]
    assert main([*job, *files, "--stages", "2,4", "--micro-batches", "8"]) == 0
    rows = json.loads((tmp_path / "plan.json").read_text())["stages"]
    seconds = [r["seconds"] for r in rows]
    assert seconds == sorted(seconds) and len(rows) == 9
    assert {(r["stages"], r["schedule"]) for r in rows} == {(1, None), *((k, s) for k in (2, 4) for s in SCHEDULES)}
    for r in rows:
        assert len(r["memory_bytes"]) == r["stages"] and 0 <= r["bubble"] < 1
        assert (r["border_bytes"] > 0) == (r["stages"] > 1)
    assert "Stages, priced the same way" in capsys.readouterr().out
    graph = build_model("lenet").with_loss(CrossEntropy())
    plan = resolve_plan(ParallelConfig(strategy=str(tmp_path / "plan.yaml")), graph, 16, 4)
    assert len(plan.places) == rows[0]["stages"]


@pytest.mark.parametrize("strategy", ["auto", "data"])
def test_the_command_plans_the_stages_of_a_run_file(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        "model: {name: lenet}\ndata: {train: synthetic}\ntrain: {batch: 16, epochs: 1}\nmachine: laptop\n"
        f"parallel: {{procs: 4, stages: 2, micro_batches: 4, strategy: {strategy}}}\n"
    )
    assert main(["--config", str(run), "--out", str(tmp_path / "plan.yaml")]) == 0
    graph = build_model("lenet").with_loss(CrossEntropy())
    plan = resolve_plan(ParallelConfig(strategy=str(tmp_path / "plan.yaml")), graph, 16, 4)
    assert len(plan.places) == 2 and plan.micro_batches == 4
    said = capsys.readouterr().out
    assert "at the busiest stage" in said and "of which" not in said


@pytest.mark.parametrize(
    "wrong",
    [
        ["--stages", "two"],
        ["--stages", "0"],
        ["--stages", "3"],
        ["--micro-batches", "2"],
        ["--stages", "2", "--micro-batches", "17"],
    ],
)
def test_the_command_refuses_strange_stages(wrong: list[str]) -> None:
    with pytest.raises(LbparError, match="stages|micro-batches: got 17 parts of 16 samples"):
        main(["--model", "lenet", "--batch", "16", "--procs", "4", "--machine", "laptop", *wrong])
