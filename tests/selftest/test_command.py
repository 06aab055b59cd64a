"""The self-test covers every type that the engine has here, and finds a kernel that is wrong in one of them."""

from __future__ import annotations

import sys

import pytest

from lbpar.engine.registry import get_engine
from lbpar.errors import ConfigError, EngineError
from lbpar.graph.builder import OPS
from lbpar.selftest import command
from lbpar.selftest.networks import networks


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
