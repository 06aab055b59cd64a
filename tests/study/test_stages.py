"""`lbpar study stages`: the table and the figure say what the planner says, and a study that was cut off goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lbpar.cost.machine import find_machine
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.models.registry import build_model
from lbpar.plan.compare_stages import best_without, compare_stages
from lbpar.plan.priced import Settings
from lbpar.plan.tables import group_nodes
from lbpar.study import stages
from lbpar.study.__main__ import main

JOB = ["stages", "--model", "lenet", "--batch", "16", "--machines", "laptop,azure-nc24v3", "--procs", "4"]


def test_rows_are_those_of_the_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    assert main([*JOB, "--stages", "2", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "stages.json").read_text())["rows"]
    table = (tmp_path / "stages.md").read_text()
    graph = build_model("lenet").with_loss(CrossEntropy())
    for row in rows:
        settings = Settings(graph, 16, find_machine(row["machine"]), "float32", "momentum")
        none, best = best_without(settings, 4), compare_stages(settings, 4, [2])[0]
        assert row["plans"]["1"]["seconds"] == none.priced.seconds
        assert row["plans"]["2"]["seconds"] == best.priced.seconds
        assert f"{none.priced.seconds / best.priced.seconds:.2f} times as fast (2, {best.schedule})" in table
    assert (tmp_path / "stages.svg").exists() and (tmp_path / "stages.png").exists()
    found: list[int] = []
    monkeypatch.setattr(
        stages, "point", lambda s, procs, *_: found.append(procs) or {k: rows[0][k] for k in ("plans", "words")}
    )
    more = ["--procs", "4,2"]  # what is there is not planned again
    assert main([*JOB, *more, "--stages", "2", "--out", str(tmp_path)]) == 0
    assert found == [2, 2]
    assert main([*JOB, "--stages", "4", "--out", str(tmp_path)]) == 2  # another study's folder


def test_what_does_not_fit_in_memory_is_marked(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main([*JOB, "--stages", "2", "--memory", "1MB", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "stages.json").read_text())["rows"]
    assert not any(p["fits"] for r in rows for p in r["plans"].values())
    table = (tmp_path / "stages.md").read_text()
    assert table.count("* |") == 4 and table.count("none fits in memory") == 2
    assert all(len(r["words"]) == 1 and r["words"][0].startswith("No plan that was found fits in 1 MB") for r in rows)


def test_a_missing_figure_has_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the console, in the table, and in the numbers: stages that do not divide, more than layers, more than groups of layers."""
    pytest.importorskip("matplotlib")
    graph = build_model("alexnet").with_loss(CrossEntropy())
    groups, layers = len(group_nodes(graph, {})), len(graph.ops)
    assert groups < layers
    job = ["stages", "--model", "alexnet", "--batch", "16", "--machines", "laptop", "--procs", f"{2 * layers},1"]
    assert main([*job, "--stages", f"2,2,{layers},{2 * layers}", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "stages.json").read_text())["rows"]
    assert set(rows[0]["plans"]) == {"1", "2"} and set(rows[1]["plans"]) == {"1"}
    missing = rows[0]["missing"]
    assert f"{groups} groups" in missing[str(layers)] and f"has {layers} layers" in missing[str(2 * layers)]
    assert list(rows[1]["missing"]) == ["2", str(layers), str(2 * layers)]
    for text in (capsys.readouterr().out, (tmp_path / "stages.md").read_text()):
        for row in rows:
            for k, why in row["missing"].items():
                assert f"No figure with {k} stages: {why}" in text
        assert "1 process: " in text and "1 processes" not in text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--memory", "much"], "--memory: got 'much'"),
        (["--machines", "lassn"], "lassen"),
        (["--stages", "3"], "nothing is left to compare. 3 stages on 4 processes: the number does not divide"),
        (["--stages", "1"], "give numbers of at least 2"),
        (["--micro-batches", "17"], "17 parts of 16 samples"),
    ],
)
def test_what_cannot_be_is_refused(
    wrong: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main([*JOB, *wrong, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
