"""What a stranger gets: `pip install .` from a clean clone, and a wheel, both with the kernel sources inside."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lbpar

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def call(*args: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(args, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean clone of the last commit."""
    if not (ROOT / ".git").exists():
        pytest.skip("the sources are not a git repository")
    where = tmp_path_factory.mktemp("clone") / "lbpar"
    call("git", "-c", "safe.directory=*", "clone", "-q", ROOT, where, cwd=ROOT)
    return where


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, ".", cwd=clone)
    (made,) = out.glob("lbpar-*.whl")
    return made


def test_wheel_holds_all_files_and_nothing_else(clone: Path, wheel: Path) -> None:
    """Whatever git tracks in the package, data files such as machines included, and all kernel sources."""
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = call("git", "-c", "safe.directory=*", "ls-files", "lbpar", "kernels", "jobs", cwd=clone).splitlines()
    expected = {name if name.startswith("lbpar/") else f"lbpar/{name}" for name in tracked}
    assert {"lbpar/kernels/rows.c", "lbpar/py.typed", "lbpar/cost/machines/laptop.yaml"} <= expected
    assert not expected - names
    assert {name.split("/")[0] for name in names} == {"lbpar", f"lbpar-{lbpar.__version__}.dist-info"}


@pytest.mark.parametrize("source", ["clone", "wheel"])
def test_installs_and_finds_its_kernels(source: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    what, site = request.getfixturevalue(source), tmp_path / "site"
    call(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, what, cwd=tmp_path)
    code = "import lbpar, lbpar.engine.native.build as b; print(lbpar.__file__, *b._sources())"
    package, *sources = call(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(site)).split()
    assert Path(package) == site / "lbpar" / "__init__.py"
    assert {Path(s).parent for s in sources} == {site / "lbpar" / "kernels"}
    assert {Path(s).name: Path(s).read_text() for s in sources} == {
        p.name: p.read_text() for p in (ROOT / "kernels").glob("*.c")
    }
    assert (
        call(site / "bin" / "lbpar", "--version", cwd=tmp_path, PYTHONPATH=str(site)).strip()
        == f"lbpar {lbpar.__version__}"
    )
