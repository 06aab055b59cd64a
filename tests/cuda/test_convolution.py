"""The three passes of a convolution by implicit GEMM, on the emulation against the NumPy engine in float64."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lbpar.engine import convolution as oracle
from lbpar.engine.base import LocalWindow, Window
from lbpar.engine.cupy import launch_conv
from lbpar.engine.cupy.launch_conv import Geometry
from lbpar.engine.cupy.tiles import MATHS, TILES, Card, Job
from lbpar.errors import EngineError
from lbpar.layout.interior import rims
from tests.cuda.emulator import EmulationError, compiler_found, sanitized
from tests.cuda.jobs import ARCHITECTURES, DTYPES, SHARED, integers, run

pytestmark = [
    pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler"),
    pytest.mark.timeout(1800),  # compiling takes long on a loaded machine
]
SMALL = ((64, 64, 32),)
CARD = Card(tiles=SMALL, processors=2)
W = LocalWindow
Case = tuple[int, Sequence[int], Sequence[int], Window, int, int, int]
"""Samples, extents of x and of y, window, groups, channels and filters of all groups."""

SHAPES: dict[str, Case] = {
    "same": (2, (7, 9), (7, 9), (W(3, 1, 1, 1), W(3, 1, 1, 1)), 1, 8, 16),
    "strided": (2, (9, 8), (5, 4), (W(3, 2, 1, 1), W(3, 2, 1, 0)), 1, 16, 8),
    "pointwise": (3, (5, 4), (5, 4), (W(1), W(1)), 1, 16, 24),
    "pointwise strided": (1, (9, 7), (5, 4), (W(1, 2), W(1, 2)), 1, 8, 8),
    "odd channels": (1, (6, 7), (6, 5), (W(3, 1, 1, 1), W(3, 1, 1, 0)), 1, 3, 5),
    "3-D": (1, (5, 9, 8), (3, 4, 3), (W(2, 2, 3, 1), W(4, 3, 2, 3), W(1, 3, 1, -1)), 2, 32, 16),
    "1-D": (2, (17,), (6,), (W(4, 3, 1, 1),), 1, 8, 8),
    "ghosts before, crop behind": (1, (8, 9), (3, 11), (W(3, 1, 1, -4), W(5, 1, 2, 6)), 1, 8, 8),
    "taps that no output reads": (1, (4, 4), (2, 2), (W(2, 5, 1, 0), W(3, 4, 4, 2)), 1, 8, 8),
    "depth-wise": (2, (7, 6), (7, 6), (W(3, 1, 1, 1), W(3, 1, 1, 1)), 16, 16, 16),
    "depth-wise, strided": (2, (5, 7, 6), (3, 4, 3), (W(3, 2, 1, 1), W(3, 2, 1, 1), W(2, 2, 2, 1)), 6, 6, 12),
    "few channels per group": (1, (9, 8), (5, 3), (W(4, 2, 4, 1), W(3, 2, 2, 2)), 3, 12, 6),
    "stride over kernel": (2, (10, 11), (3, 4), (W(2, 4), W(1, 3)), 1, 8, 8),
}  # fmt: skip
EMPTY: dict[str, Case] = {
    "no samples": (0, (4, 4), (4, 4), (W(3, 1, 1, 1), W(3, 1, 1, 1)), 1, 8, 8),
    "no input": (1, (0, 4), (3, 4), (W(3, 1, 1, 1), W(3, 1, 1, 1)), 1, 8, 8),
    "no output": (1, (3, 4), (0, 4), (W(3, 1, 1, 1), W(3, 1, 1, 1)), 1, 8, 8),
    "no channels": (1, (3, 4), (3, 4), (W(3, 1, 1, 1), W(3, 1, 1, 1)), 1, 0, 8),
    "no filters": (1, (3, 4), (3, 4), (W(3, 1, 1, 1), W(3, 1, 1, 1)), 1, 8, 0),
    "all outside": (1, (3, 4), (2, 2), (W(3, 1, 1, 9), W(3, 1, 1, -30)), 1, 8, 8),
}  # fmt: skip
PASSES = ("y", "dx", "dw")


class Cases:
    """Jobs of several geometries, their arrays, and what these must hold afterwards."""

    def __init__(self, math: str, card: Card = CARD, seed: int = 0, **options: bool) -> None:
        self.math, self.card, self.options = math, card, options
        self.rng = np.random.default_rng(seed)
        self.jobs: list[tuple[Job, dict[str, np.ndarray]]] = []
        self.pairs: list[tuple[str, np.ndarray, np.ndarray]] = []

    def add(self, name: str, case: Case, passes: Sequence[str] = PASSES) -> Cases:
        samples, inner, outer, win, groups, channels, filters = case
        g = Geometry.of(samples, inner, outer, win, groups, channels, filters)
        kernel = tuple(d.kernel for d in win)
        shapes = {
            "x": (samples, *inner, channels), "w": (filters, *kernel, channels // groups), "b": (filters,),
            "y": (samples, *outer, filters),
        }  # fmt: skip
        shapes |= {"d" + name: shapes[name] for name in "xwy"}
        arrays = {name: integers(self.rng, shape, DTYPES[self.math]) for name, shape in shapes.items()}
        wide = {name: a.astype(float) for name, a in arrays.items()}
        math, add = MATHS[self.math], self.options.get("add", False)
        results = {
            "y": lambda: oracle.forward(wide["x"], wide["w"], wide["b"], win, groups, outer),
            "dx": lambda: oracle.backward_data(wide["dy"], wide["w"], win, groups, inner),
            "dw": lambda: oracle.backward_weights(wide["x"], wide["dy"], win, groups),
        }
        jobs = {
            "y": lambda: launch_conv.conv_forward(math, self.card, g, bias=True, **self.options),
            "dx": lambda: launch_conv.conv_backward_data(math, self.card, g, add=add),
            "dw": lambda: launch_conv.conv_backward_weights(math, self.card, g, add=add),
        }
        for which in passes:
            expected = results[which]() + wide[which] * add
            if which == "y" and self.options.get("relu"):
                expected = np.maximum(expected, 0)
            if not add:
                arrays[which] = np.full_like(arrays[which], np.nan)
            self.jobs.append((jobs[which](), arrays.copy()))
            self.pairs.append((f"{name}, {which}", arrays[which], expected))
        return self

    def check(self, **options: object) -> None:
        run(self.jobs, **options)
        for name, got, expected in self.pairs:
            np.testing.assert_array_equal(got.astype(float), expected, err_msg=f"{self.math}: {name}")


def everything(math: str, **options: bool) -> Cases:
    cases = Cases(math, **options)
    for name, case in (SHAPES | EMPTY).items():
        cases.add(name, case)
    return cases


@pytest.mark.parametrize("math", SHARED)
def test_shapes(math: str) -> None:
    everything(math).check()


@pytest.mark.parametrize("math", [m for m in MATHS if m != "float32"])
def test_types(math: str) -> None:
    """Whole, grouped, and in parts that are added up."""
    cases = Cases(math).add("strided", SHAPES["strided"]).add("depth-wise", SHAPES["depth-wise"])
    cases.check()
    split = Cases(math, Card(tiles=SMALL, processors=40))
    split.add("parts", (2, (9, 8), (5, 4), (W(3, 2, 1, 1), W(3, 2, 1, 0)), 1, 64, 64), ("y",))
    assert len(split.jobs[0][0].launches) == 2
    split.check()


def test_first_tensor_cores() -> None:
    Cases("float16", replace(CARD, architecture=70)).add("strided", SHAPES["strided"]).check(
        defines={"EMULATED_ARCH": 700}
    )


def test_epilogues() -> None:
    Cases("float32", relu=True, add=True).add("same", SHAPES["same"]).add("strided", SHAPES["strided"]).check()


def test_splits() -> None:
    """Long sums are cut into parts, added up in a fixed order."""
    cases = Cases("float32", Card(tiles=SMALL, processors=40), relu=True)
    cases.add("strided", (2, (9, 8), (5, 4), (W(3, 2, 1, 1), W(3, 2, 1, 0)), 1, 64, 64), ("y", "dx"))
    cases.add("groups", (4, (16, 16), (16, 16), (W(1), W(1)), 2, 8, 16), ("dw",))
    assert all(len(job.launches) == 2 for job, _ in cases.jobs)
    cases.check()


def geometry(rng: np.random.Generator) -> Case:
    """Any geometry that an engine may be asked for, small."""
    dims = int(rng.integers(1, 4))
    win = tuple(
        W(int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(-3, 5)))
        for _ in range(dims)
    )
    inner, outer = (
        [int(n) for n in rng.integers(0 if rng.random() < 0.1 else 1, 9 - 2 * dims + 4, dims)] for _ in range(2)
    )
    groups = int(rng.integers(1, 4))
    channels, filters = (groups * int(n) for n in rng.choice([1, 3, 8, 16, 24], 2))
    return int(rng.integers(1, 4)), inner, outer, win, groups, channels, filters


def random_cases(math: str, seed: int, count: int, card: Card = CARD) -> Cases:
    cases, rng = Cases(math, card, seed), np.random.default_rng(seed)
    for i in range(count):
        case = geometry(rng)
        cases.add(f"{i}: {case}", case)
    return cases


def test_random_geometries() -> None:
    random_cases("float32", 1, 40).check()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_many_random_geometries(math: str, seed: int) -> None:
    for arch in ARCHITECTURES[math]:
        card = Card(architecture=arch // 10, processors=10 * seed, tiles=(TILES[seed % 4],))
        random_cases(math, seed, 60, card).check(defines={"EMULATED_ARCH": arch}, order=seed)


@pytest.mark.parametrize("limit", [2500, pytest.param(12000, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_offsets_stay_below_the_limit(limit: int) -> None:
    """32-bit arithmetic only where every offset fits, with a limit that arrays of a few thousand elements reach."""
    cases = Cases("float32", replace(CARD, int_limit=limit))
    for name in ("same", "strided", "3-D", "ghosts before, crop behind", "pointwise", "few channels per group"):
        cases.add(name, SHAPES[name])
    kinds = {
        launch.name.rstrip(">").split(", ")[1]
        for job, _ in cases.jobs
        for launch in job.launches
        if "<float, " in launch.name
    }
    assert kinds == {"i32", "i64"}
    cases.check(defines={"EMULATED_INT_LIMIT": limit})


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("limit", [1500, 6000])
def test_offsets_of_random_geometries_stay_below_the_limit(limit: int) -> None:
    cases = random_cases("float32", 21, 40, replace(CARD, int_limit=limit))
    cases.check(defines={"EMULATED_INT_LIMIT": limit})


def test_a_wrong_choice_of_index_is_found() -> None:
    cases = Cases("float32").add("same", SHAPES["same"], ("y",))
    with pytest.raises(EmulationError, match="32-bit arithmetic"):
        cases.check(defines={"EMULATED_INT_LIMIT": 900})


def test_beyond_two_to_the_31_elements() -> None:
    """The far end of an array of 2³¹ elements, of which only that end is ever touched."""
    far = 2**31
    x = np.zeros((1, far + 40, 1), np.float16)
    x[0, far:, 0] = np.arange(40) % 7
    w = np.ones((1, 3, 1), np.float16)
    g = Geometry.of(1, (far + 40,), (38,), (W(3, 1, 1, -far),), 1, 1, 1)
    y = np.full((1, 38, 1), np.nan, np.float16)
    run([(launch_conv.conv_forward(MATHS["float16"], CARD, g), {"x": x, "w": w, "y": y})])
    near = (np.arange(40) % 7).astype(float)
    np.testing.assert_array_equal(y[0, :, 0].astype(float), near[:-2] + near[1:-1] + near[2:])


RIMS: dict[str, tuple[Case, list[tuple[int, int]]]] = {
    "2-D": ((2, (12, 11), (12, 9), (W(3, 1, 1, 1), W(3, 1, 1, 0)), 1, 8, 16), [(1, 1), (0, 1)]),
    "3-D": ((1, (9, 12, 8), (4, 6, 6), (W(3, 2, 1, 1), W(3, 2, 1, 1), W(3, 1, 1, 0)), 2, 16, 16), [(1, 0), (2, 1), (1, 1)]),
    "only rims": ((1, (4, 5), (4, 5), (W(3, 1, 1, 1), W(3, 1, 1, 1)), 1, 8, 8), [(2, 2), (0, 0)]),
    "depth-wise": ((1, (8, 9), (8, 9), (W(3, 1, 1, 1), W(3, 1, 1, 1)), 8, 8, 8), [(1, 1), (1, 1)]),
}  # fmt: skip


def _alone(first: int, last: int, d: W, n: int, outputs: int) -> tuple[int, int]:
    """The outputs that read nothing of x before ``first`` or from ``last`` on, where there is something."""
    reads = [{o * d.stride - d.pad + k * d.dilation for k in range(d.kernel)} & set(range(n)) for o in range(outputs)]
    found = [o for o, r in enumerate(reads) if min(r) >= first and max(r) < last]
    return (found[0], found[-1] + 1) if found else (0, 0)


def check_rims(name: str, math: str, **options: object) -> None:
    """The interior, computed while the ghosts are still missing, and the rims make the bits of one launch."""
    (samples, inner, outer, win, groups, channels, filters), ghosts = RIMS[name]
    rng, dtype = np.random.default_rng(5), DTYPES[math]
    g = Geometry.of(samples, inner, outer, win, groups, channels, filters)
    shapes = {
        "x": (samples, *inner, channels),
        "w": (filters, *(d.kernel for d in win), channels // groups),
        "b": (filters,),
    }
    whole = {key: rng.standard_normal(shape).astype(dtype) for key, shape in shapes.items()}
    whole["y"] = np.full((samples, *outer, filters), np.nan, dtype)
    held = (slice(None), *(slice(before, n - after) for (before, after), n in zip(ghosts, inner, strict=True)))
    early = {**whole, "x": np.full_like(whole["x"], np.nan), "y": whole["y"].copy()}
    early["x"][held] = whole["x"][held]
    sides = zip(ghosts, win, inner, outer, strict=True)
    interior = [_alone(before, n - after, d, n, o) for (before, after), d, n, o in sides]
    boxes = rims(interior, [(0, n) for n in outer])
    epilogue = {"bias": True, "relu": True}
    first = launch_conv.conv_forward(MATHS[math], CARD, g, box=interior, **epilogue)
    second = launch_conv.conv_rims(MATHS[math], CARD, g, boxes, **epilogue)
    run([(launch_conv.conv_forward(MATHS[math], CARD, g, **epilogue), whole), (first, early)], **options)
    assert np.isnan(early["y"].astype(float)).any() and len(second.launches) == 1
    run([(second, {**early, "x": whole["x"]})], **options)
    np.testing.assert_array_equal(early["y"].view(np.uint8), whole["y"].view(np.uint8))


@pytest.mark.parametrize("name", RIMS)
def test_interior_and_rims(name: str) -> None:
    check_rims(name, "float32")


@pytest.mark.parametrize("math", [m for m in MATHS if m != "float32"])
def test_rims_of_other_types(math: str) -> None:
    check_rims("3-D", math)
    check_rims("depth-wise", math)


def check_boxes_of_dx(math: str, **options: object) -> None:
    """Boxes that start anywhere, also in the midst of a stride, make up what one launch gives, one by one and all in one launch."""
    inner, outer, win = (9, 8, 7), (5, 8, 3), (W(3, 2, 1, 1), W(3, 1, 1, 1), W(2, 3, 2, 1))
    boxes: list[list[tuple[int, int]]] = [
        [(0, 3), (0, 8), (0, 7)], [(3, 9), (0, 8), (0, 2)], [(3, 4), (0, 5), (2, 7)], [(4, 9), (0, 5), (2, 7)],
        [(3, 9), (5, 8), (2, 7)], [(4, 4), (0, 8), (0, 7)],
    ]  # fmt: skip
    rng = np.random.default_rng(6)
    for groups in (1, 2, 8):
        g = Geometry.of(2, inner, outer, win, groups, 8, 8)
        shapes = (2, *outer, 8), (8, 3, 3, 2, 8 // groups)
        dy, w = (rng.standard_normal(shape).astype(DTYPES[math]) for shape in shapes)
        got, want, together = (np.full((2, *inner, 8), np.nan, DTYPES[math]) for _ in range(3))
        arrays = {"dy": dy, "w": w, "dx": got}
        jobs = [(launch_conv.conv_backward_data(MATHS[math], CARD, g, box=box), arrays) for box in boxes]
        run([*jobs[:-2], *jobs[-1:]], **options)
        left = np.isnan(got.astype(float))
        assert left.sum() == left[:, 3:, 5:, 2:].sum() == 2 * 6 * 3 * 5 * 8
        run([jobs[-2], (launch_conv.conv_backward_data(MATHS[math], CARD, g), {**arrays, "dx": want})], **options)
        rims_alone = launch_conv.conv_data_rims(MATHS[math], CARD, g, [*boxes[:-2], boxes[-1]])
        all_of_it = launch_conv.conv_data_rims(MATHS[math], CARD, g, boxes)
        assert len(rims_alone.launches) == len(all_of_it.launches) == 1
        run([(rims_alone, {**arrays, "dx": together})], **options)
        np.testing.assert_array_equal(np.isnan(together.astype(float)), left)
        run([(all_of_it, {**arrays, "dx": together})], **options)
        for parts in (got, together):
            np.testing.assert_array_equal(parts.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("math", MATHS)
def test_boxes_of_the_gradient_for_the_input(math: str) -> None:
    check_boxes_of_dx(math)


def test_too_many_phases() -> None:
    g = Geometry.of(1, (300, 300), (1, 1), (W(3, 300), W(3, 300)), 1, 8, 8)
    with pytest.raises(EngineError, match=r"strides \[1, 300, 300\] make 90000 phases"):
        launch_conv.conv_backward_data(MATHS["float32"], CARD, g)


FAULTS = {
    "dilation": (
        "y",
        "static_cast<Index>(a.dilation), static_cast<Index>(a.source), 0, 1",
        "1, static_cast<Index>(a.source), 0, 1",
    ),
    "bounds": ("y", "static_cast<u32>(i) < static_cast<u32>(extent)", "i < extent"),
    "phase": ("dx", "axis[d].target_mul * p[d] + axis[d].target_add", "axis[d].target_mul * p[d]"),
    "spacing": ("dx", "Index(0), -static_cast<Index>(a.reach)", "Index(0), -1"),
    "rim": ("rims", "static_cast<Index>(origin * a.stride - a.pad)", "static_cast<Index>(origin - a.pad)"),
    "rim of dx": ("boxes", "rim.origin[d], rim.extent[d]", "a.origin, rim.extent[d]"),
    "box of a block": ("boxes", "z.rims[r + 1].first_block <= block", "z.rims[r + 1].first_block < block"),
    "group": ("dw", "first = group * z.columns * columns", "first = group * columns"),
}


@pytest.mark.parametrize(
    "fault",
    [
        name
        if name in ("phase", "rim", "rim of dx", "box of a block")
        else pytest.param(name, marks=[pytest.mark.slow, pytest.mark.exhaustive])
        for name in FAULTS
    ],
)
def test_faults_are_found(fault: str) -> None:
    which, old, new = FAULTS[fault]
    case = (2, (9, 8), (5, 3), (W(4, 2, 4, 1), W(3, 2, 2, 2)), 2, 16, 16)
    with pytest.raises((AssertionError, EmulationError)):
        if which == "rims":
            check_rims("3-D", "float32", replace={old: new})
        elif which == "boxes":
            check_boxes_of_dx("float64", replace={old: new})
        else:
            Cases("float32").add(fault, case, (which,)).check(replace={old: new})


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["fixed[f] = from.fixed(mn);", "fixed[f] = from.fixed(mn < last ? mn : last + 1);"])
def test_reads_outside_are_found(fault: str) -> None:
    right = "fixed[f] = from.fixed(mn < last ? mn : last);"
    code = (
        "from tests.cuda.test_convolution import Cases, W; case = (1, (5, 5), (5, 5), (W(3, 1, 1, 1),) * 2, 1, 8, 12);"
        f"Cases('float32').add('', case).check(replace={{{right!r}: {fault!r}}})"
    )
    done = sanitized([sys.executable, "-c", code])
    assert done.returncode and "heap-buffer-overflow" in done.stderr, done.stderr
