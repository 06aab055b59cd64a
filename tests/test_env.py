"""`lbpar env`: facts for a report."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lbpar import __version__
from lbpar.env import main


def test_tells_versions_and_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LBPAR_CHECKED", "1")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setattr(
        "lbpar.env.PROBES",
        {"fails": "import sys; sys.exit(3)", "crashes": "import os; os.abort()", "works": "print(7)"},
    )
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lbpar"].startswith(__version__) and found["numpy"] == np.__version__
    assert found["LBPAR_CHECKED"] == "1" and "SECRET_TOKEN" not in found
    assert (found["fails"], found["crashes"], found["works"]) == ("cannot be used", "cannot be used", "7")
    assert main([]) == 0
    assert f"numpy                  {np.__version__}" in capsys.readouterr().out
