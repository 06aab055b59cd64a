"""The self-test covers every type that the engine has here, and finds a kernel that is wrong in one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lbpar.engine.registry import get_engine
from lbpar.errors import ConfigError, EngineError
from lbpar.graph.builder import OPS
from lbpar.launcher import launched_ranks
from lbpar.selftest import command, gpu
from lbpar.selftest.networks import RUN, networks

ON_STAND_IN = (sys.executable, "-m", "tests.util.on_stand_in")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "networks", lambda: {"small blocks": networks()["small blocks"]})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only", "kernels"], r"--only: is for GPUs, but --engine is numpy"),
        (["--quick"], r"--quick: is for GPUs"),
        (["--budget", "60"], r"--budget: is for GPUs"),
        (["--plans", "-1"], r"--plans: got -1, expected 0 or more"),
        (
            ["--json", "no/such/folder.json"],
            r"--json: no/such/folder.json cannot be written: there is no folder no/such",
        ),
        (["--engine", "cupy", "--only", "["], r"--only: got '\[', expected a regular expression"),
        (
            ["--engine", "cupy", "--only", "nothing"],
            r"--only: no part's name matches 'nothing'; names begin with versions, kernels",
        ),
        (["--engine", "cupy", "--budget", "nan"], r"--budget: got nan, expected a number of seconds"),
    ],
)
def test_options_that_say_nothing_are_refused_before_anything_runs(options: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        command.main(["--engine", "numpy", *options])


def test_findings_replace_those_of_another_self_test_and_no_other_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(RUN | {"engine": {"name": "numpy"}}))
    before = file.read_bytes()
    for engine in ("numpy", "cupy"):
        with pytest.raises(ConfigError, match=r"run.yaml: is there already and holds something else"):
            command.main(["--engine", engine, "--json", str(file)])
    assert file.read_bytes() == before
    file = tmp_path / "found.json"
    assert command.main(["--engine", "numpy", "--plans", "0", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["passed"]
    assert command.main(["--engine", "cupy", "--budget", "0.5", "--json", str(file)]) == 1
    found = json.loads(file.read_text())
    assert found["engine"] == "cupy" and found["finished"] and not found["passed"]
    assert command.main(["--engine", "numpy", "--plans", "0", "--json", str(file)]) == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_ranks_the_first_runs_alone(rank: int) -> None:
    """Without MPI, which would not find the others."""
    env = os.environ | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(rank)}
    done = subprocess.run(
        [sys.executable, "-m", "lbpar.selftest", "--plans", "-1"], env=env, capture_output=True, text=True, check=False
    )
    if rank == 0:
        assert done.returncode and done.stderr == "lbpar: error: --plans: got -1, expected 0 or more.\n"
    else:
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("options", [["--plans", "-1"], ["--only", "^versions$"]])
def test_of_several_ranks_the_first_runs_alone_where_mpi_runs_in_all_of_them(options: list[str]) -> None:
    """Which the stand-in's NCCL starts. The others wait for the first one in MPI's end."""
    pytest.importorskip("mpi4py")
    starter = gpu.mpirun()
    if starter is None or launched_ranks() is not None:
        pytest.skip("no mpirun, or under one")
    allow = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    allow |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [starter, "-n", "2", *ON_STAND_IN, "lbpar.selftest", "--engine", "cupy", *options],
        env=os.environ | allow | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    if "--only" in options:
        assert done.returncode == 0 and done.stdout.count("versions: ") == done.stdout.count("selftest: passed") == 1
    else:
        assert done.returncode and done.stderr.count("lbpar: error: --plans: got -1, expected 0 or more.") == 1


def test_who_had_no_time_for_anything_has_not_passed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--engine", "cupy", "--budget", "0.5"]) == 1
    assert "selftest: FAILED" in capsys.readouterr().out


def test_small_networks_use_every_op() -> None:
    used = {node.op.kind for graph in networks().values() for node in graph.ops}
    assert set(OPS) - used == {"fit"}  # which becomes a pad


def test_types_without_bfloat16(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # as if it could not be imported
    assert command.main(["--engine", "numpy", "--plans", "1"]) == 0
    out = capsys.readouterr().out
    assert "numpy   float64" in out and "numpy   float32" in out
    assert "selftest: passed; without bfloat16 (engine.dtype: bfloat16 needs the package ml-dtypes" in out


def test_a_kernel_that_is_wrong_in_bfloat16_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        get_engine("onednn", "bfloat16")
    except EngineError as error:
        pytest.skip(str(error))
    from lbpar.engine.onednn.engine import OneDnnEngine

    assert command.main(["--engine", "onednn", "--plans", "1"]) == 0
    assert "onednn  bfloat16" in capsys.readouterr().out
    right = OneDnnEngine.conv_backward_weights
    monkeypatch.setattr(
        OneDnnEngine,
        "conv_backward_weights",
        lambda self, *a: right(self, *a) * (1.1 if self.compute == "bfloat16" else 1.0),
    )
    assert command.main(["--engine", "onednn", "--plans", "0"]) == 1
    out = capsys.readouterr().out
    assert out.count("WRONG") == 1 and "selftest: FAILED" in out
