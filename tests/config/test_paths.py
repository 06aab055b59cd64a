"""Paths with ``~`` and environment variables mean the same wherever one is given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lbpar import api
from lbpar.config.paths import as_path
from lbpar.config.run_file import dump, parse_run
from lbpar.cost.machine import find_machine
from lbpar.data.convert import convert
from lbpar.data.info import describe
from lbpar.data.open import open_dataset
from lbpar.errors import ConfigError
from lbpar.plan.command import main as plan_command

RUN = "model: {input: [4, 4, 1], layers: [{op: flatten}, {op: linear, features: 3}]}\ntrain: {batch: 2}\n"


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.delenv("NOPE", raising=False)
    for name in ("home", "scratch"):
        (tmp_path / name).mkdir()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("~/x", "home/x"),
        ("~", "home"),
        ("$SCRATCH/r", "scratch/r"),
        ("${SCRATCH}_2/$SCRATCH", "scratch_2{}/scratch"),
    ],
)
def test_home_and_variables(given: str, meant: str, tmp_path: Path) -> None:
    assert str(as_path(given)) == f"{tmp_path}/{meant.format(tmp_path)}"
    assert str(as_path(Path(given))) == f"{tmp_path}/{meant.format(tmp_path)}"


@pytest.mark.parametrize("plain", ["a/~b", "100$", "a$/b", "runs/x", "./~x"])
def test_other_paths_stay(plain: str) -> None:
    assert as_path(plain) == Path(plain)


@pytest.mark.parametrize(
    ("given", "named"),
    [("$NOPE/x", "but NOPE is not"), ("${NOPE}", "but NOPE is not"), ("~nobody_here/x", "no user 'nobody_here'")],
)
def test_what_is_not_there_is_refused_by_name(given: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        as_path(given)


FIELDS = {
    "data.train": "train.h5",
    "data.test": "test.h5",
    "run.out": "r",
    "machine": "m.yaml",
    "parallel.strategy": "p.yaml",
    "model": "net.onnx",
}


@pytest.mark.parametrize("field", FIELDS)
def test_every_path_of_a_run_file(field: str, tmp_path: Path) -> None:
    def override(start: str) -> str:
        path = f"{start}/{FIELDS[field]}"
        return f"model={{onnx: {path}}}" if field == "model" else f"{field}={path}"

    config = parse_run(RUN, [override("$SCRATCH")])
    assert f"{tmp_path}/scratch/{FIELDS[field]}" in dump(config) and "$" not in dump(config)
    assert parse_run(dump(config)) == config
    with pytest.raises(ConfigError, match=rf"{field}.*got '\$NOPE/{FIELDS[field]}'.*NOPE is not"):
        parse_run(RUN, [override("$NOPE")])


def test_calls_and_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "home/run.yaml").write_text(RUN)
    config = api.load_run("~/run.yaml", ["data.train=$SCRATCH/d.h5"])
    np.savez(tmp_path / "home/a.npz", x=np.zeros((3, 4, 4, 1)), y=np.arange(3))
    convert(["~/a.npz"], "$SCRATCH/d.h5")
    assert len(open_dataset(config.data)) == 3
    assert describe("$SCRATCH/d.h5").startswith(f"{tmp_path}/scratch/d.h5: ")
    api.save_plan(api.make_plan(config), "~/p.yaml")
    assert api.make_plan(config, plan_file="${HOME}/p.yaml").grid.size == 1
    (tmp_path / "home/m.yaml").write_text("name: mine")
    with pytest.raises(ConfigError, match="m.yaml: 3 mistakes"):
        find_machine("~/m.yaml")
    args = ["--config", "~/run.yaml", "--procs", "2", "--machine", "laptop", "--quiet"]
    assert plan_command([*args, "--out", "~/chosen.yaml", "--json", "$SCRATCH/plan.json"]) == 0
    assert (tmp_path / "home/chosen.yaml").is_file() and (tmp_path / "scratch/plan.json").is_file()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        plan_command([*args, "--json", "$NOPE/plan.json"])
    assert "argument --json: got '$NOPE/plan.json'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="NOPE"):
        api.evaluate(config, "$NOPE/checkpoints")
    assert not list(tmp_path.glob("[$~]*"))
