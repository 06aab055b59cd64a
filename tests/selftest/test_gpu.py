"""The self-test of a GPU on the stand-in for CuPy: everything is tried, what fails, crashes or hangs is said, the rest goes on."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lbpar.selftest import checks, command, gpu, parts, speeds
from lbpar.selftest.parts import Part
from tests.cuda.emulator import compiler_found
from tests.util import fake_cupy

PYTHON = (sys.executable, "-m", "tests.util.on_stand_in")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(parts, "PYTHON", PYTHON)


def run(*options: str, only: str) -> int:
    return command.main(["--engine", "cupy", "--tiny", "--plans", "1", "--budget", "600", "--only", only, *options])


@pytest.mark.slow
@pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
def test_parts_of_every_kind(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    only = "^(versions|kernels|vectors, float32|training|ceilings|resnet50 of 64, bfloat16(, CUDA graphs)?)$"
    assert run("--json", str(file), only=only) == 0
    out = capfd.readouterr().out
    assert "Pretended (sm_90)" in out and "kernels: 14 in 1 files compiled and loaded" in out
    assert "TFLOP/s of large products" in out and "own kernels" in out and out.rstrip().endswith("selftest: passed")
    found = json.loads(file.read_text())
    rows: dict[str, Any] = {row["part"]: row for row in found["parts"]}
    assert found["passed"] and len(rows) == 7
    assert rows["vectors, float32"]["against float64"] < 1e-4
    assert rows["training"]["worst"]["float64"] < 1e-12
    assert rows["training"]["worst"]["float32, CUDA graphs"] == rows["training"]["worst"]["float32"]
    assert all(rows[f"resnet50 of 64, bfloat16{way}"]["samples/s"] > 0 for way in ("", ", CUDA graphs"))


@pytest.mark.slow
@pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_steps_of_pytorch_eager_and_compiled(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its CPU in the place of a GPU. What was found is in the file before the end, for who is cut off."""
    file = tmp_path / "found.json"
    seen = list[Any]()
    write = command._write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_write", lambda *a, **k: (write(*a, **k), seen.append(json.loads(file.read_text()))))
        assert run("--json", str(file), only="^(resnet50 of 256|unet3d of 2), bfloat16(, PyTorch .*)?$") == 0
    assert "lbpar / best of PyTorch" in capfd.readouterr().out
    assert [len(found["parts"]) for found in seen] == [1, 2, 3, 4, 5, 6, 6]
    assert [found["finished"] for found in seen] == [False] * 6 + [True]
    assert all(row["samples/s"] > 0 for row in seen[-1]["parts"]) and len(seen[-1]["beside"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
def test_real_ranks_and_floors(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mpi4py")
    if gpu.mpirun() is None:
        pytest.skip("no mpirun")
    assert run(only="^([24] ranks, .*|floors, bfloat16)$") == 0
    out = capfd.readouterr().out
    assert out.count("equal: worst") == 4 and out.count("built without CUDA") == 2
    assert out.count("losses of recorded steps differ from NumPy's by") == 2 and "not recorded" not in out
    assert "kernels beside their floors" in out and "conv_forward" in out


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
def test_all_of_it(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In one go; what is left out is what the machine has not."""
    monkeypatch.setattr(
        parts, "LEAST", 1800.0
    )  # a part builds kernels for the emulation, on cores that others use, too
    file = tmp_path / "found.json"
    budget = ["--json", str(file), "--budget", "3400"]
    assert run(*budget, only="") == 0
    found = json.loads(file.read_text())
    assert [row["part"] for row in found["parts"]] == [part.name for part in gpu.parts(1, quick=False, tiny=True)]
    out = [row["part"] for row in found["parts"] if row.get("left out")]
    assert found["passed"] and all(name.endswith((" ranks, mpi", ", autotune")) for name in out)


@pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_rule_and_clipping_run_on_the_device(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    ran = set[str]()
    for name in ("planes", "voxels", "weighed voxels", "vectors", "flags", "outputs"):
        machine = fake_cupy.install(monkeypatch)
        fake_cupy.few_kernels(monkeypatch, 4 if dtype == "float32" else 2)
        found = checks.network(name, {"dtype": dtype}, 1)
        assert not found["failed"], found
        ran |= {kernel.partition("<")[0] for kernel in machine.launches}
    assert {"sgd", "adam", "lars", "lamb_moments", "lamb", "squares", "clip", "sum_blocks"} <= ran
    assert "unscale" in ran or dtype == "float32"


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


@pytest.mark.slow
def test_what_the_budget_cuts_off_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PYTHON", (sys.executable, "-m"))
    hanging = [Part("hangs", "tests.selftest.test_gpu:hangs", seconds=0.5)]
    (row,) = parts.run(hanging, budget=3.0, workers=1, say=lambda row: None)
    assert row["left out"] and not row["failed"] and row["found"].startswith("left out: no end after ")


@pytest.mark.slow
def test_who_ends_it_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LEAST", 3600.0)
    monkeypatch.setattr(parts, "PYTHON", (sys.executable, "-m"))
    children, popen = list[Any](), parts.subprocess.Popen
    monkeypatch.setattr(
        parts.subprocess, "Popen", lambda *a, **options: children.append(popen(*a, **options)) or children[-1]
    )

    rows = list[parts.Row]()

    def interrupted(row: parts.Row) -> None:
        rows.append(row)
        raise KeyboardInterrupt

    here = "tests.selftest.test_gpu"
    hanging = [Part(name, f"{here}:{name}") for name in ("is_right", "hangs")]
    with pytest.raises(KeyboardInterrupt):
        parts.run(hanging, budget=3600.0, workers=2, say=interrupted)
    assert len(children) == 2 and all(child.poll() is not None for child in children)
    assert [row["found"] for row in rows] == ["ok", "left out: interrupted"]
    assert rows[1]["left out"] and not rows[1]["failed"] and "log" not in rows[1]


@pytest.mark.slow
def test_who_asks_for_an_end_hears_of_no_failure(tmp_path: Path) -> None:
    """SIGTERM to all processes of a job, as from a batch system: the part under way comes first."""
    file, fifo = tmp_path / "found.json", tmp_path / "pid"
    os.mkfifo(fifo)
    code = f"import tests.selftest.test_gpu as t; t.two_parts({str(file)!r}, {str(fifo)!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        part = int(fifo.read_text())
        handle = os.pidfd_open(part)
        os.kill(part, signal.SIGTERM)
        assert not select.select([handle], [], [], 1)[0], "the part has ended by itself"
        parent.terminate()
        out = parent.communicate()[0]
    os.close(handle)
    assert parent.returncode == 143 and "FAILED" not in out and "-       second: left out: interrupted" in out
    found = json.loads(file.read_text())
    assert not found["finished"] and [row["found"] for row in found["parts"]] == ["ok", "left out: interrupted"]
    assert not any(row["failed"] for row in found["parts"])


@pytest.mark.slow
def test_who_is_killed_keeps_what_was_found_and_leaves_nothing_running(tmp_path: Path) -> None:
    """SIGKILL, as when a lent machine is taken back: the part under way ends by itself."""
    file, fifo = tmp_path / "found.json", tmp_path / "pid"
    os.mkfifo(fifo)
    code = f"import tests.selftest.test_gpu as t; t.two_parts({str(file)!r}, {str(fifo)!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        part = os.pidfd_open(int(fifo.read_text()))  # comes when the second part runs
        parent.kill()
    assert select.select([part], [], [], 60)[0], "the part goes on"
    os.close(part)
    found = json.loads(file.read_text())
    assert not found["finished"] and [row["found"] for row in found["parts"]] == ["ok"]


def test_ranks_that_the_machine_does_not_allow_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = fake_cupy.install(monkeypatch, devices=2)
    assert not gpu.versions()["exclusive"]
    assert checks.ranks(4, "nccl")["found"] == "left out: NCCL wants a GPU for each rank, and there are 2 here"
    machine.exclusive = True
    assert gpu.versions()["exclusive"] and "one process at a time" in gpu.versions()["found"]
    assert checks.ranks(4, "host") == {"found": "left out: one process at a time may use the GPU", "left out": True}
    monkeypatch.setattr(fake_cupy.nccl, "available", False)
    found = checks.ranks(2, "nccl")
    assert found["left out"] and "libnccl.so.2 is not there" in found["found"]


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts that need it are there, and left out; nothing is started for them."""
    monkeypatch.setattr(parts.subprocess, "Popen", None)
    monkeypatch.setattr(gpu, "mpirun", lambda: None)
    assert run(only="2 ranks, (host|mpi)") == 1  # who found out nothing has not passed
    assert capsys.readouterr().out.count("left out: there is no mpirun") == 2
    monkeypatch.setattr(gpu, "mpirun", lambda: "mpirun")
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert run(only="4 ranks, nccl|resnet50 of 64, TF32, PyTorch") == 1
    out = capsys.readouterr().out
    assert "4 ranks, nccl: left out: mpi4py is not installed: pip install 'lbpar[mpi]'" in out
    assert out.count("left out: PyTorch is not installed") == 2
    assert not [
        part.name for part in gpu.parts(3, quick=False, tiny=True) if not part.missing and "PyTorch" in part.name
    ]


def test_versions_say_why_a_library_is_missing_and_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch)
    monkeypatch.setattr(fake_cupy.nccl, "available", False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    found = gpu.versions()["found"]
    assert "engine." not in found and "transport" not in found
    assert "no NCCL (libnccl.so.2 is not there)" in found and "no mpi4py (" in found
    assert "no cuDNN (import of cudnn halted; None in sys.modules)" in found
    assert found.endswith("pip install 'lbpar[mpi,cuda13]', or 'lbpar[mpi,cuda12]', brings NCCL, cuDNN, cuBLAS, mpi4py")


def test_pytorch_that_cannot_be_loaded_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = speeds.torch_network("resnet50", 64, "TF32", tiny=True)
    assert found["left out"] and found["found"].startswith("left out: PyTorch cannot be loaded (")


def test_speeds_stand_beside_those_of_pytorch() -> None:
    rows = [
        {"part": "net of 2, TF32", "samples/s": 30.0},
        {"part": "net of 2, TF32, PyTorch eager", "samples/s": 20.0},
        {"part": "net of 2, TF32, PyTorch compile", "samples/s": 24.0},
        {"part": "net of 9, TF32", "found": "no room", "failed": True},
        {"part": "net of 9, TF32, PyTorch eager", "samples/s": 7.0},
        {"part": "net of 8, half", "samples/s": 8.0},
        {"part": "net of 8, half, autotune", "samples/s": 9.0},
        {"part": "net of 8, half, PyTorch eager", "samples/s": 6.0},
        {"part": "net of 8, half, PyTorch compile", "samples/s": 5.0, "batch": 4},
    ]
    both, alone, tuned, smaller = command._beside(rows)
    assert tuned == {
        "network": "net of 8, half", "lbpar": 8.0, "lbpar, autotune": 9.0, "PyTorch eager": 6.0, "lbpar / best of PyTorch": 1.5,
    }  # fmt: skip
    assert smaller == {"network": "net of 8, half (batch 4)", "PyTorch compile": 5.0}
    assert both == {
        "network": "net of 2, TF32", "lbpar": 30.0, "PyTorch eager": 20.0, "PyTorch compile": 24.0, "lbpar / best of PyTorch": 1.25,
    }  # fmt: skip
    assert alone == {"network": "net of 9, TF32", "PyTorch eager": 7.0}


def fails(what: str) -> str:
    raise RuntimeError(what)


def crashes() -> None:
    os.abort()


def is_wrong() -> dict[str, Any]:
    return {"found": "WRONG", "failed": True, "worst": 3.0}


def is_right() -> str:
    return "ok"


def says_its_process(fifo: str) -> None:
    Path(fifo).write_text(str(os.getpid()))
    hangs()


def two_parts(file: str, fifo: str) -> None:
    """A self-test that ends one part, and hangs in the other."""
    here = "tests.selftest.test_gpu"
    wanted = [Part("first", f"{here}:is_right"), Part("second", f"{here}:says_its_process", {"fifo": fifo}, alone=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "parts", lambda *_: wanted)
        command.main(["--engine", "cupy", "--json", file])


def hangs() -> None:
    import time

    time.sleep(600)
