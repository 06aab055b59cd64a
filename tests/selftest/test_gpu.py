"""The self-test of a GPU on the stand-in for CuPy: everything is tried, what fails, crashes or hangs is said, the rest goes on."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lbpar.selftest import command, gpu, parts
from lbpar.selftest.parts import Part
from tests.cuda.emulator import compiler_found

PYTHON = (sys.executable, "-m", "tests.util.on_stand_in")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("STAND_IN_ITEMSIZE", "8")
    monkeypatch.setattr(parts, "PYTHON", PYTHON)


def run(*options: str, only: str) -> int:
    return command.main(["--engine", "cupy", "--tiny", "--plans", "1", "--budget", "600", "--only", only, *options])


@pytest.mark.slow
@pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
def test_parts_of_every_kind(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    only = "^(versions|kernels|vectors, float32|training|ceilings|resnet50 of 64, bfloat16)$"
    assert run("--json", str(file), only=only) == 0
    out = capfd.readouterr().out
    assert "Pretended (sm_90)" in out and "kernels: 14 in 1 files compiled and loaded" in out
    assert "TFLOP/s of large products" in out and "own kernels" in out and out.rstrip().endswith("selftest: passed")
    found = json.loads(file.read_text())
    rows: dict[str, Any] = {row["part"]: row for row in found["parts"]}
    assert found["passed"] and len(rows) == 6
    assert rows["vectors, float32"]["against float64"] < 1e-4
    assert rows["training"]["worst"]["float64"] < 1e-12
    assert rows["resnet50 of 64, bfloat16"]["samples/s"] > 0


@pytest.mark.slow
@pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
def test_real_ranks_and_floors(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mpi4py")
    if gpu.mpirun() is None:
        pytest.skip("no mpirun")
    assert run(only="^(2 ranks, .*|floors, bfloat16)$") == 0
    out = capfd.readouterr().out
    assert out.count("equal: worst") == 2 and "built without CUDA" in out
    assert "kernels beside their floors" in out and "conv_forward" in out


@pytest.mark.skipif(find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_a_device_nothing_else_is_tried(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parts, "PYTHON", (sys.executable, "-m"))
    assert run(only="") == 1
    out = capfd.readouterr()
    assert "pip install 'lbpar[cuda13]'" in out.out and out.out.count("FAILED") == 2


@pytest.mark.slow
def test_parts_that_fail_crash_or_hang_do_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LEAST", 20.0)
    monkeypatch.setattr(parts, "PYTHON", (sys.executable, "-m"))
    here, said = "tests.selftest.test_gpu", list[parts.Row]()
    rows = parts.run(
        [
            Part("fails", f"{here}:fails", {"what": "an op"}, 0.5),
            Part("crashes", f"{here}:crashes", seconds=0.5),
            Part("is wrong", f"{here}:is_wrong", seconds=0.5),
            Part("is right", f"{here}:is_right", seconds=0.5, alone=True),
            Part("hangs", f"{here}:hangs", seconds=0.5),
            Part("too long", f"{here}:is_right", seconds=1e4, alone=True),
        ],
        budget=300.0,
        workers=3,
        say=said.append,
    )
    found = {row["part"]: row for row in rows}
    assert list(found) == ["fails", "crashes", "is wrong", "is right", "hangs", "too long"] and len(said) == 6
    assert found["fails"]["found"] == "RuntimeError: an op" and "Traceback" in found["fails"]["log"]
    assert found["crashes"]["found"] == "ended with signal 6" and found["crashes"]["failed"]
    assert found["is wrong"]["failed"] and found["is wrong"]["worst"] == 3.0
    assert found["is right"] | {"seconds": 0} == {"part": "is right", "found": "ok", "seconds": 0, "failed": False}
    assert found["hangs"]["failed"] and found["hangs"]["found"].startswith("no end after 2")
    assert found["too long"]["left out"] and not found["too long"]["failed"]


def fails(what: str) -> str:
    raise RuntimeError(what)


def crashes() -> None:
    os.abort()


def is_wrong() -> dict[str, Any]:
    return {"found": "WRONG", "failed": True, "worst": 3.0}


def is_right() -> str:
    return "ok"


def hangs() -> None:
    import time

    time.sleep(600)


def test_the_most_important_comes_first_and_names_are_unique() -> None:
    wanted = gpu.parts(3, quick=False)
    names = [p.name for p in wanted]
    assert len(set(names)) == len(names)
    assert names[:2] == ["versions", "kernels"]
    assert [p.alone for p in wanted[2:]] == sorted(p.alone for p in wanted[2:])
    assert not any(p.alone for p in gpu.parts(3, quick=True)[2:])
    assert {"resnet50 of 256, bfloat16", "resnet50 of 64, TF32", "unet3d of 2, bfloat16"} < set(names)
