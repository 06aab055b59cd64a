from __future__ import annotations

from pathlib import Path

import pytest

from lbpar.errors import ConfigError
from lbpar.mpi_setup import prepare


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "etc").mkdir()
    (tmp_path / "pyvenv.cfg").touch()
    (tmp_path / "bin" / "activate").write_text("export PATH\n")
    (tmp_path / "etc" / "prte-mca-params.conf").write_text("# comments\n")
    return tmp_path


def test_writes_both_files_once(venv: Path) -> None:
    params, activate = venv / "etc" / "prte-mca-params.conf", venv / "bin" / "activate"
    assert prepare(venv) == [params, activate]
    texts = params.read_text(), activate.read_text()
    assert texts[0].startswith("# comments\n") and "rmaps_default_mapping_policy = :oversubscribe" in texts[0]
    assert texts[1].startswith("export PATH\n") and "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1" in texts[1]
    assert prepare(venv) == []
    assert (params.read_text(), activate.read_text()) == texts


def test_without_open_mpi_nothing_changes(venv: Path) -> None:
    (venv / "etc" / "prte-mca-params.conf").unlink()
    assert prepare(venv) == []
    assert (venv / "bin" / "activate").read_text() == "export PATH\n"


def test_refuses_what_is_no_virtual_environment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a virtual environment"):
        prepare(tmp_path)
