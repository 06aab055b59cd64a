from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lbpar.api import load_run
from lbpar.config.parallel import ParallelConfig
from lbpar.config.run_file import parse_run
from lbpar.cost.machine import find_machine
from lbpar.errors import LbparError, PlanError
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.models.registry import build_model
from lbpar.plan.command import main, run
from lbpar.plan.resolve import resolve_plan
from lbpar.plan.segments import segments
from lbpar.program.plan import Plan
from lbpar.study.predict import predict
from lbpar.train.setup import build_graph, build_plan

ROOT = Path(__file__).parents[2]
LENET = ["--model", "lenet", "--batch", "64", "--procs", "4", "--machine", "laptop"]


def test_everything_is_written_and_the_plan_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, js, png = tmp_path / "plan.yaml", tmp_path / "plan.json", tmp_path / "net.png"
    assert run([*LENET, "--json", str(js), "--out", str(out), "--plot", str(png)]) == 0
    text = capsys.readouterr().out
    assert "Where the time goes" in text and "samples/s" in text and "Strategies" in text
    report = json.loads(js.read_text())
    graph = build_model("lenet").with_loss(CrossEntropy())
    assert [r["layer"] for r in report["layers"]] == [n.name for n in graph.ops]
    assert report["step"]["bytes"] == sum(c["bytes"] for r in report["layers"] for c in r["collectives"])
    assert report["step"]["sum"] == pytest.approx(sum(report["step"]["by_purpose"].values()))
    assert {"data", "owt", "best single grid"} <= {c["strategy"] for c in report["comparison"]}
    assert report["space"]["exact"] and report["machine"]["levels"][0]["source"]
    assert any(r["runner_up"] and r["runner_up"]["extra_seconds"] >= 0 for r in report["layers"])
    plan = resolve_plan(ParallelConfig(strategy=str(out)), graph, 64, 4)
    assert {n.name: plan.ways(n.name) for n in graph.ops} == {r["layer"]: r["grid"] for r in report["layers"]}
    assert png.read_bytes()[:4] == b"\x89PNG"


def test_a_named_strategy_or_a_plan_file_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.yaml"
    assert run([*LENET, "--strategy", "data", "--json", "-", "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["strategy"] == "data" and report["layers"][0]["grid"] == {"N": 4}
    assert any(c["strategy"] == "auto" for c in report["comparison"])
    assert run([*LENET, "--strategy", str(out), "--quiet"]) == 0
    assert "Chosen: " + str(out) in capsys.readouterr().out


def test_a_run_file_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: {name: lenet}\ndata: {train: synthetic}\ntrain: {batch: 32, optimizer: {name: adam, lr: 0.001}}\n"
        "parallel: {strategy: auto, procs: 2, layers: {conv1: {H: 2}}}\nmachine: laptop\n"
    )
    assert run(["--config", str(config), "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["batch"], report["procs"], report["optimizer"]) == (32, 2, "adam")
    assert next(r for r in report["layers"] if r["layer"] == "conv1")["grid"] == {"H": 2}


def test_a_run_file_says_what_products_are_computed_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TF32 makes products faster, and no array smaller; with another type on the command line it means nothing."""
    config, found = tmp_path / "run.yaml", {}
    config.write_text(
        "model: {name: vgg16}\ndata: {train: synthetic}\ntrain: {batch: 64}\nparallel: {strategy: data, procs: 2}\n"
        "engine: {name: cupy}\nmachine: a100-nvl8\n"
    )
    for name, given, options in (
        ("float32", "engine.tf32=false", []),
        ("tf32", "engine.tf32=true", []),
        ("bfloat16", "engine.tf32=true", ["--dtype", "bfloat16"]),
        ("tf32", "engine.name=onednn", ["--dtype", "tf32"]),
        ("float32", "engine.tf32=true", ["--dtype", "float32"]),
    ):
        before = found.get(name, {}).get("step")
        assert run(["--config", str(config), "--json", "-", "--set", given, *options]) == 0
        found[name] = json.loads(capsys.readouterr().out)
        assert found[name]["dtype"] == name and before in (None, found[name]["step"])
        if not options:
            point = predict(parse_run(config.read_text(), [given]), 2, find_machine("a100-nvl8"))
            assert point["predicted"]["seconds"] == pytest.approx(found[name]["step"]["seconds"])
    plain, fast = found["float32"], found["tf32"]
    assert fast["step"]["seconds"] < plain["step"]["seconds"] / 2
    assert fast["step"]["bytes"] == plain["step"]["bytes"] and fast["memory"] == plain["memory"]


def test_papers_cost_models_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--model", "pase-alexnet", "--batch", "128", "--procs", "4", "--cost", "pase", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["total"] == pytest.approx(1.48215719552e11, rel=1e-12)
    assert run(["--model", "alexnet", "--batch", "2048", "--cost", "gholami", "--grid", "16x32", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["grid"] == [16, 32]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "resnet5", "--batch", "4", "--procs", "2"], "did you mean 'resnet50'"),
        ([*LENET[:-1], "lassn"], "did you mean 'lassen'"),
        (["--model", "lenet", "--batch", "0", "--procs", "2"], "--batch: got 0"),
        (["--model", "lenet", "--procs", "2"], "--batch: missing"),
        (["--batch", "4", "--procs", "2"], "no network was given"),
        ([*LENET, "--memory", "1XB"], "--memory: got '1XB'"),
        ([*LENET, "--memory", "1kB"], "smallest footprint"),
        ([*LENET, "--strategy", "dta"], "did you mean 'data'"),
        ([*LENET, "--strategy", "gone.yaml"], "no such plan file"),
        ([*LENET, "--input", "a,b"], "--input: got 'a,b'"),
        (["--model", "unet3d", "--batch", "2", "--cost", "gholami", "--procs", "2"], "two spatial dimensions"),
        (["--model", "alexnet", "--batch", "2", "--cost", "gholami", "--grid", "4"], "--grid: got '4'"),
        (["--model", "pase-nothing", "--batch", "2", "--cost", "pase", "--procs", "2"], "pase-alexnet"),
        ([*LENET, "--procs", "1000000000"], "grid: got 1000000000 processes, expected 1 to 1048576"),
        ([*LENET, "--grid", "2x2"], "--grid: --cost lbpar does not use it, only --cost gholami does"),
        (
            ["--model", "lenet", "--batch", "4", "--procs", "4", "--cost", "gholami", "--memory", "1GB"],
            "--memory: --cost gholami does not use it, only --cost lbpar",
        ),
        (
            ["--config", "x.yaml", "--classes", "3"],
            "--classes: it belongs to --model; with --config, use --set model.classes",
        ),
        ([*LENET, "--axes", "0"], "--axes: got 0, expected at least 1"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.startswith("lbpar plan: ") and "Traceback" not in captured.err


def test_colours_only_on_a_terminal_and_names_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    layers = "[{op: relu, name: 'a[red]'}, {op: flatten, name: '[/bold]'}, {op: linear, features: 2}]"
    file.write_text(f"model: {{input: [4, 4, 2], layers: {layers}}}\ntrain: {{batch: 4}}\nmachine: laptop\n")
    argv = ["--config", str(file), "--procs", "2"]
    assert run(argv) == 0
    out = capsys.readouterr().out
    assert "a[red]" in out and "[/bold]" in out and "\x1b" not in out
    for room in ("lbpar.tables", "lbpar.plan.report"):
        monkeypatch.setattr(f"{room}.is_terminal", lambda stream: True)
    assert run(argv) == 0
    out = capsys.readouterr().out
    assert "\x1b[1m" in out and "a[red]" in out


def test_many_ranks_print_once(tmp_path: Path) -> None:
    """Open MPI gives rank 0 a pseudo-terminal, whatever its own output is."""
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("no mpirun beside this Python")
    line = [str(mpirun), "-n", "3", sys.executable, "-m", "lbpar.plan", *LENET, "--quiet"]
    settings = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": str(ROOT)}
    settings["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    done = subprocess.run(line, capture_output=True, text=True, check=True, env={**os.environ, **settings}, timeout=60)
    assert done.stdout.count(" a step, ") == 1 and "\x1b" not in done.stdout


def test_a_plan_for_something_else_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.yaml"
    assert run([*LENET, "--strategy", "data", "--out", str(out), "--quiet"]) == 0
    capsys.readouterr()
    for change, words in (
        (["--model", "alexnet"], "made for network 'lenet'"),
        (["--batch", "32"], "made for batch 64"),
        (["--procs", "8"], "made for 4 processes"),
    ):
        assert run([*LENET, "--strategy", str(out), *change]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "gone/plan.yaml"], "--out: .*gone/plan.yaml cannot be written: there is no folder"),
        (["--json", "."], "--json: .* cannot be written: it is a folder"),
        (["--plot", "gone/plan.png"], "--plot: .* there is no folder"),
        (["--stages", "2,0"], "--stages: got '2,0'"),
        (["--strategy", "gone.yaml"], "gone.yaml"),
        (["--config", "stages.yaml"], "parallel.stages: got 3, which does not divide 4 processes"),
        (
            ["--config", "stages.yaml", "--set", "parallel={layers: {conv9: {N: 4}}}"],
            "parallel.layers: lenet has no layer 'conv9'",
        ),
        (["--config", "stages.yaml", "--set", "parallel={layers: {conv1: {N: 3}}}"], "parallel.layers.conv1"),
        (
            ["--config", "stages.yaml", "--set", "parallel={stages: 2, stage: {conv9: 1}}"],
            "parallel.stage: lenet has no layer 'conv9'",
        ),
        (["--config", "stages.yaml", "--set", "parallel={recompute: [conv9]}"], "recompute: 'conv9' is not a layer"),
    ],
)
def test_mistakes_are_said_before_a_machine_is_measured(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stages.yaml").write_text(
        "model: {name: lenet}\ndata: {train: synthetic}\ntrain: {batch: 64, optimizer: {name: sgd, lr: 0.1}}\n"
        "parallel: {stages: 3}\n"
    )
    with pytest.raises(LbparError, match=words):
        main(
            ["--model", "lenet", "--batch", "64", "--procs", "4", "--machine", "auto", *options],
            lambda *_: pytest.fail("measured"),
        )


UNET = (
    "model: {name: unet3d, input: [32, 32, 32, 1], width: 0.25}\ndata: {train: synthetic}\ntrain: {batch: 4}\nmachine: laptop\n"
    "parallel: {strategy: auto, procs: 4, stages: %d, recompute: %s}\n"
)


def test_what_is_computed_again_is_printed_and_goes_into_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "run.yaml", tmp_path / "plan.yaml"
    config.write_text(UNET % (1, 4))
    assert run(["--config", str(config), "--strategy", "spatial", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert (
        "Computed again in the backward pass: " in text and "activations computed again" in text and "(again)" in text
    )
    graph = build_model("unet3d", input=(32, 32, 32, 1), width=0.25).with_loss(CrossEntropy())
    plan = resolve_plan(ParallelConfig(strategy=str(out)), graph, 4, 4)
    assert plan.recompute == segments(graph, 4)
    assert (
        run(["--config", str(config), "--strategy", "spatial", "--recompute", "up1.relu1,up1.concat", "--json", "-"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)["recompute"]
    assert found["layers"] == ["up1.relu1", "up1.concat"]
    config.write_text(UNET % (1, "[]"))
    assert run(["--config", str(config), "--strategy", "spatial", "--json", "-"]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert kept["recompute"] is None and found["seconds"] > found["seconds_kept"] == kept["step"]["seconds"]
    assert found["memory_kept"] == kept["memory"]["peak"]
    config.write_text(UNET % (1, 4))
    assert run(["--config", str(config), "--strategy", "spatial", "--recompute", "[]", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["recompute"] is None
    assert run(["--config", str(config), "--recompute", "up1.relu9"]) == 2
    assert "'up1.relu9' is not a layer" in capsys.readouterr().err


def test_a_limit_on_the_command_line_holds_for_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(UNET % (2, "[]"))
    assert run(["--config", str(config), "--json", "-"]) == 0
    peak = json.loads(capsys.readouterr().out)["memory"]["peak"]
    limit = int(0.97 * peak)
    assert run(["--config", str(config), "--memory", str(limit), "--recompute", "auto", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["peak"] <= limit
    assert run(["--config", str(config), "--memory", "65MB", "--recompute", "auto"]) == 2
    assert "no plan fits in 65 MB" in capsys.readouterr().err


def test_a_limit_holds_for_named_strategies_in_training_and_planning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    text = UNET % (1, "null")
    config.write_text(text)
    say = ["--config", str(config), "--strategy", "spatial", "--json", "-"]
    assert run(say) == 0
    peak = json.loads(capsys.readouterr().out)["memory"]["peak"]
    limit = int(0.97 * peak)
    assert run([*say, "--memory", str(limit)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["peak"] <= limit and found["recompute"]["layers"]

    def trained(memory: int, *more: str) -> Plan:
        run_file = load_run(config, ["parallel.strategy=spatial", f"parallel.memory={memory}", "machine=laptop", *more])
        return build_plan(run_file, build_graph(run_file), 4)

    assert trained(limit).recompute == tuple(found["recompute"]["layers"])
    assert run(["--config", str(config), "--strategy", "spatial", "--out", str(tmp_path / "plan.yaml")]) == 0
    assert trained(limit, f"parallel.strategy={tmp_path / 'plan.yaml'}").recompute == trained(limit).recompute
    for refused in ((1_000_000,), (limit, "parallel.recompute=[]")):
        with pytest.raises(PlanError, match="no plan fits"):
            trained(*refused)


def test_stages_are_compared_with_what_is_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(UNET % (1, "[]"))
    rows = []
    for more in ([], ["--recompute", "4"]):
        assert run(["--config", str(config), "--stages", "2", "--micro-batches", "2", *more, "--json", "-"]) == 0
        rows.append(json.loads(capsys.readouterr().out)["stages"])
    step = [{(r["stages"], r["schedule"]): r["seconds"] for r in each} for each in rows]
    assert step[0].keys() == step[1].keys() and len(step[0]) > 1
    assert all(step[1][case] > 1.01 * step[0][case] for case in step[0])
