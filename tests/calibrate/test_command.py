from __future__ import annotations

from pathlib import Path

import pytest

from lbpar.calibrate import command
from lbpar.calibrate.samples import samples
from lbpar.cost.machine import find_machine
from lbpar.errors import ConfigError
from lbpar.plan.command import run as plan


def test_a_measured_file_is_what_the_planner_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(samples())
    few = [found[0], *found[-2:]]
    monkeypatch.setattr("lbpar.calibrate.samples.samples", lambda more: few)
    path = str(tmp_path / "m.yaml")
    assert command.main(["--out", path, "--name", "here", "--engine", "numpy", "--repeats", "1"]) == 0
    assert "not measured (one rank)" in capsys.readouterr().out
    machine = find_machine(path)
    assert machine.name == "here" and machine.file.compute.table and "numpy" in machine.file.compute.source
    assert plan(["--model", "lenet", "--batch", "8", "--procs", "4", "--machine", path]) == 0
    assert "here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "gone/m.yaml"], "there is no folder gone"),
        (["--out", "m.yaml", "--repeats", "0"], "--repeats: got 0"),
        (["--out", "m.yaml", "--dtype", "flaot32"], "did you mean 'float32'"),
        (["--out", "m.yaml", "--threads", "many"], "expected auto or a whole number"),
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
    few, many = list(samples()), list(samples(more=True))
    assert len(many) > len(few) + 100
    assert all(graph.loss is not None and batch >= 1 for graph, batch in many)
