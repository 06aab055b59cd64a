"""The tiled matrix product: all element types, transpositions, epilogues and splits, on the emulation against NumPy."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from lbpar.engine.cupy.launch_gemm import Operand, gemm, linear_forward
from lbpar.engine.cupy.tiles import MATHS, TILES, Card, choose, divisor
from tests.cuda import nvrtc
from tests.cuda.emulator import EmulationError, compiler_found
from tests.cuda.jobs import ARCHITECTURES, DTYPES, integers, run
from tests.cuda.resources import usual

pytestmark = [
    pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler"),
    pytest.mark.timeout(1800),  # compiling takes long on a loaded machine
]
SMALL = ((64, 64, 32),)
ALL = [(math, arch) for math, archs in ARCHITECTURES.items() for arch in archs]


def cases_of(math: str, card: Card, sizes: list[tuple[int, int, int]], flags: list[tuple[bool, bool]], **options):
    """Jobs with their arrays, where the results will be, and what they must be."""
    rng = np.random.default_rng(7)
    cases, pairs = [], []
    batch, dtype = options.pop("batch", 1), DTYPES[math]
    for (m, n, k), (a_along, b_along) in product(sizes, flags):
        a, b, c = (
            integers(rng, (batch, m, k), dtype),
            integers(rng, (batch, n, k), dtype),
            integers(rng, (batch, m, n), dtype),
        )
        bias = integers(rng, (n,), dtype)
        expected = options.get("alpha", 1.0) * np.matmul(a.astype(float), b.astype(float).transpose(0, 2, 1))
        if options.get("bias"):
            expected = expected + bias.astype(float)
        if beta := options.get("beta", 0.0):
            expected = expected + beta * c.astype(float)
        else:
            c[...] = np.nan
        if options.get("relu"):
            expected = np.maximum(expected, 0)
        left = np.ascontiguousarray(a if a_along else a.transpose(0, 2, 1))
        right = np.ascontiguousarray(b if b_along else b.transpose(0, 2, 1))
        operands = [Operand(*o) for o in (("a", a_along, left.shape[2], m * k), ("b", b_along, right.shape[2], n * k))]
        job = gemm(MATHS[math], card, m, n, k, *operands, "c", batch=batch, **options)
        cases.append((job, {"a": left, "b": right, "c": c, "bias": bias}))
        pairs.append((c, expected.astype(dtype)))
    return cases, pairs


def check(cases, pairs, **options) -> None:
    run(cases, **options)
    for got, expected in pairs:
        np.testing.assert_array_equal(got.astype(float), expected.astype(float))


EVERY = list(product([True, False], repeat=2))
LINEAR = [(True, True), (True, False), (False, False)]


@pytest.mark.parametrize(("math", "arch"), [("float16", 800), ("float32", 800)])
def test_transpositions(math: str, arch: int) -> None:
    check(
        *cases_of(math, Card(arch // 10, tiles=SMALL), [(72, 80, 48), (8, 64, 136)], LINEAR),
        defines={"EMULATED_ARCH": arch},
    )


@pytest.mark.parametrize(("math", "arch"), [pair for pair in ALL if pair not in [("float16", 800), ("float32", 800)]])
def test_types(math: str, arch: int) -> None:
    check(
        *cases_of(math, Card(arch // 10, tiles=SMALL), [(72, 80, 48)], [(True, False)]), defines={"EMULATED_ARCH": arch}
    )


@pytest.mark.parametrize("math", ["float16"])
def test_odd_sizes(math: str) -> None:
    """Scalar copies, tails in every direction, an empty sum; nothing to do where the result is empty."""
    card = Card(tiles=SMALL)
    check(*cases_of(math, card, [(67, 71, 45), (1, 1, 1), (3, 129, 33)], [(True, False)]))
    check(*cases_of(math, card, [(5, 3, 0)], [(True, True)], bias="bias"))
    assert gemm(MATHS[math], card, 0, 4, 4, Operand("a", True, 4), Operand("b", True, 4), "c").launches == ()


def test_epilogue_and_batch() -> None:
    card = Card(tiles=SMALL)
    options = {"bias": "bias", "relu": True, "alpha": 2.0, "beta": -3.0}
    check(*cases_of("float32", card, [(33, 36, 20), (7, 9, 5)], [(True, True)], batch=3, **options))


def test_split_sums_in_a_fixed_order() -> None:
    """Parts of a long sum go through the workspace, with the same epilogue; twice the same bits."""
    card = Card(processors=64, tiles=SMALL)
    options = {"bias": "bias", "relu": True, "beta": 1.0}
    cases, pairs = cases_of("float32", card, [(17, 24, 1000)], [(False, False)], batch=2, **options)
    assert len(cases[0][0].launches) == 2
    check(cases, pairs)
    rng = np.random.default_rng(3)
    arrays = {name: rng.standard_normal(a.shape).astype(a.dtype) for name, a in cases[0][1].items()}
    results = [{**arrays, "c": arrays["c"].copy()} for _ in range(2)]
    for order, result in enumerate(results):
        run([(cases[0][0], result)], order=order)
    np.testing.assert_array_equal(results[0]["c"], results[1]["c"])


def test_addresses_of_any_alignment() -> None:
    """Arrays that begin at an odd element are copied by elements; halves of 16 bytes by halves."""
    rng = np.random.default_rng(1)
    for alignment, pieces in ((2, "1, 1"), (8, "4, 4")):
        skip = alignment // 2
        a, b = (integers(rng, (skip + 64 * 32,), np.float16)[skip:].reshape(64, 32) for _ in range(2))
        c = np.full(skip + 64 * 64, np.nan, np.float16)[skip:].reshape(64, 64)
        job = linear_forward(MATHS["float16"], Card(tiles=SMALL, alignment=alignment), 64, 32, 64)
        assert job.launches[0].name.endswith(f"{pieces}>")
        run([(job, {"x": a, "w": b, "y": c})])
        np.testing.assert_array_equal(c.astype(float), a.astype(float) @ b.astype(float).T)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
def test_usual_launches_fit(architecture: str) -> None:
    """Within what any card of the architecture gives a block, more than 48 KiB only where copies are asynchronous."""
    most = 48 << 10 if architecture == "sm_70" else 96 << 10
    kernels = usual(architecture)
    assert {"gemm.cu", "convolution.cu", "grouped.cu", "rims.cu"} == set(kernels)
    assert all(shared <= most for names in kernels.values() for shared in names.values())


def test_tf32_rounds_and_float32_does_not() -> None:
    x = np.full((64, 64), 1 + 2.0**-12, np.float32)
    eye = np.eye(64, dtype=np.float32)
    for math, expected in (("tf32", 1.0), ("float32", 1 + 2.0**-12)):
        y = np.full_like(x, np.nan)
        job = gemm(MATHS[math], Card(tiles=SMALL), 64, 64, 64, Operand("x", True, 64), Operand("w", True, 64), "y")
        run([(job, {"x": x, "w": eye, "y": y})])
        np.testing.assert_array_equal(y, np.float32(expected))


def test_nan_stays_through_relu() -> None:
    x, w = np.array([[np.nan]], np.float32), np.ones((1, 1), np.float32)
    y = np.zeros((1, 1), np.float32)
    run(
        [
            (
                linear_forward(MATHS["float32"], Card(tiles=SMALL), 1, 1, 1, relu=True),
                {"x": x, "w": w, "y": y},
            )
        ]
    )
    assert np.isnan(y[0, 0])


FAULTS = {
    "fragment": ("(lane & 15) * pitch + (lane >> 4) * 8);\n        else load_matrices<true>(a", "(lane & 15) * pitch);\n        else load_matrices<true>(a"),
    "barrier": ("__syncthreads();  // this tile has come", "// this tile has come"),
    "wait": ("copy_wait<STAGES - 2>();", "copy_wait<STAGES - 1>();"),
    "tail": ("const T* p = at < end ?", "const T* p = true ?"),
    "stores": ("__syncthreads();  // the tiles are not needed any more", ""),
}  # fmt: skip


@pytest.mark.parametrize(
    "fault",
    [
        name if name == "wait" else pytest.param(name, marks=[pytest.mark.slow, pytest.mark.exhaustive])
        for name in FAULTS
    ],
)
def test_faults_are_found(fault: str) -> None:
    old, new = FAULTS[fault]
    cases, pairs = cases_of("float16", Card(tiles=SMALL), [(72, 80, 104)], [(True, False)])
    with pytest.raises((AssertionError, EmulationError)):
        for order in (0, 1):
            check(cases, pairs, replace={old: new}, order=order)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_offsets_stay_below_the_limit() -> None:
    cases, pairs = cases_of("float32", Card(tiles=SMALL, int_limit=6000), [(72, 68, 48), (8, 136, 56)], EVERY, batch=2)
    assert {job.launches[0].name.split(", ")[1] for job, _ in cases} == {"i32", "i64"}
    check(cases, pairs, defines={"EMULATED_INT_LIMIT": 6000})


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("math", "arch"), ALL)
def test_all_tiles(math: str, arch: int, tile: tuple[int, int, int]) -> None:
    card = Card(arch // 10, tiles=(tile,))
    check(*cases_of(math, card, [(136, 144, 72), (131, 37, 51)], EVERY), defines={"EMULATED_ARCH": arch})


def test_choice_of_tile_and_split() -> None:
    """Large products take large tiles whole, small ones with a long sum are split, and the workspace is bounded."""
    half, card = MATHS["float16"], Card()
    large = choose(half, card, 4096, 4096, 4096, 1, 4096 * 4096)
    assert (large.rows, large.columns, large.splits) == (128, 128, 1)
    narrow = choose(half, card, 100_000, 20, 576, 1, 2_000_000)
    assert narrow.columns == 32
    small = choose(half, card, 64, 576, 100_000, 1, 64 * 576)
    assert small.splits > 8 and small.depth % 32 == 0 and small.depth * (small.splits - 1) < 100_000
    tight = Card(workspace=4 * 64 * 576 * 4)
    assert 1 < choose(half, tight, 64, 576, 100_000, 1, 64 * 576).splits <= 4
    assert choose(half, card, 64, 576, 100_000, 1, None).splits == 1


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 64, 100, 641, 6700417, 2**31 - 1])
def test_divisors(n: int) -> None:
    value, multiplier, shift = divisor(n)
    near = [
        0,
        1,
        n - 1,
        n,
        n + 1,
        2 * n - 1,
        2 * n,
        2**31 - 1,
        2**31 - 2,
        (2**31 - 1) // n * n,
        (2**31 - 1) // n * n - 1,
    ]
    for x in [v for v in near if 0 <= v < 2**31] + np.random.default_rng(n).integers(0, 2**31, 1000).tolist():
        assert ((x * multiplier >> 32) + x) >> shift == x // n, x
    assert value == n and multiplier < 2**32 and shift < 32
