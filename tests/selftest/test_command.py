"""The self-test covers every type that the engine has here, and finds a kernel that is wrong in one of them."""

from __future__ import annotations

import sys

import pytest

from lbpar.engine.registry import get_engine
from lbpar.errors import EngineError
from lbpar.selftest import command
from lbpar.selftest.networks import networks


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "networks", lambda: {"small blocks": networks()["small blocks"]})


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
