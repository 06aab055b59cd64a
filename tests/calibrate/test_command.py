from __future__ import annotations

import re
from pathlib import Path

import pytest

from lbpar.calibrate import command
from lbpar.calibrate.links import LEAST, Timed
from lbpar.calibrate.picture import write_fit
from lbpar.calibrate.samples import networks, samples
from lbpar.calibrate.trust import Load, Trust, Watcher, doubt
from lbpar.config.machine_file import LinkConfig
from lbpar.cost.machine import find_machine
from lbpar.errors import CalibrationError, ConfigError
from lbpar.layout.grid import Grid
from lbpar.plan.command import run as plan
from lbpar.program.steps import Program
from lbpar.transport.virtual import VirtualWorld


def test_a_measured_file_is_what_the_planner_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lbpar.calibrate.samples.samples", lambda more: few())
    path = str(tmp_path / "m.yaml")
    assert command.main(["--out", path, "--name", "here", "--engine", "numpy", "--repeats", "1", "--force"]) == 0
    assert "not measured (one rank)" in capsys.readouterr().out
    machine = find_machine(path)
    assert machine.name == "here" and machine.file.compute.table and "numpy" in machine.file.compute.source
    assert plan(["--model", "lenet", "--batch", "8", "--procs", "4", "--machine", path]) == 0
    assert "here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "gone/m.yaml"], "there is no folder gone"),
        (["--out", "."], "it is a folder"),
        (["--out", "m.yaml", "--repeats", "0"], "--repeats: got 0"),
        (["--out", "m.yaml", "--dtype", "flaot32"], "did you mean 'float32'"),
        (["--out", "m.yaml", "--threads", "many"], "expected auto or a whole number"),
        (["--out", "m.yaml", "--transport", "fast"], "transport: got 'fast', expected one of"),
    ],
)
def test_mistakes_are_said_before_anything_is_measured(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lbpar.calibrate.machine.measure_machine", lambda *_: pytest.fail("measured"))
    with pytest.raises(ConfigError, match=words):
        command.main(options)


def test_more_samples_cover_more_shapes_and_stay_small() -> None:
    few, many = list(networks()), list(networks(more=True))
    assert len(many) > len(few) + 100
    assert all(graph.loss is not None and batch >= 1 for graph, batch in many)


BUSY = Load(average=9.5, taken=0.4, switches=321)
IDLE = Load(average=0.1, taken=0.0, switches=3)


@pytest.mark.parametrize(
    ("trust", "words"),
    [
        (Trust([IDLE], 0.01), []),
        (Trust([IDLE, BUSY], 0.01), ["had the cores 40 % of the time (load 9.5, 324 involuntary switches"]),
        (Trust([IDLE], 0.2), ["kernels lie 20 % apart"]),
        (Trust([IDLE], 0.0, ["p2p between 4 (node): why"]), ["p2p between 4 (node): why"]),
    ],
)
def test_doubts_say_what_was_seen(trust: Trust, words: list[str]) -> None:
    doubts = trust.doubts()
    assert len(doubts) == len(words)
    assert all(w in d for w, d in zip(words, doubts, strict=True))
    first, *more = trust.summary()
    busy = BUSY in trust.loads
    assert f"load {9.5 if busy else 0.1}, cores taken {40 if busy else 0} % of the time" in first
    assert more == [f"  in doubt         {d}" for d in doubts]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({}, None),
        (
            {"spread": 0.5, "unsure": 0.2, "residual": 0.7},
            r"medians are sure to 20 % only .*lie 50 % apart\); 70 % off any latency and bandwidth",
        ),
        ({"spread": 0.5, "unsure": 0.1}, None),  # many repetitions
        ({"unsure": 1.0}, "too slow to be timed three times"),
        ({"alpha": LEAST[0]}, "messages seem to take no time to start"),
        ({"alpha": 7.5e-3, "bandwidth": 1 / LEAST[1]}, "bytes seem to take no time"),
    ],
)
def test_a_link_that_cannot_be_trusted_says_so_itself(what: dict[str, float], words: str | None) -> None:
    """In the file and on its line of the summary, also when it is written by force."""
    link = LinkConfig.model_validate({"kind": "reduce_scatter", "ways": 2, "alpha": 1e-5, "bandwidth": 1e9} | what)
    found = doubt(link, LEAST)
    assert found is None if words is None else re.match(words, found or "")
    base = find_machine("laptop").file
    level = base.levels[0].model_copy(update={"moves": (link.model_copy(update={"doubt": found}),)})
    machine = base.model_copy(update={"levels": (level,)})
    lines = [
        x
        for x in command.summary(machine, VirtualWorld(Grid((2,))).transport(0), "m").splitlines()
        if "reduce_scatter" in x
    ]
    assert len(lines) == 1 and ("IN DOUBT" in lines[0]) == (found is not None)


def test_a_file_that_cannot_be_trusted_is_not_written_and_what_can_be_is_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lbpar.calibrate.samples.samples", lambda more: few())
    seen: list[int] = []

    def load(self: Watcher, host: bool = True) -> Load:
        seen.append(1)
        return BUSY if len(seen) == 1 else IDLE

    monkeypatch.setattr(Watcher, "load", load)
    monkeypatch.setattr("lbpar.calibrate.trust.KERNEL_SPREAD", 1e9)
    path = tmp_path / "m.yaml"
    options = ["--out", str(path), "--engine", "numpy", "--repeats", "1"]
    with pytest.raises(
        CalibrationError, match=r"m\.yaml is not written.*had the cores 40 %.*run it again, or write.*--force"
    ):
        command.main(options)  # nothing is kept: what could be trusted is not there
    assert not path.exists()
    monkeypatch.setattr(
        "lbpar.config.machine_file.save_machine_file", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):  # cut off after all was measured
        command.main(options)
    monkeypatch.undo()
    monkeypatch.setattr("lbpar.calibrate.samples.samples", lambda more: few())
    monkeypatch.setattr("lbpar.calibrate.machine.measure_compute", lambda *_: pytest.fail("measured again"))
    assert command.main(options) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["m.yaml"]
    assert find_machine(str(path)).file.notes["measured"]["load"] == [{"average": 0.1, "taken": 0.0, "switches": 3}]
    monkeypatch.setattr("lbpar.calibrate.machine.measure_compute", lambda *_: (_ for _ in ()).throw(ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):  # other options: measured anew
        command.main([*options, "--quick"])


def test_what_was_measured_is_shown_by_another_name_where_the_file_is_refused(tmp_path: Path) -> None:
    """An older machine file keeps what it was fitted to; a file that is written leaves nothing of one that was refused."""
    pytest.importorskip("matplotlib")
    moves = [
        Timed("node", "allreduce", 2, n, 1e-5 + 1e-9 * n, 0.1, 0.02, 9, (2.0, float(n), 0.0)) for n in (256, 65536)
    ]
    endings = [".json", ".png", ".svg"]

    def names() -> list[str]:
        return sorted(p.name for p in tmp_path.iterdir())

    assert write_fit(moves, tmp_path / "m.yaml") == tmp_path / "m.fit.svg"
    old = (tmp_path / "m.fit.json").read_text()
    assert write_fit(moves[:1], tmp_path / "m.yaml", refused=True) == tmp_path / "m.refused.svg"
    assert names() == [f"m.{name}{end}" for name in ("fit", "refused") for end in endings]
    assert (tmp_path / "m.fit.json").read_text() == old != (tmp_path / "m.refused.json").read_text()
    assert write_fit(moves, tmp_path / "m.yaml") == tmp_path / "m.fit.svg"
    assert names() == [f"m.fit{end}" for end in endings]
    assert write_fit([], tmp_path / "m.yaml", refused=True) is None


def few() -> list[Program]:
    found = list(samples())
    return [found[1], *found[-2:]]
