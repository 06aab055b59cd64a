"""Scaling studies: points, figures of a point, tables, the command from start to end, and what stops it."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from time import perf_counter, sleep

import h5py
import numpy as np
import pytest

from lbpar.config.machine_file import load_machine_file
from lbpar.config.run_file import parse_run
from lbpar.cost.machine import Machine, find_machine
from lbpar.errors import CheckpointError, ConfigError
from lbpar.plan.priced import Settings
from lbpar.plan.resolve import chosen_plan
from lbpar.study import launch
from lbpar.study.__main__ import main
from lbpar.study.figures import draw_all
from lbpar.study.measure import doubts_of, summary
from lbpar.study.points import Point, make_points, parse_plans, parse_procs
from lbpar.study.predict import predict
from lbpar.study.scaling import cells
from lbpar.study.table import make_rows
from lbpar.train.lock import run_lock
from lbpar.train.setup import build_graph

RUN = """
model: {input: [8, 6, 1], layers: [{op: conv, filters: 4, kernel: 3}, {op: relu}, {op: global_avg_pool}, {op: linear, features: 3}]}
data: {train: synthetic}
train: {batch: 4, epochs: 1}
engine: {name: numpy}
machine: laptop
"""
# One rank needs no launcher; `env` stands for one.
LAUNCHER = "env LBPAR_STUDY={procs}"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path / "run.yaml"


def test_strong_points_change_only_the_processes() -> None:
    points = make_points(parse_run(RUN), "strong", [4, 1], ["auto", "data"], "")
    assert points == [Point(1, "auto", 4), Point(4, "auto", 4), Point(1, "data", 4), Point(4, "data", 4)]
    config = points[1].run_file(parse_run(RUN))
    assert (config.parallel.procs, config.train.batch, config.run.checkpoint, config.data.drop_last) == (
        4,
        4,
        None,
        True,
    )


def test_weak_points_grow_the_batch_or_a_dimension() -> None:
    config = parse_run(RUN)
    assert [p.batch for p in make_points(config, "weak", [2, 4, 8], ["data"], "batch")] == [4, 8, 16]
    grown = make_points(config, "weak", [1, 2], ["data"], "H")
    assert [(p.batch, p.input) for p in grown] == [(4, (8, 6, 1)), (4, (16, 6, 1))]
    assert grown[1].run_file(config).model.input == (16, 6, 1)
    assert [p.input for p in make_points(config, "weak", [1, 3], ["data"], "W")][1] == (8, 18, 1)


@pytest.mark.parametrize(
    ("grow", "procs", "words"),
    [("D", [1, 2], "no dimension D"), ("batch", [2, 3], "3 is no multiple of 2")],
)
def test_what_cannot_grow_is_refused(grow: str, procs: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_points(parse_run(RUN), "weak", procs, ["data"], grow)


def test_samples_of_a_file_do_not_grow() -> None:
    config = parse_run(RUN.replace("train: synthetic", "train: some.h5"))
    with pytest.raises(ConfigError, match="--grow batch"):
        make_points(config, "weak", [1, 2], ["data"], "H")


def test_options_are_read_or_refused(tmp_path: Path) -> None:
    assert parse_procs("4, 1,2,2") == [1, 2, 4]
    for bad in ("0", "1,x", "", "1;2", "-1", "1e3"):
        with pytest.raises(ConfigError, match="--procs"):
            parse_procs(bad)
    plan = tmp_path / "mine.yaml"
    plan.write_text("procs: 1")
    assert parse_plans(f"data,{plan},data") == ["data", str(plan)]
    with pytest.raises(ConfigError, match="did you mean 'spatial'|spatial"):
        parse_plans("spatil")


def test_two_plan_files_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name of its own"):
        make_points(parse_run(RUN), "strong", [1], ["/a/plan.yaml", "/b/plan.yaml"], "")


def test_waiting_for_slow_ranks_is_idle_and_the_rest_is_the_move() -> None:
    """Two ranks: the second computes twice as long, so the first waits in the sum."""
    rank = {"input": 0.0, "counted": 2, "bytes": 10, "peak": 5, "host": "n", "cores": 4, "steps": [10.0, 10.0]}
    first = rank | {"kinds": {"compute": 8.0, "allreduce": 12.0}}
    second = rank | {"kinds": {"compute": 16.0, "allreduce": 2.0}, "bytes": 30, "input": 1.0, "steps": [12.0, 10.0]}
    found = summary([first, second], 1, 1)
    assert found["parts"] == pytest.approx(
        {"compute": 6.0, "allreduce": 1.0, "idle": 2.5, "input": 0.25, "other": 0.75}
    )
    assert found["repeats"] == [12.0, 10.0] and found["seconds"] == 11.0  # between the two in the middle
    assert found["imbalance"] == pytest.approx(16 / 12 - 1)
    assert (found["bytes"], found["memory"], found["hosts"], found["oversubscribed"]) == (30, 5, 1, False)
    assert summary([first, second], 1, 3)["oversubscribed"]


def test_speedup_and_efficiency_of_strong_and_weak() -> None:
    points = [Point(2, "data", 8), Point(4, "data", 8), Point(8, "data", 8)]
    found = [{"seconds": 4.0, "parts": {}}, None, {"seconds": 2.0, "parts": {}}]
    strong = make_rows("strong", points, found)
    assert [r["speedup"] for r in strong] == [2.0, None, 4.0]
    assert [r["efficiency"] for r in strong] == [1.0, None, 0.5]
    assert strong[1]["error"] == "not run yet"
    weak = make_rows("weak", points, found)
    assert weak[2]["speedup"] == 2 * 4 * 2.0  # two times as fast per unit of work, four times the units
    assert weak[2]["efficiency"] == 2.0


def test_a_study_runs_goes_on_and_keeps_failures(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = run_file.parent / "s"
    line = ["strong", "--config", str(run_file), "--procs", "1,2", "--plans", "data", "--launcher", LAUNCHER]
    line += ["--steps", "2", "--repeats", "3", "--warmup", "1", "--out", str(out)]
    assert main(line) == 1  # two ranks cannot be had from `env`
    told = capsys.readouterr().out
    assert "parallel.procs: the run file asks for 2, but this job has 1" in told
    content = json.loads((out / "study.json").read_text())
    good, bad = content["rows"]
    assert good["seconds"] > 0 and len(good["repeats"]) == 3 and good["bytes"] == 0
    assert good["parts"]["compute"] > 0 and good["predicted_seconds"] > 0
    assert 0.9 * good["memory"] < good["predicted_memory"] < 2 * good["memory"]  # both with Python and its libraries
    assert bad["seconds"] is None and "asks for 2" in bad["error"]
    table = list(csv.DictReader((out / "study.csv").read_text().splitlines()))
    assert float(table[0]["seconds"]) == good["seconds"] and "asks for 2" in table[1]["error"]
    page = (out / "study.html").read_text()
    assert not re.search(r"(src|href)=.(http|//)", page)
    assert page.count("<svg") == 5 and "asks for 2" in page
    assert all(
        (out / f"{n}.png").stat().st_size > 3000 for n in ("speedup", "efficiency", "time", "breakdown", "ranks")
    )

    again = (out / "data-p1" / "point.json").stat().st_mtime_ns
    assert main(line) == 1
    assert "2 of 2 points are there already" in capsys.readouterr().out
    assert (out / "data-p1" / "point.json").stat().st_mtime_ns == again
    assert main([*line, "--steps", "3"]) == 1
    assert "measured with --steps 2 --repeats 3 --warmup 1, and stay so" in capsys.readouterr().out
    table = (out / "study.csv").read_text()
    assert main([*line, "--predict"]) == 2
    assert "holds measured points" in capsys.readouterr().err and (out / "study.csv").read_text() == table
    assert main([*line, "--set", "train.batch=8"]) == 2
    assert "choose another --out" in capsys.readouterr().err
    with run_lock(out):
        assert main(line) == 2
    assert f"--out: {out} is in use: held by process {os.getpid()}" in capsys.readouterr().err
    whole = (out / "data-p1" / "point.json").read_text()
    for text in (whole[:20], "[]"):  # cut off, or something else: measured again
        (out / "data-p1" / "point.json").write_text(text)
        assert main(line) == 1
        assert json.loads((out / "data-p1" / "point.json").read_text())["seconds"] > 0
    (out / launch.JOB).write_text("41\n")
    assert main([*line, "--retry"]) == 2
    assert "job array 41 of this study may still be under way" in capsys.readouterr().err


def test_accumulated_batches_are_measured_one_by_one_as_they_are_predicted(run_file: Path) -> None:
    """Updates of three batches, of which 64 an epoch leave one for the last."""
    pytest.importorskip("matplotlib")
    line = ["strong", "--config", str(run_file), "--procs", "1", "--plans", "data", "--launcher", LAUNCHER]
    line += ["--set", "train.accumulate=3", "--steps", "30", "--repeats", "2", "--out", str(run_file.parent / "s")]
    began = perf_counter()
    assert main(line) == 0
    whole = perf_counter() - began
    row = json.loads((run_file.parent / "s" / "study.json").read_text())["rows"][0]
    assert sum(row["parts"].values()) == pytest.approx(sum(row["repeats"]) / 2, rel=0.3)
    assert row["samples_per_second"] == pytest.approx(4 / row["seconds"])
    assert 170 * row["seconds"] < whole  # 63 updates


def test_a_study_that_is_ended_ends_its_ranks(run_file: Path) -> None:
    script, ended = run_file.with_name("launcher"), run_file.with_name("ended")
    script.write_text(
        f"#!/bin/sh\ntrap 'touch {ended}; exit 1' TERM\ntouch {ended}.not\nwhile :; do sleep 0.05; done\n"
    )
    script.chmod(0o755)
    line = ["env", "--default-signal=INT", sys.executable, "-m", "lbpar.study", "strong", "--config", str(run_file)]
    line += ["--procs", "1", "--plans", "data"]
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        out = run_file.parent / f"o{code}"
        study = subprocess.Popen(
            [*line, "--launcher", f"{script} {{procs}}", "--out", str(out)],
            stderr=subprocess.PIPE,
            text=True,
        )
        started = run_file.with_name("ended.not")
        while not started.exists() and study.poll() is None:
            sleep(0.05)
        study.send_signal(number)
        _, told = study.communicate(timeout=60)
        assert study.returncode == code and "Traceback" not in told
        assert ended.exists() and not (out / "data-p1" / "failed.json").exists()
        ended.unlink()
        started.unlink()


def test_a_batch_that_the_data_lack_is_no_point(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An epoch without a whole batch has a smaller one, whose time is not that of the batch."""
    file = run_file.with_name("d.h5")
    with h5py.File(file, "w") as f:
        f["x"], f["y"] = np.zeros((3, 8, 6, 1), "f4"), np.arange(3)
    line = ["strong", "--config", str(run_file), "--procs", "1", "--plans", "data", "--launcher", LAUNCHER]
    line += ["--set", f"data.train={file}", "--steps", "1", "--out", str(run_file.parent / "s")]
    assert main(line) == 1
    assert "3 samples are less than one batch of 4" in capsys.readouterr().out


def test_weak_studies_are_predicted_for_more_samples_than_noise_may_have() -> None:
    batch = make_points(parse_run(RUN), "weak", [1, 2**22], ["data"], "batch")[1].run_file(parse_run(RUN))
    assert (batch.train.batch, batch.data.samples) == (2**24, 10**7)


def test_a_figure_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = make_rows("strong", [Point(1, "data", 8), Point(2, "data", 8)], [{"seconds": 2.0}, {"seconds": 1.0}])
    (tmp_path / "speedup.png").mkdir()
    with pytest.raises(CheckpointError, match=r"speedup\.png: cannot be written: .* choose another --out"):
        draw_all(tmp_path, "strong", rows)


@pytest.mark.slow
def test_a_machine_is_measured_with_the_engine_and_the_network_of_the_run_file(run_file: Path) -> None:
    out = run_file.parent / "s"
    line = [
        "strong",
        "--config",
        str(run_file),
        "--procs",
        "1",
        "--plans",
        "data",
        "--launcher",
        LAUNCHER,
        "--out",
        str(out),
    ]
    line += [
        "--steps",
        "1",
        "--repeats",
        "1",
        "--set",
        "machine=auto",
        "--set",
        "engine={name: numpy, dtype: float64, threads: 1}",
    ]
    assert main(line) == 0
    found = load_machine_file(out / "machine-p1.yaml")
    assert set(found.compute.peak) == {"float64"}
    assert "whole steps" in found.notes["measured"]


def test_a_study_is_predicted_where_samples_are_fewer_than_processes(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out = run_file.parent / "p"
    line = ["strong", "--config", str(run_file), "--procs", "1,16", "--plans", "data", "--predict", "--out", str(out)]
    assert main(line) == 0
    one, many = json.loads((out / "study.json").read_text())["rows"]
    assert one["seconds"] is None and one["idle_ranks"] == 0 and many["idle_ranks"] == 12
    assert "12 processes without a sample" in capsys.readouterr().out and many["used_ranks"] == 16
    assert main([*line[:4], "1024", "--plans", "auto", "--predict", "--out", f"{out}2"]) == 0
    (row,) = json.loads(Path(f"{out}2", "study.json").read_text())["rows"]
    assert row["used_ranks"] < 1024
    assert f"no layer splits over more than {row['used_ranks']}" in capsys.readouterr().out
    assert main(["compare", str(out), str(run_file.parent)]) == 2
    assert "holds no study.json" in capsys.readouterr().err


def test_two_studies_are_compared_in_units_that_people_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One measured, one predicted; what only one of them has is left out."""
    for name, key, times in (
        ("a", "seconds", {1: 2.5, 2: 0.0125, 4: None}),
        ("b", "predicted_seconds", {1: 5, 2: 0.01, 4: 1, 8: 1}),
    ):
        none = {"plan": "auto", "seconds": None, "predicted_seconds": None}
        (tmp_path / name).mkdir()
        (tmp_path / name / "study.json").write_text(
            json.dumps(
                {
                    "kind": "strong",
                    "grow": None,
                    "run": f"train: {{batch: {8 * len(times)}, epochs: 1}}\nrun: {{out: {name}}}\n",
                    "rows": [none | {"procs": p, key: t} for p, t in times.items()],
                }
            )
        )
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    heads, *rows, note, other = capsys.readouterr().out.splitlines()
    assert heads.split()[-3:] == ["second", "/", "first"] and note == "~ predicted, not measured"
    assert other == "not the same: train.batch: 24 | 32"
    assert [re.split(" {2,}", r.strip()) for r in rows] == [
        ["auto", "1", "2.5 s", "~5 s", "2.00"],
        ["auto", "2", "12.5 ms", "~10 ms", "0.80"],
        ["auto", "4", "~1 s"],
    ]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--launcher", "mpirun"], "expected {procs}"),
        (["--launcher", "no-such-launcher -n {procs}"], "no program no-such-launcher"),
        (
            ["--launcher", "env 'a {procs}"],
            "--launcher: got env 'a 1, expected words as in a shell: no closing quotation",
        ),
        (["--slurm", "-p x"], "no sbatch"),
        (["--set", "model.layers=[]"], "layers"),
    ],
)
def test_what_cannot_run_is_said(
    run_file: Path, extra: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))  # where no sbatch is
    line = ["strong", "--config", str(run_file), "--procs", "1", "--plans", "data", "--out", str(run_file.parent / "o")]
    assert main(line + extra) == 2
    assert words in capsys.readouterr().err


def test_a_job_array_that_is_still_under_way_is_waited_for_and_not_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one given up because the controller does not answer; what has no result at its end is submitted again."""
    programs = {
        "sbatch": f"cp ${{@: -1}} {tmp_path}/script; echo submitted >>{tmp_path}/calls; echo '42;cluster'",
        "squeue": f"""echo "$2" >>{tmp_path}/calls
            case $(wc -l <{tmp_path}/calls) in
            1) echo RUNNING ;;
            2) echo 'Socket timed out' >&2; exit 1 ;;
            3) echo '{{"seconds": 1}}' >{tmp_path}/a-p1/point.json; echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1 ;;
            esac""",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(launch, "NAP", 0.0)
    points = [Point(1, "a", 8), Point(2, "a", 8)]
    for p in points:
        (tmp_path / p.folder).mkdir()
    (tmp_path / launch.JOB).write_text("41\n")
    told: list[str] = []
    launch.submit(tmp_path, points, "mpirun -n {procs}", [], "-p x", told.append)
    assert (tmp_path / "calls").read_text().split() == [*["--jobs=41"] * 3, "submitted", "--jobs=42"]
    script = (tmp_path / "script").read_text()
    assert (
        f"\npoints=({tmp_path / 'a-p2'})\n" in script
        and "\n#SBATCH --ntasks=2\n" in script
        and "filled in:" not in script
    )
    assert told[-1].startswith("a-p2: no result;") and not (tmp_path / launch.JOB).exists()


def test_predictions_for_a_machine_that_was_busy_are_marked() -> None:
    file = find_machine("laptop").file
    assert doubts_of(Machine(file)) == doubts_of(Machine(file.model_copy(update={"notes": "mine"}))) == []
    busy = Machine(file.model_copy(update={"notes": {"measured": {"doubts": ["load"]}}}))
    assert doubts_of(busy) == ["load"]
    point = Point(2, "data", 8)
    (row,) = make_rows("strong", [point], [{"seconds": 1.0, "spread": 0.0, "doubts": doubts_of(busy)}])
    assert cells(row)[-1] == "predicted for a machine that was busy when it was measured"


@pytest.mark.parametrize(
    "options",
    [[], ["parallel.recompute=2"], ["parallel.stages=2", "parallel.micro_batches=2"], ["parallel.strategy=data"]],
)
def test_what_is_predicted_is_the_plan_that_training_takes(options: list[str]) -> None:
    config = parse_run(RUN, options)
    machine, graph = find_machine("laptop"), build_graph(config)
    found = predict(config, 4, machine)
    settings = Settings(graph, 4, machine, "float32", "momentum", config.data.prefetch)
    want = settings.priced("auto", chosen_plan(config, graph, 4, 4, machine))
    assert (found["predicted"]["seconds"], found["predicted"]["memory"]) == (want.seconds, want.memory.peak)
    assert bool(want.plan.recompute) == ("parallel.recompute=2" in options)
    assert found["grid"] == str(want.plan.grid)


def test_predictions_compute_again_what_training_does() -> None:
    text = (
        "model: {name: unet3d, input: [32, 32, 32, 1], width: 0.25}\ndata: {train: synthetic}\ntrain: {batch: 2}\n"
        "parallel: {strategy: spatial%s}\n"
    )
    machine = find_machine("laptop")
    kept = predict(parse_run(text % ""), 2, machine)["predicted"]["memory"]
    limit = int(0.97 * kept)
    config = parse_run(text % f", memory: {limit}, recompute: auto")
    lean = predict(config, 2, machine)["predicted"]["memory"]
    assert lean <= limit < kept and chosen_plan(config, build_graph(config), 2, 2, machine).recompute
