"""The self-test of a GPU on the stand-in for CuPy: everything is tried, what fails is said, the rest goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lbpar.selftest import command, gpu
from lbpar.selftest.networks import networks
from tests.cuda.emulator import compiler_found
from tests.util import fake_cupy

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch)
    fake_cupy.few_kernels(monkeypatch, 8)
    monkeypatch.setattr(command, "networks", lambda: {"vectors": networks()["vectors"]})
    monkeypatch.setattr(gpu, "GROUPS", {"dropout.cu": gpu.GROUPS["dropout.cu"]})


def test_all_parts_and_types(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    assert command.main(["--engine", "cupy", "--plans", "1", "--quick", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "Pretended (sm_90)" in out and "4 in 1 files compiled" in out and "selftest: passed" in out
    found = json.loads(file.read_text())
    assert found["passed"] and [p["part"] for p in found["parts"]] == ["versions", "NCCL", "kernels"]
    assert {(n["network"], n["dtype"], n[""]) for n in found["networks"]} == {
        ("vectors", dtype, "ok") for dtype in ("float64", "float32", "bfloat16")
    }


def test_speeds_of_every_type() -> None:
    parts = gpu.report(size=16, images=1)["parts"]
    assert not any(p["failed"] for p in parts), parts
    assert [p["part"] for p in parts[3:5]] == ["copy", "product, float32"]
    assert sum("TFLOP/s" in p["found"] for p in parts) == 6


def test_a_part_that_fails_does_not_end_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_cupy.nccl, "available", False)
    right = command.check

    def check(graph, engine, plans, dtype):  # type: ignore[no-untyped-def]
        if dtype == "float32":
            raise RuntimeError("illegal address")
        return right(graph, engine, plans, dtype)

    monkeypatch.setattr(command, "check", check)
    assert command.main(["--engine", "cupy", "--plans", "0", "--quick"]) == 1
    out = capsys.readouterr().out
    assert "NCCL cannot be used" in out and "vectors, float32: RuntimeError: illegal address" in out
    assert "bfloat16" in out and out.rstrip().endswith("selftest: FAILED")
