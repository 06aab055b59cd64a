from __future__ import annotations

from pathlib import Path

import pytest

from lbpar.calibrate import command
from lbpar.calibrate.samples import networks, samples
from lbpar.calibrate.trust import Load, Trust, Watcher
from lbpar.cost.machine import find_machine
from lbpar.errors import CalibrationError, ConfigError
from lbpar.plan.command import run as plan
from lbpar.program.steps import Program


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
    few, many = list(networks()), list(networks(more=True))
    assert len(many) > len(few) + 100
    assert all(graph.loss is not None and batch >= 1 for graph, batch in many)


BUSY = Load(average=9.5, taken=0.4, switches=321)
IDLE = Load(average=0.1, taken=0.0, switches=3)


@pytest.mark.parametrize(
    ("trust", "words"),
    [
        (Trust([IDLE], 0.01, {"allreduce between 2 (node)": (0.05, 0.1)}), []),
        (Trust([IDLE, BUSY], 0.01, {}), ["had the cores 40 % of the time (load 9.5, 324 involuntary switches"]),
        (Trust([IDLE], 0.2, {}), ["kernels lie 20 % apart"]),
        (
            Trust([IDLE], 0.0, {"p2p between 4 (node)": (0.5, 0.7)}),
            ["p2p between 4 (node) lie 50 % apart", "p2p between 4 (node) is 70 % off"],
        ),
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
    with pytest.raises(CalibrationError, match=r"m\.yaml is not written.*had the cores 40 %.*--force"):
        command.main(options)
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


def few() -> list[Program]:
    found = list(samples())
    return [found[1], *found[-2:]]
