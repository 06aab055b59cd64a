"""A GPU that is small, or full of other programs' arrays, fails nothing: fewer samples are tried, or the part is left out."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from lbpar.errors import EngineError
from lbpar.selftest import checks, parts, room, speeds
from lbpar.selftest.parts import Part
from tests.cuda.emulator import compiler_found
from tests.util import fake_cupy

HERE = "tests.selftest.test_room"


class OutOfMemoryError(RuntimeError):
    """As PyTorch's, which is no MemoryError."""


ERRORS = [
    MemoryError(),
    OutOfMemoryError("tried to allocate 20.00 MiB"),
    RuntimeError("cudaErrorMemoryAllocation: out of memory"),
    RuntimeError("CUDA_ERROR_OUT_OF_MEMORY"),
    RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_errors_of_every_library_that_lacks_memory(error: Exception) -> None:
    wrapped = EngineError("engine: a step failed")
    wrapped.__cause__ = error
    assert room.no_room(error) and room.no_room(wrapped)


def test_other_errors() -> None:
    assert not room.no_room(ValueError("memory")) and not room.no_room(EngineError("an illegal memory access"))


def test_half_as_many_samples_are_tried_until_they_fit() -> None:
    tried = list[int]()

    def run(batch: int) -> dict[str, Any]:
        tried.append(batch)
        if batch > 64:
            raise OutOfMemoryError
        return {"found": "fast", "samples/s": 1.0}

    assert room.fitting(32, run) == {"found": "fast", "samples/s": 1.0}
    assert room.fitting(256, run) == {"found": "fast; batch 64, since 256 did not fit", "samples/s": 1.0, "batch": 64}
    assert tried == [32, 256, 128, 64]


def test_what_fails_otherwise_or_does_not_fit_at_all_is_tried_no_further() -> None:
    for error, asked in ((ValueError("a bug"), 8), (MemoryError("none"), 1)):
        with pytest.raises(type(error)):
            room.fitting(asked, lambda batch, error=error: raised(error))


@pytest.mark.slow
@pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
def test_a_small_card_takes_a_smaller_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first try held has been given back."""
    fake_cupy.few_kernels(monkeypatch, 8)
    monkeypatch.setattr(speeds, "MOST", 2)
    monkeypatch.setattr(speeds, "WARM", 1)

    def steps(batch: int) -> dict[str, Any]:
        return speeds._network("unet3d", batch, {"dtype": "float32"}, tiny=True)

    needs = []
    for batch in (8, 16):
        fake_cupy.install(monkeypatch)
        needs.append(steps(batch)["memory"])
    fake_cupy.install(monkeypatch).memory = sum(needs) // 2
    found = room.fitting(32, steps)
    assert found["batch"] == 8 and found["found"].endswith("batch 8, since 32 did not fit")


def test_pytorch_takes_a_smaller_batch_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def small(batch: int, *others: Any) -> dict[str, Any]:
        if batch > 1:
            raise torch.OutOfMemoryError
        return {"found": "fast"}

    monkeypatch.setattr(speeds, "_speed", small)
    assert speeds.torch_network("unet3d", 2, "TF32", tiny=True)["batch"] == 1


@pytest.mark.parametrize("alone", [True, False])
def test_parts_without_memory_are_left_out_unless_small_networks_want_too_much(
    monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """Here no GPU is full."""
    monkeypatch.setattr(parts, "PYTHON", (sys.executable, "-m"))
    part = Part("a part", f"{HERE}:wants_memory", {"said": "so much\nin two lines"}, alone=alone)
    (row,) = parts.run([part], 60.0, 1, lambda row: None)
    assert row["failed"] != alone and row.get("left out", False) == alone
    assert row["found"] == ("left out: so much" if alone else "MemoryError: so much\nin two lines")


def test_a_full_card_is_crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = fake_cupy.install(monkeypatch)
    machine.memory = room.LITTLE
    assert not room.crowded()
    machine.memory -= 1
    assert room.crowded()


@pytest.mark.parametrize(
    "said", ["lbpar: error: rank 1: cudaErrorMemoryAllocation: out of memory", "lbpar: error: a bug"]
)
def test_ranks_beside_which_no_memory_is_free_are_left_out(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    fake_cupy.install(monkeypatch).memory = 1 << 20
    monkeypatch.setattr(checks.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", said))
    assert checks.ranks(2, "host") == (
        {"found": said, "failed": True} if "bug" in said else room.left_out("the GPU has too little memory for them")
    )


def wants_memory(said: str) -> None:
    raised(MemoryError(said))


def raised(error: Exception) -> dict[str, Any]:
    raise error
