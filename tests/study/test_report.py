"""The page of a run: what it holds, from which files, as a browser shows it, and what it does without them."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
from html.parser import HTMLParser
from math import prod
from pathlib import Path
from typing import Any

import pytest

from lbpar.papers.chen import least_elements
from lbpar.plan.explain import step_numbers
from lbpar.study.__main__ import main
from lbpar.study.report import PAGE, _expected, after_run, bound_rows, bytes_rows, layer_seconds, write_report
from lbpar.study.run_figures import stages
from lbpar.text import human_seconds
from lbpar.train import job
from lbpar.train.directory import run_config
from lbpar.train.setup import build_graph, build_plan
from lbpar.transport.base import Transport
from lbpar.transport.virtual import VirtualWorld
from tests.util.trace_format import read_trace
from tests.util.training import PLANS, run_file

pytest.importorskip("matplotlib")
BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
TITLES = ["Loss and accuracy", "The plan", "Where a step's time went", "Timeline of step 5", "Bytes sent in step 5"]
TITLES += ["Bytes of convolutions beside the least possible"]
VOID = {"meta", "br", "img", "link", "hr", "input"}


class Reader(HTMLParser):
    """Tags that are open, texts of headings, and addresses that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.figures = 0
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.figures += tag == "svg"
        self.loads += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v and v[0] != "#"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v and v[0] != "#"]

    def handle_endtag(self, tag: str) -> None:
        while (last := self.open.pop()) != tag:
            assert last == "html", f"<{last}> is closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2"):
            self.titles.append(data)


def trained(out: Path, plan: str = "mixed 4", *sets: str) -> Path:
    procs, overrides = PLANS[plan]
    config = run_file([*overrides, f"run.out={out}", "run.progress=none", "run.checkpoint=null", *sets])
    graph = build_graph(config)
    world = VirtualWorld(build_plan(config, graph, procs).grid)

    def one(transport: Transport) -> None:
        trainer, goes_on = job.start(config, transport=transport)
        job.run(trainer, goes_on, 0.0)

    world.run(one)
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = trained(tmp_path_factory.mktemp("run") / "out", "mixed 4", "machine=laptop", "train.clip_norm=1")
    assert main(["report", str(out)]) == 0
    return out


def test_the_page_is_well_formed_whole_and_loads_nothing(run: Path) -> None:
    reader = Reader()
    reader.feed((run / PAGE).read_text(encoding="utf-8"))
    assert reader.titles[0].endswith("a run on 4 ranks")
    assert set(TITLES) < set(reader.titles)
    assert reader.figures == 5
    assert all(address.startswith("data:") for address in reader.loads)
    text = (run / PAGE).read_text(encoding="utf-8")
    assert "Nothing is predicted" not in text
    for host, ranks in json.loads((run / "report.json").read_text())["hosts"].items():
        assert f"host {host}" in text
        assert ", ".join(map(str, ranks)) in text


def test_times_are_those_of_a_batch_where_the_last_update_of_an_epoch_takes_fewer(tmp_path: Path) -> None:
    """Three epochs of three batches, two an update."""
    out = trained(tmp_path / "out", "data 2", "train.accumulate=2")
    assert main(["report", str(out)]) == 0
    facts = json.loads((out / "report.json").read_text())
    assert (facts["updates"], facts["batches"]) == (6, 9)
    compute = sum(rank["seconds"]["compute"] for rank in facts["ranks"]) / 2 / 9
    assert f"<td>compute</td><td>{human_seconds(compute)}</td>" in (out / PAGE).read_text(encoding="utf-8")


def test_counted_bytes_are_the_models_rank_by_rank(run: Path) -> None:
    _, facts = read_trace(run / "step.json")
    assert len(facts["bytes"]) == 4
    for rank in facts["bytes"]:
        assert {k: v for k, v in rank["counted"].items() if k != "norms"} == {
            k: v for k, v in rank["model"].items() if v
        }
    rows, marks = bytes_rows(facts["bytes"])
    assert not any(marks)
    assert [r[0] for r in rows if r[2] == "not part of the program"] == ["norms"]
    # The cost model adds the busiest rank of each move, so that no rank sends more than it says.
    config = run_config(run, 4)
    settings, priced, _ = _expected(run, config, 4, None)
    priced = step_numbers(priced, settings.batch)["bytes"]
    assert 0 < max(sum(r["model"].values()) for r in facts["bytes"]) <= priced


def test_bytes_of_convolutions_lie_beside_the_least_possible(run: Path) -> None:
    config = run_config(run, 4)
    settings, priced, _ = _expected(run, config, 4, None)
    rows = bound_rows(priced, settings)
    convolutions = [n.name for n in settings.graph.ops if n.op.kind == "conv"]
    assert [r[0] for r in rows] == convolutions
    name, sent, least = rows[0]
    shapes = settings.graph.shapes(settings.batch)
    x, y = shapes[settings.graph[name].inputs[0]], shapes[name]
    w = settings.graph.params()[f"{name}.weight"].shape
    updates = prod(y) * prod(w[1:])
    taps, strides = w[1:-1], (1,) * len(w[1:-1])
    assert least == round(4 * least_elements(updates, [prod(x), prod(w), prod(y)], taps, strides, 4))
    busiest_of_all = sum(r[1] for r in rows)
    assert 0 < busiest_of_all <= step_numbers(priced, settings.batch)["bytes"]
    assert f"<td>{name}</td><td>{sent:,}</td><td>{least:,}</td>" in (run / PAGE).read_text(encoding="utf-8")


def test_a_difference_in_bytes_is_marked_with_its_ranks() -> None:
    ranks = [{"counted": {"halo": 8}, "model": {"halo": 8}}, {"counted": {"halo": 9}, "model": {"halo": 8}}]
    rows, marks = bytes_rows(ranks)
    assert rows == [["halo", "17", "16", "1"]]
    assert marks == [True]
    assert bytes_rows([{"counted": {}, "model": {"halo": 4}}])[1] == [True]


def test_seconds_of_a_layer_are_of_its_slowest_rank_and_per_batch() -> None:
    def event(name: str, cat: str, pid: int, dur: float, tid: int = 0) -> dict[str, Any]:
        return {"name": name, "cat": cat, "ph": "X", "ts": 0.0, "dur": dur, "pid": pid, "tid": tid}

    events = [
        event("step 5", "step", 0, 9.0, 2),
        event("step 5", "step", 0, 9.0, 2),
        event("step 5", "step", 1, 9.0, 2),
    ]
    events += [event("my conv conv_forward", "forward", 0, 2e6), event("my conv conv_backward", "backward", 0, 1e6)]
    events += [event("my conv conv_forward", "forward", 1, 8e6), event("update", "update", 1, 5e6)]
    events += [event("my conv:y", "halo", 1, 7e6, 1)]
    assert layer_seconds(events) == {"my conv": 4.0}


def test_without_a_machine_nothing_is_predicted(tmp_path: Path) -> None:
    out = trained(tmp_path / "out", "data 2")
    text = write_report(out).read_text(encoding="utf-8")
    assert "Nothing is predicted" in text
    assert "0 bytes" not in text
    assert "Predicted step on h100-nvl8" in write_report(out, "h100-nvl8").read_text(encoding="utf-8")


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no report.json of a finished run" in capsys.readouterr().err
    (tmp_path / "report.json").write_text("{")
    assert main(["report", str(tmp_path)]) == 2


def test_a_page_that_fails_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lbpar"):
        after_run(tmp_path)
    assert "not written" in caplog.text
    assert not (tmp_path / PAGE).exists()


def test_the_command_draws_the_page_unless_told_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lbpar.config.run_file import dump
    from lbpar.train.command import main as train

    monkeypatch.setenv("LBPAR_ALONE", "1")
    (tmp_path / "run.yaml").write_text(dump(run_file(["run.progress=none", "train.epochs=1"])))
    given: list[Path] = []
    for name, sets in (("a", []), ("b", ["--set", "run.report=false"])):
        out = str(tmp_path / name)
        assert train(["--config", str(tmp_path / "run.yaml"), "--set", f"run.out={out}", *sets], given.append) == 0
    assert given == [tmp_path / "a"]


@pytest.mark.skipif(BROWSER is None, reason="no headless browser is installed")
def test_a_browser_shows_every_figure_offline(run: Path, tmp_path: Path) -> None:
    assert BROWSER is not None
    probe = (
        "<script>addEventListener('load', () => { document.title = JSON.stringify({"
        "seen: [...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().height > 50).length,"
        "shapes: document.querySelectorAll('svg path').length,"
        "loaded: performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length}) })</script>"
    )
    page = tmp_path / "page.html"
    page.write_text((run / PAGE).read_text(encoding="utf-8") + probe, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom"]
    home = ["--user-data-dir=" + str(tmp_path / "profile")]
    done = subprocess.run(
        [BROWSER, *options, *home, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert found is not None
    told = json.loads(found[1])
    assert (told["seen"], told["loaded"]) == (5, 0)
    assert told["shapes"] > 100


def test_a_run_with_stages_shows_its_pipeline(tmp_path: Path) -> None:
    """A row per stage, a bar per task; numbers of micro-batches lie on them."""
    out = trained(
        tmp_path / "out",
        "mixed 4",
        "parallel.strategy=data",
        "parallel.stages=2",
        "parallel.micro_batches=2",
        "parallel.layers={}",
    )
    reader = Reader()
    reader.feed(write_report(out).read_text(encoding="utf-8"))
    assert any(t.startswith("Stages and micro-batches of step") for t in reader.titles)


def test_the_pipeline_of_a_trace_has_a_bar_for_every_task() -> None:
    from matplotlib.figure import Figure

    def event(pid: int, cat: str, ts: float, micro: int | None) -> dict[str, Any]:
        more = {} if micro is None else {"args": {"micro": micro}}
        return {"ph": "X", "tid": 0, "pid": pid, "cat": cat, "ts": ts, "dur": 1000.0, "name": "c k"} | more

    events = [
        event(0, "forward", 0, 0),
        event(0, "forward", 1000, 0),
        event(0, "backward", 5000, 0),
        event(0, "update", 6000, None),
    ]
    events += [
        event(2, "forward", 2000, 0),
        event(2, "backward", 3000, 0),
        event(1, "forward", 0, 0),
        event(0, "p2p", 2000, None),
    ]
    figure = Figure()
    assert stages(figure, events, (0, 2))
    bars = [(round(b.get_y() + b.get_height() / 2), b.get_x(), b.get_width()) for b in figure.axes[0].patches]
    assert [(y, round(x, 9), round(w, 9)) for y, x, w in bars] == [
        (0, 0, 2),
        (0, 5, 1),
        (0, 6, 1),
        (-1, 2, 1),
        (-1, 3, 1),
    ]
    assert not stages(Figure(), [event(0, "forward", 0, None)], (0, 2))
