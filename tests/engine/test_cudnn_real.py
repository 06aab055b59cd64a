"""Our graphs before cuDNN itself, which plans for a described device and needs none; and that the stand-in for it says what it says.

Skipped where nvidia-cudnn-frontend or libcudnn is missing: both are wheels that a machine without a GPU can install.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lbpar.engine.base import LocalWindow
from lbpar.engine.cupy.graphs import Graphs
from lbpar.engine.cupy.launch_conv import Geometry
from tests.util import fake_cudnn, planning_driver

cudnn = pytest.importorskip("cudnn")
try:
    VERSION = cudnn.backend_version()
except RuntimeError as error:
    pytest.skip(f"no libcudnn ({error})", allow_module_level=True)
if VERSION < 91600:
    pytest.skip(f"cuDNN {VERSION} plans for no described device, or not in three dimensions", allow_module_level=True)

_USUAL = {
    "cudaDeviceId": 0, "driverVer": 13000, "isTccDriver": 0, "maxRegistersPerSM": 65536, "maxSharedMemoryPerBlock": 49152,
    "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "maxCtasPerSM": 32, "pciDeviceId": 0, "regsPerBlock": 65536,
    "reservedSharedMemoryPerBlock": 1024, "supportCoopLaunch": 1, "totalGlobalMem": 85028765696, "warpSize": 32,
    "maxBlockSize": [1024, 1024, 64], "maxGridSize": [2147483647, 65535, 65535],
}  # fmt: skip
CARDS = {
    "A100": {
        "deviceName": "NVIDIA A100-SXM4-80GB", "deviceVer": 800, "multiProcessorCount": 108, "maxSharedMemoryPerBlockOptin": 166912,
        "l2CacheSize": 41943040, "smClockRateKHz": 1410000, "memClockRateKHz": 1593000,
    },
    "H100": {
        "deviceName": "NVIDIA H100 80GB HBM3", "deviceVer": 900, "multiProcessorCount": 132, "maxSharedMemoryPerBlockOptin": 232448,
        "l2CacheSize": 52428800, "smClockRateKHz": 1980000, "memClockRateKHz": 2619000,
    },
}  # fmt: skip
KINDS = {"float32": ("float32", False), "TF32": ("float32", True), "float16": ("float16", False), "bfloat16": ("bfloat16", False)}  # fmt: skip
PASSES = ("forward", "data", "weights")


def graphs(card: str = "H100", tf32: bool = False, **others: Any) -> Graphs:
    properties = cudnn.create_device_properties(json.dumps({**_USUAL, **CARDS[card]}))
    engine: Any = None
    return Graphs(engine, cudnn, tf32, properties=properties, **{"autotune": False, "workspace": 256 << 20, **others})


def of(c: int, f: int, inner: Any, outer: Any, *win: LocalWindow, groups: int = 1) -> Geometry:
    return Geometry.of(4, inner, outer, win, groups, c, f)


W = LocalWindow
GEOMETRIES = {
    "3x3": of(64, 128, (28, 30), (28, 30), W(3, 1, 1, 1), W(3, 1, 1, 1)),
    "1x1 stride 2": of(64, 128, (28, 28), (14, 14), W(1, 2), W(1, 2)),
    "7x7 stride 2": of(8, 64, (64, 64), (32, 32), W(7, 2, 1, 3), W(7, 2, 1, 3)),
    "halo before": of(32, 32, (17, 16), (16, 16), W(3, 1, 1, 0), W(3, 1, 1, 1)),
    "halo behind": of(32, 32, (17, 16), (16, 16), W(3, 1, 1, 1), W(3, 1, 1, 1)),
    "dilated": of(32, 64, (20, 20), (20, 20), W(3, 1, 2, 2), W(3, 1, 3, 3)),
    "groups": of(64, 64, (14, 14), (14, 14), W(3, 1, 1, 1), W(3, 1, 1, 1), groups=8),
    "3-D": of(16, 32, (16, 17, 18), (16, 17, 18), *(W(3, 1, 1, 1),) * 3),
    "3-D stride 2": of(16, 32, (16, 16, 16), (8, 8, 8), *(W(3, 2, 1, 1),) * 3),
    "1-D": of(32, 64, (100,), (50,), W(5, 2, 1, 2)),
}


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("kind", KINDS)
def test_cudnn_has_plans_for_our_graphs(card: str, kind: str) -> None:
    dtype, tf32 = KINDS[kind]
    made = graphs(card, tf32)
    refused = [
        (what, name)
        for what in PASSES
        for name, g in GEOMETRIES.items()
        if not made.unsuited(g, dtype) and made.plan(what, g, dtype) is None
    ]
    assert not refused
    assert all(made.plan(what, GEOMETRIES["3x3"], dtype).choice[1] <= 256 << 20 for what in PASSES)  # type: ignore[union-attr,index]
    for name in ("3x3", "3-D"):
        assert made.plan("forward", GEOMETRIES[name], dtype, bias=True) is not None
        assert made.plan("forward", GEOMETRIES[name], dtype, bias=True, relu=True) is not None
        assert made.plan("forward", GEOMETRIES[name], dtype, relu=True) is None  # as the stand-in says


def test_exact_float32_takes_other_plans_than_tf32() -> None:
    names = []
    for tf32 in (False, True):
        plan: Any = graphs(tf32=tf32).plan("forward", GEOMETRIES["3x3"], "float32")
        names.append(plan.graph.get_plan_name_at_index(plan.choice[0]))
    assert names[0] != names[1]


def test_a_smaller_workspace_gives_another_plan() -> None:
    large: Any = graphs().plan("forward", GEOMETRIES["3x3"], "float32")
    small: Any = graphs(workspace=1024).plan("forward", GEOMETRIES["3x3"], "float32")
    assert small.choice[1] <= 1024 < large.choice[1]


def test_timing_has_several_plans_to_try() -> None:
    plan: Any = graphs(autotune=True).plan("forward", GEOMETRIES["3x3"], "bfloat16")
    assert plan.choice == plan.candidates[0] and len(plan.candidates) == 17 and plan.candidates[-1] == (-1, 0)


def test_negative_pads_are_refused_as_by_the_stand_in() -> None:
    made, g = graphs(), of(32, 32, (16, 16), (12, 14), W(3, 1, 1, 0), W(3, 1, 1, 0))
    assert "negative" in made.unsuited(g, "float16")
    key = ("forward", g, "float16", False, False)
    assert made._planned(key, "float16", lambda: made._graph(*key), 1) is None


NORMS = {
    "2-D": (4, 28, 30, 64),
    "3-D": (2, 9, 10, 11, 16),
    "1-D": (3, 50, 8),
    "rows": (32, 24),
    "few": (2, 3, 3, 4),
    "odd": (4, 9, 9, 30),
}

SAMPLE_NORMS = {
    "instance": (2, 1000, 32, 1),
    "odd": (3, 77, 5, 1),
    "layer": (500, 1, 1, 96),
    "odd layer": (7, 1, 1, 30),
}
"""Rows, positions, groups, channels of a group."""


def plan_norms(folder: str) -> None:
    """Print the norms that have plans: card, type, name, whether a sum and a ReLU follow."""
    found = importlib.util.find_spec("nvidia.cudnn")
    assert found is not None and found.submodule_search_locations
    (home,) = found.submodule_search_locations
    planning_driver.load(Path(home) / "lib" / "libcudnn_engines_runtime_compiled.so.9", Path(folder))
    for card, kind, (name, shape), how in product(
        CARDS, KINDS, NORMS.items(), ((False, False), (False, True), (True, True), (True, False))
    ):
        dtype, tf32 = KINDS[kind]
        if graphs(card, tf32).norm_plan(shape, dtype, *how):
            print(card, kind, name, *how)
    for card, kind, (name, form) in product(CARDS, KINDS, SAMPLE_NORMS.items()):
        dtype, tf32 = KINDS[kind]
        if graphs(card, tf32).sample_norm_plan(form, dtype):
            print(card, kind, name)


def test_cudnn_has_plans_for_our_norms(tmp_path: Path) -> None:
    """In a process of its own, which takes a pretended driver for real. A sum without a ReLU is refused, as by the stand-in."""
    code = f"from tests.engine.test_cudnn_real import plan_norms; plan_norms({str(tmp_path)!r})"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    found, wanted = set(printed.splitlines()), set[str]()
    for card, kind, name in product(CARDS, KINDS, NORMS):
        if NORMS[name][-1] % (4 if KINDS[kind][0] == "float32" else 8) == 0:
            wanted |= {f"{card} {kind} {name} {how}" for how in ("False False", "False True", "True True")}
    assert found == wanted | {f"{card} {kind} {name}" for card, kind, name in product(CARDS, KINDS, SAMPLE_NORMS)}


def test_the_stand_in_has_only_what_is_there() -> None:
    """Building graphs is tried above; what needs a device is looked at."""
    for name in (n for n in vars(fake_cudnn.pygraph) if not n.startswith("_")):
        assert callable(getattr(cudnn.pygraph, name))
    ours, theirs = (
        list(inspect.signature(m.pygraph.execute_plan_at_index).parameters)[2:5] for m in (fake_cudnn, cudnn)
    )
    assert ours == theirs == ["workspace", "index", "handle"]


@pytest.mark.parametrize(
    "name", ["data_type", "numerical_note", "heur_mode", "norm_forward_phase", "build_plan_policy"]
)
def test_the_stand_in_has_the_names_of_choices(name: str) -> None:
    for choice in getattr(fake_cudnn, name):
        assert hasattr(getattr(cudnn, name), choice.name)


def test_the_stand_in_has_the_other_names() -> None:
    for name in ("create_handle", "set_stream", "backend_version", "cudnnGraphNotSupportedError", "pygraph", "tensor"):
        assert hasattr(cudnn, name)
    assert not issubclass(cudnn.cudnnGraphNotSupportedError, RuntimeError)
