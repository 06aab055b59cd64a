from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lbpar
from lbpar import cli


def call(*args: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[1]
    return subprocess.run([sys.executable, *args], cwd=root, capture_output=True, text=True, check=False)


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return call("-m", "lbpar", *args)


def test_version_and_help_import_nothing_heavy() -> None:
    code = "import sys; from lbpar.cli import main; main(['--version']); main(['--help']); print(*sorted(sys.modules))"
    out = call("-c", code)
    first, *_, modules = out.stdout.splitlines()
    assert first == f"lbpar {lbpar.__version__}"
    assert not {"numpy", "mpi4py", "yaml", "pydantic"} & set(modules.split())


@pytest.mark.parametrize(("typed", "meant"), [("trian", "train"), ("plans", "plan"), ("mpi-steup", "mpi_setup")])
def test_unknown_command_gets_the_nearest_name(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([typed]) == 2
    assert f"unknown command `{typed}`; did you mean '{meant}'?" in capsys.readouterr().err


def test_hopeless_command_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["xyzzy"]) == 2
    err = capsys.readouterr().err
    assert all(name in err for name in cli.COMMANDS)


def test_no_command_prints_usage_and_fails() -> None:
    out = run()
    assert out.returncode == 2 and out.stderr.startswith("usage: lbpar COMMAND")


def test_command_runs_as_its_module_would() -> None:
    """Dashes serve as underscores, the usage line names what was typed or the command, the exit code passes through."""
    out = run("mpi-setup", "--help")
    assert out.returncode == 0 and "usage: lbpar mpi" in out.stdout
    assert run("mpi-setup", "--no-such-option").returncode == 2


@pytest.mark.parametrize("command", ["train", "evaluate", "predict", "export", "data", "calibrate"])
def test_help_loads_neither_models_nor_data(command: str) -> None:
    code = (
        "import sys; from lbpar.cli import main\n"
        "try: main([sys.argv[1], '--help'])\n"
        "except SystemExit as e: code = e.code\n"
        "heavy = {'pydantic', 'yaml', 'h5py', 'rich', 'mpi4py', 'lbpar.graph.graph'} & set(sys.modules)\n"
        "sys.exit(code or ', '.join(heavy) or 0)"
    )
    done = call("-c", code, command)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: " in done.stdout
