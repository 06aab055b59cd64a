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
from lbpar.text import human_seconds


def test_the_command_compares_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every schedule of each number of stages, fastest first; the fastest plan that keeps the arithmetic is written where training reads it."""
    job = ["--model", "lenet", "--batch", "16", "--procs", "4", "--machine", "laptop"]
    files = ["--out", str(tmp_path / "plan.yaml"), "--json", str(tmp_path / "plan.json")]
    assert main([*job, *files, "--stages", "2,4", "--micro-batches", "8"]) == 0
    rows = json.loads((tmp_path / "plan.json").read_text())["stages"]
    rows, delayed = rows[:9], rows[9:]  # marked, and last although nothing waits there
    assert {(r["stages"], r["schedule"], r["micro_batches"]) for r in delayed} == {(2, "delayed", 1), (4, "delayed", 1)}
    seconds = [r["seconds"] for r in rows]
    assert seconds == sorted(seconds) and len(rows) == 9
    assert {(r["stages"], r["schedule"]) for r in rows} == {(1, None), *((k, s) for k in (2, 4) for s in SCHEDULES)}
    formula = {"gpipe": 1, "1f1b": 1, "zero-bubble": 1 / 3, "interleaved": 1 / 2}
    for r in rows:
        beside = 0 if r["schedule"] is None else formula[r["schedule"]] * (r["stages"] - 1) / r["micro_batches"]
        assert r["bubble_of_formula"] == pytest.approx(beside / (1 + beside))
        assert len(r["memory_bytes"]) == r["stages"] and 0 <= r["bubble"] < 1
        assert (r["border_bytes"] > 0) == (r["stages"] > 1)
    said = capsys.readouterr().out
    assert "Stages, priced the same way" in said and said.count("delayed, changes the arithmetic") == 2
    graph = build_model("lenet").with_loss(CrossEntropy())
    plan = resolve_plan(ParallelConfig(strategy=str(tmp_path / "plan.yaml")), graph, 16, 4)
    assert len(plan.places) == rows[0]["stages"]


@pytest.mark.parametrize("strategy", ["data", "plan.yaml"])
def test_the_plan_that_was_asked_for_stands_beside_the_best(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["--model", "lenet", "--batch", "16", "--procs", "4", "--machine", "laptop"]
    if strategy == "plan.yaml":
        strategy = str(tmp_path / strategy)
        assert main([*job, "--strategy", "filter", "--out", strategy]) == 0
    assert main([*job, "--json", str(tmp_path / "best.json")]) == 0
    best = json.loads((tmp_path / "best.json").read_text())["step"]["seconds"]
    capsys.readouterr()
    assert main([*job, "--strategy", strategy, "--stages", "2", "--json", str(tmp_path / "plan.json")]) == 0
    report = json.loads((tmp_path / "plan.json").read_text())
    asked, found = ([r for r in report["stages"] if r["stages"] == 1 and (r["plan"] == strategy) == a] for a in (1, 0))
    assert len(asked) == len(found) == 1 and found[0]["plan"] == "auto"
    assert found[0]["seconds"] == pytest.approx(best) and asked[0]["seconds"] > best
    said = " ".join(report["whether_stages_pay"])
    assert f"Asked for: {strategy}, " in said and f"best plan without ({human_seconds(best)})" in said


def test_the_stages_of_a_run_file_stand_beside_the_best(tmp_path: Path) -> None:
    """With the micro-batches and the grids of layers that the run file gives."""
    run = tmp_path / "run.yaml"
    run.write_text(
        "model: {name: lenet}\ndata: {train: synthetic}\ntrain: {batch: 16, epochs: 1}\nmachine: laptop\n"
        "parallel: {procs: 4, stages: 2, micro_batches: 2, layers: {conv1: {N: 2}}}\n"
    )
    assert main(["--config", str(run), "--stages", "2", "--json", str(tmp_path / "plan.json")]) == 0
    report = json.loads((tmp_path / "plan.json").read_text())
    rows = report["stages"]
    assert [r["plan"] for r in rows if r["stages"] == 1] == ["auto"]
    assert {r["micro_batches"] for r in rows if r["stages"] == 2 and r["schedule"] != "delayed"} == {2}
    same = [r["seconds"] for r in rows if r["schedule"] == "1f1b"]  # as asked, and among those that are compared
    assert len(same) == 2 and same[0] == pytest.approx(same[1])
    assert report["whether_stages_pay"][0].startswith("Asked for: 2 stages, 1f1b")


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


def small(path: Path) -> str:
    """Ten layers in eight groups."""
    run = path / "run.yaml"
    run.write_text(
        "model:\n  input: [8, 8, 4]\n  layers:\n"
        "    - {name: conv1, op: conv, filters: 8, kernel: 3, pad: 1}\n    - {name: bn1, op: norm}\n    - {name: relu1, op: relu}\n"
        "    - {name: conv2, op: conv, filters: 8, kernel: 3, pad: 1}\n    - {name: relu2, op: relu}\n    - {name: drop, op: dropout}\n"
        "    - {name: sum, op: add, from: [relu1, drop]}\n    - {name: pool, op: global_avg_pool}\n    - {name: fc, op: linear, features: 10}\n"
        "data: {train: synthetic}\ntrain: {batch: 16, epochs: 1}\nmachine: lassen\n"
        "parallel: {strategy: data, stages: 2, micro_batches: 4}\n"
    )
    return str(run)


def test_what_is_not_priced_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = small(tmp_path), str(tmp_path / "plan.json")
    assert main(["--config", run, "--procs", "90", "--stages", "5,9,10,5", "--json", out]) == 0
    report = json.loads(Path(out).read_text())
    assert {r["stages"] for r in report["stages"] if r["plan"] != "data"} == {1, 5}
    assert len([r for r in report["stages"] if r["schedule"] == "gpipe"]) == 1  # 5 once
    said = capsys.readouterr().out
    for k, schedule in ((9, ""), (10, ""), (5, ", interleaved")):
        assert f"Not priced: {k} stages{schedule}: " in said
    assert len(report["unpriced"]) == 3 and all("8 groups" in line for line in report["unpriced"])
    more = ["--set", "parallel.stages=9", "--set", "parallel.strategy=auto"]  # what the sentence promises
    assert main(["--config", run, *more, "--procs", "9", "--json", out]) == 0
    assert json.loads(Path(out).read_text())["step"]["stages"] == 9


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--procs", "64", "--stages", "16"], "got 16; network has 10 layers"),
        (["--procs", "40", "--stages", "10,20"], "got 20; network has 10 layers"),
        (["--procs", "4", "--stages", "3"], "got 3; the number does not divide 4 processes"),
    ],
)
def test_what_training_would_refuse_is_refused_first(
    wrong: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lbpar.plan.command._choose", lambda *_: pytest.fail("planned"))
    with pytest.raises(LbparError, match=message):
        main(["--config", small(tmp_path), *wrong])


def test_small_spaces_are_searched_for_the_optimum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "plan.json")
    assert main(["--config", small(tmp_path), "--procs", "4", "--stages", "2,4", "--json", out]) == 0
    assert all(r["gap"] == 0 for r in json.loads(Path(out).read_text())["stages"])
    said = capsys.readouterr().out
    assert "Space with 2 stages: 537600 plans" in said and "Space with 4 stages: 35 plans" in said
    assert said.count("cuts and grids together; exact") == 2


def test_the_plan_that_is_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, out = ["--config", small(tmp_path), "--procs", "4", "--stages", "2"], str(tmp_path / "plan.yaml")
    assert main([*job, "--out", out]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Plan for {out}: auto, 1 stage, 1 micro-batch, " in said
    assert "without --stages it would be data, 2 stages, 4 micro-batches, " in said
    assert "Batch norm (bn1) takes its statistics of 16 samples at a time there, not of 4 samples at a time" in said
    assert "procs: 4" in Path(out).read_text() and "pipeline" not in Path(out).read_text()
    assert main([*job, "--set", "parallel.stages=1", "--set", "parallel.micro_batches=1", "--out", out]) == 0
    assert "Batch norm (bn1) takes" not in capsys.readouterr().out  # as many samples as in the run file
