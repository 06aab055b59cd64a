"""The self-test of a GPU launches every kernel of the engine: whatever is added must be reached by its checks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from lbpar.engine.cupy.graphs import Graphs
from lbpar.engine.cupy.names import GROUPS
from lbpar.engine.cupy.plans import Choice, Plan
from lbpar.engine.cupy.tiles import Card
from lbpar.selftest import checks, command, gpu, speeds
from lbpar.selftest.listing import Listing
from tests.cuda.emulator import compiler_found
from tests.cuda.test_whole import kind_of, tiled
from tests.util import fake_cudnn, fake_cupy

NEVER = {
    r"pack.cu: move_(pieces|rows)<u8, .*": "no step moves arrays of single bytes",
    r"pack.cu: add_pieces<.*, 24>": "what arrives is added one piece at a time",
    r"pack.cu: add_rows<.*": "what is added in a step are whole blocks, no rows that are listed",
    r"pointwise.cu: axpy<(__half|__nv_bfloat16)>": "what is weighed are gradients of weights, which are float32",
    r"pointwise.cu: convert<(__half, __nv_bfloat16|__nv_bfloat16, __half)>": "no engine holds both half types",
    r"pointwise.cu: convert<((__half|__nv_bfloat16), double|double, (__half|__nv_bfloat16|float))>":
        "arrays of float64 beside others are sums, which are made as such and read as such",
    r"norm.cu: norm_found": "of these checks, which leave cuDNN out; see below",
    r"updates.cu: unscale<double, double>": "gradients in float64 are not scaled",
}  # fmt: skip
"""Kernels that no check launches, and why: tests call them directly."""


@pytest.mark.slow
def test_its_checks_launch_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Listing] = []

    def listing(name: str, dtype: str, tf32: bool = False, cudnn: object = "auto") -> Listing:
        half = dtype in ("bfloat16", "float16")
        engines.append(Listing([Card()], "float32" if half else dtype, tf32, dtype if half else None))
        return engines[-1]

    monkeypatch.setattr(checks, "get_engine", listing)
    found: list[dict[str, Any]] = []
    plans = command.parser().parse_args([]).plans
    with np.errstate(all="ignore"):  # arrays hold anything
        for part in gpu.parts(plans, quick=True):
            engine = part.arguments.get("engine", {})
            if part.call.endswith("checks:network") and (engine["dtype"] == "float64" or engine.get("cudnn") is False):
                found.append(checks.network(**part.arguments))
    assert len(found) == len(engines) > 30
    ran = {kernel for engine in engines for launched in engine.launched for kernel in launched}
    missing = {f"{f}: {n}" for f, groups in GROUPS.items() for group in groups for n in group if (f, n) not in ran}
    known = {name for name in missing if any(re.fullmatch(pattern, name) for pattern in NEVER)}
    assert not missing - known, "no check launches\n" + "\n".join(sorted(missing - known))
    launched_after_all = [pattern for pattern in NEVER if not any(re.fullmatch(pattern, name) for name in known)]
    assert not launched_after_all
    left = tiled() - {kind_of(file, name) for file, name in ran}
    assert not left


@pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
def test_its_checks_try_every_kind_of_norm_by_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: dict[str, set[tuple[bool, bool]]] = {"float32": set(), "bfloat16": set()}
    norm = Graphs.norm

    def tried(self: Graphs, key: Any, arrays: Any, eps: float, ours: Any) -> bool:
        _, dtype, residual, relu = key
        kinds[dtype].add((residual, relu))
        return norm(self, key, arrays, eps, ours)

    monkeypatch.setattr(Graphs, "norm", tried)
    monkeypatch.setattr(fake_cudnn, "executed", [])
    fake_cupy.few_kernels(monkeypatch, 4)
    fake_cupy.install(monkeypatch, cudnn=fake_cudnn)
    for name in ("small blocks", "vectors", "voxels"):
        for dtype in kinds:
            assert not checks.network(name, {"dtype": dtype}, 1)["failed"]
    assert kinds == {dtype: {(False, False), (False, True), (True, True)} for dtype in kinds}
    assert {"batchnorm", "instancenorm", "layernorm"} <= {name for name, _ in fake_cudnn.executed}


@pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
def test_one_check_runs_the_plans_that_autotune_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    (part,) = (part for part in gpu.parts(1, quick=True) if part.name == "small blocks, bfloat16, autotune")
    execute, wrong = Graphs._execute, False

    def timed(self: Graphs, plan: Plan, *_: Any) -> dict[Choice, float]:
        tried.append(plan)
        return {choice: float(i == 0) for i, choice in enumerate(plan.candidates[:2])}  # not the one that ran so far

    def executed(self: Graphs, plan: Plan, choice: Choice, *arguments: Any) -> bool:
        assert choice in plan.candidates[:2]
        if choice != plan.candidates[0]:
            chosen.append(plan)
        return True if wrong and choice != plan.candidates[0] else execute(self, plan, choice, *arguments)

    monkeypatch.setattr(Graphs, "_timed", timed)
    monkeypatch.setattr(Graphs, "_execute", executed)
    fake_cupy.few_kernels(monkeypatch, 4)
    for wrong in (False, True):  # which the function above reads
        fake_cupy.install(monkeypatch, cudnn=fake_cudnn)
        tried, chosen = list[Plan](), list[Plan]()
        assert checks.network(**part.arguments)["failed"] == wrong
        assert chosen if wrong else {id(plan) for plan in tried} == {id(plan) for plan in chosen}


def test_without_cudnn_there_is_nothing_that_autotune_could_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch)
    tuned = [part for part in gpu.parts(1, quick=False, tiny=True) if part.name.endswith(", autotune")]
    assert [part.name.partition(" of ")[0] for part in tuned] == [
        "small blocks, bfloat16, autotune",
        "resnet50",
        "unet3d",
    ]
    for part, call in zip(tuned, (checks.network, speeds.network, speeds.network), strict=True):
        found = call(**part.arguments)
        assert found == {"found": f"left out: {speeds.NO_PLANS}", "left out": True}
