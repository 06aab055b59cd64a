"""What is particular to the oneDNN engine: finding the library, caching, threads, fallbacks, fused forms, accuracy."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from lbpar.engine.base import LocalWindow
from lbpar.engine.native import build
from lbpar.engine.native import passes as native
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.onednn import cdef, conv, library, memory
from lbpar.engine.onednn.memory import SMALL as POOLED
from lbpar.engine.onednn.memory import Arena
from lbpar.errors import EngineError
from tests.engine.oracles import joined

try:
    library.load()
except EngineError as error:
    pytest.skip(str(error), allow_module_level=True)

from lbpar.engine.onednn.engine import SLAB, OneDnnEngine

REFERENCE = NumpyEngine(np.float64)


@pytest.fixture
def engine():
    return OneDnnEngine(np.float32, threads=1)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def array(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def wide(*arrays):
    return [None if a is None else a.astype(np.float64) for a in arrays]


def close(got, want, tolerance=2e-5):
    assert got.shape == want.shape
    assert np.abs(got - want).max(initial=0) <= tolerance * max(1.0, np.abs(want).max(initial=0))


# -- the library -------------------------------------------------------------------------------------------------------


def test_missing_library_names_the_wheel(monkeypatch):
    monkeypatch.setenv(library.ENVIRONMENT, "/nowhere/libdnnl.so.3")
    with pytest.raises(EngineError, match=r"LBPAR_DNNL=/nowhere.*onednn-cpu-gomp"):
        OneDnnEngine()


def test_nothing_found_names_the_wheel_and_the_other_engine(monkeypatch):
    monkeypatch.delenv(library.ENVIRONMENT, raising=False)
    monkeypatch.setattr(library, "_candidates", lambda: iter(["/nowhere/libdnnl.so.3"]))
    monkeypatch.setattr(library, "_installed", lambda: iter([]))
    library._load.cache_clear()
    try:
        with pytest.raises(EngineError, match=r"pip install onednn-cpu-gomp.*numpy engine"):
            OneDnnEngine()
    finally:
        library._load.cache_clear()


def test_library_that_is_not_onednn_is_refused(monkeypatch):
    monkeypatch.setenv(library.ENVIRONMENT, "libm.so.6")
    with pytest.raises(EngineError, match="cannot be used"):
        OneDnnEngine()


def test_explicit_library_may_be_a_directory(monkeypatch):
    path = library.load().path
    if "/" not in path:
        pytest.skip("the system's library has no path of its own")
    monkeypatch.setenv(library.ENVIRONMENT, path.rpartition("/")[0])
    assert OneDnnEngine().library.startswith("oneDNN 3.")


def test_records_of_packages_are_read_only_where_no_usual_place_has_one(monkeypatch):
    found = []
    monkeypatch.delenv(library.ENVIRONMENT, raising=False)
    monkeypatch.setattr(library, "_candidates", lambda: iter(found))
    monkeypatch.setattr(library, "_installed", lambda: iter(["elsewhere"]))
    monkeypatch.setattr(library, "_open", lambda path: type("Fake", (), {"version": (3, 0, 0), "path": path}))
    try:
        for place in ("elsewhere", "usual"):
            library._load.cache_clear()
            assert library.load().path == place
            found.append("usual")
    finally:
        library._load.cache_clear()


def test_newest_library_wins(monkeypatch):
    class Fake:
        def __init__(self, version):
            self.version = version

    found = {"a": Fake((3, 2, 0)), "b": Fake((3, 10, 1)), "c": Fake((3, 9, 9))}
    monkeypatch.delenv(library.ENVIRONMENT, raising=False)
    monkeypatch.setattr(library, "_candidates", lambda: iter(found))
    monkeypatch.setattr(library, "_open", found.__getitem__)
    library._load.cache_clear()
    try:
        assert library.load() is found["b"]
    finally:
        library._load.cache_clear()


def test_libraries_stay_loaded_when_their_engines_are_gone():
    """Threads of OpenMP wait inside them."""
    first = OneDnnEngine(threads=2)
    found, passes = first._context.library, None if first.native is None else first.native.lib
    del first
    library._load.cache_clear()
    second = OneDnnEngine(threads=2)
    assert second._context.library is found
    assert passes is None or second.native.lib is passes


def test_unknown_compute_type():
    with pytest.raises(EngineError, match="float16.*bfloat16"):
        OneDnnEngine(compute="float16")


def test_threads_hold_in_every_python_thread():
    engine = OneDnnEngine(threads=3)
    if not engine._context.library.openmp:
        pytest.skip("sequential library")
    counts = []

    def count():
        counts.append(engine._context.max_threads())

    worker = threading.Thread(target=count)
    worker.start()
    worker.join()
    count()
    assert counts == [3, 3]


# -- caching and memory ------------------------------------------------------------------------------------------------


def test_second_call_creates_no_primitive(engine, rng, monkeypatch):
    x, w = array(rng, 2, 7, 7, 4), array(rng, 6, 3, 3, 4)
    win = (LocalWindow(3, pad=1),) * 2
    first = engine.conv_forward(x, w, None, win, 1, (7, 7))

    def refuse(*_):
        raise AssertionError("a primitive was created again")

    monkeypatch.setattr(library.Primitive, "__init__", refuse)
    np.testing.assert_array_equal(engine.conv_forward(x, w, None, win, 1, (7, 7)), first)


def test_cached_primitive_sees_new_weights(engine, rng):
    x, w = array(rng, 2, 7, 7, 4), array(rng, 6, 3, 3, 4)
    win = (LocalWindow(3, pad=1),) * 2
    first = engine.conv_forward(x, w, None, win, 1, (7, 7))
    w *= 2
    close(engine.conv_forward(x, w, None, win, 1, (7, 7)), 2 * first)


def test_cache_does_not_confuse_geometries(engine, rng):
    x, w = array(rng, 1, 8, 8, 4), array(rng, 4, 3, 3, 4)
    for pads in ((1, 1), (0, 1), (2, -1), (-1, 0)):
        win = tuple(LocalWindow(3, pad=p) for p in pads)
        close(
            engine.conv_forward(x, w, None, win, 1, (6, 6)),
            REFERENCE.conv_forward(*wide(x, w), None, win, 1, (6, 6)),
        )


def test_number_of_cached_primitives_is_bounded(engine, monkeypatch):
    monkeypatch.setattr("lbpar.engine.onednn.engine._MAX_PLANS", 3)
    for n in range(1, 9):
        engine.linear_forward(np.ones((n, 2), np.float32), np.ones((3, 2), np.float32), None)
    assert len(engine._plans) <= 3


def test_output_memory_is_reused_only_when_unreferenced(engine):
    shape = (POOLED, 4)
    a = engine.empty(shape)
    assert a.ctypes.data % 64 == 0
    assert a.flags.c_contiguous and a.flags.writeable
    view, where = a[3:5, 1:], a.ctypes.data
    a[...] = 5
    del a
    gc.collect()
    b = engine.empty(shape)
    b[...] = 7
    assert b.ctypes.data != where
    np.testing.assert_array_equal(view, 5)
    del view
    gc.collect()
    assert engine.empty(shape).ctypes.data == where
    engine.arena.release()
    np.testing.assert_array_equal(b, 7)


def test_pool_joins_what_comes_back():
    arena = Arena()
    mega = 1 << 20
    a, b, c = (arena.empty((mega,), np.uint8) for _ in range(3))
    held, where = arena.held, a.ctypes.data
    del a, b
    d = arena.empty((2 * mega,), np.uint8)  # neither piece holds it, both together do
    assert d.ctypes.data == where and arena.held == held
    del c, d
    assert arena.free_bytes() == held
    e = arena.empty((4 * mega,), np.uint8)  # the free end grows
    assert e.ctypes.data == where and arena.held < 5 * mega


def test_pool_takes_the_smallest_piece_that_fits_and_another_chunk_when_full(monkeypatch):
    monkeypatch.setattr(memory, "CHUNK", 8 << 20)
    arena = Arena()
    mega = 1 << 20
    a, _b, c, _d = (arena.empty((n * mega,), np.uint8) for n in (3, 1, 1, 1))
    places = a.ctypes.data, c.ctypes.data
    del a, c
    assert arena.empty((mega,), np.uint8).ctypes.data == places[1]
    big = arena.empty((20 * mega,), np.uint8)
    big[...] = 1
    assert arena.held > 24 * mega


def test_pool_never_hands_out_memory_in_use(rng):
    arena, alive, mark = Arena(), {}, 0
    for _ in range(600):
        if alive and rng.random() < 0.5:
            key = int(rng.choice(list(alive)))
            assert (alive.pop(key) == key % 251).all()
        else:
            mark += 1
            alive[mark] = arena.empty((int(rng.integers(1 << 16, 1 << 18)),), np.uint8)
            alive[mark][...] = mark % 251
        if rng.random() < 0.05:
            arena.release()
    for key, a in alive.items():
        assert (a == key % 251).all()


def test_kernels_read_and_write_numpy_memory_in_place(engine, rng):
    x = array(rng, 200, 300)
    y = engine._rectify(x)
    assert y is x
    assert (x >= 0).all()


# -- fallbacks ---------------------------------------------------------------------------------------------------------


def test_non_contiguous_arrays(engine, rng):
    x = array(rng, 2, 9, 8, 6).transpose(0, 2, 1, 3)
    w = array(rng, 3, 3, 6, 4).transpose(3, 0, 1, 2)
    win = (LocalWindow(3, pad=1),) * 2
    dy = array(rng, 2, 8, 9, 8)[..., ::2]
    close(engine.conv_forward(x, w, None, win, 1, (8, 9)), REFERENCE.conv_forward(*wide(x, w), None, win, 1, (8, 9)))
    close(
        engine.conv_backward_weights(x, dy, win, 1),
        REFERENCE.conv_backward_weights(*wide(x, dy), win, 1),
        tolerance=1e-4,
    )
    close(
        engine.linear_forward(x[0, 0], w[0, 0].T.copy().T[:, ::1].reshape(-1, 6), None),
        x[0, 0] @ w[0, 0].reshape(-1, 6).T,
    )
    big = array(rng, 300, 128)[:, ::2]
    close(engine.add([big, big]), 2 * big)
    close(engine.relu_forward(big), np.maximum(big, 0))


def test_float64_runs_in_the_reference_and_creates_nothing(engine, rng):
    x, w = wide(array(rng, 1, 5, 5, 3), array(rng, 2, 3, 3, 3))
    win = (LocalWindow(3),) * 2
    np.testing.assert_array_equal(
        engine.conv_forward(x, w, None, win, 1, (3, 3)), REFERENCE.conv_forward(x, w, None, win, 1, (3, 3))
    )
    assert not engine._plans


@pytest.mark.parametrize("slab", [None, 1])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_random_local_windows(engine, rng, dims, slab, monkeypatch):
    """Crops, odd pads, strides over the end, dilations and groups: whatever a block of a split layer can look like."""
    if slab is not None:
        monkeypatch.setitem(SLAB, cdef.F32, slab)
    for _ in range(25):
        groups = int(rng.choice([1, 1, 2, 4]))
        c, f = groups * int(rng.integers(1, 4)), groups * int(rng.integers(1, 4))
        win = tuple(
            LocalWindow(
                int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 3)), int(rng.integers(-3, 4))
            )
            for _ in range(dims)
        )
        inner, out = (tuple(int(n) for n in rng.integers(1, 8, dims)) for _ in range(2))
        x, w, b = array(rng, 2, *inner, c), array(rng, f, *(d.kernel for d in win), c // groups), array(rng, f)
        dy = array(rng, 2, *out, f)
        x64, w64, b64, dy64 = wide(x, w, b, dy)
        close(engine.conv_forward(x, w, b, win, groups, out), REFERENCE.conv_forward(x64, w64, b64, win, groups, out))
        close(
            engine.conv_backward_data(dy, w, win, groups, inner),
            REFERENCE.conv_backward_data(dy64, w64, win, groups, inner),
        )
        dw, db = engine.conv_backward_weights_bias(x, dy, win, groups)
        close(dw, REFERENCE.conv_backward_weights(x64, dy64, win, groups))
        close(db, REFERENCE.bias_backward(dy64))
        y, arg = engine.max_pool_forward(x, win, out)
        y64, arg64 = REFERENCE.max_pool_forward(x64, win, out)
        np.testing.assert_array_equal(y, y64)
        g = array(rng, *y.shape)
        close(
            engine.max_pool_backward(g, arg, win, inner),
            REFERENCE.max_pool_backward(g.astype(np.float64), arg64, win, inner),
        )
        divisors = [rng.integers(1, 4, n).astype(np.float64) for n in out]
        close(engine.avg_pool_forward(x, win, out, divisors), REFERENCE.avg_pool_forward(x64, win, out, divisors))
        close(
            engine.avg_pool_backward(g, win, inner, divisors),
            REFERENCE.avg_pool_backward(g.astype(np.float64), win, inner, divisors),
        )


# -- normalisation -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["compiled", "onednn"])
def either(request, monkeypatch):
    """The engine with and without the compiled passes."""
    monkeypatch.setenv(native.SWITCH, "1" if request.param == "compiled" else "0")
    engine = OneDnnEngine(np.float32, threads=1)
    if request.param == "compiled" and engine.native is None:
        pytest.skip("no C compiler")
    return engine


SHAPES = [(2, 40, 41, 8), (1, 3, 43, 47, 5), (3, 7, 7, 2048), (2, 97, 101, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_normalisation_of_more_than_a_tile(engine, rng, shape, affine, monkeypatch):
    monkeypatch.setattr("lbpar.engine.onednn.rows.TILE_BYTES", 1 << 15)
    x, dy, residual = 3 + 2 * array(rng, *shape), array(rng, *shape), array(rng, *shape)
    c, count = shape[-1], x.size // shape[-1]
    scale, bias = (array(rng, c), array(rng, c)) if affine else (None, None)
    shift = np.full(c, 2.5)
    x64, dy64, residual64, scale64, bias64 = wide(x, dy, residual, scale, bias)
    sums = engine.norm_sums(x, shift)
    close(joined(sums), joined(REFERENCE.norm_sums(x64, shift)))
    mean, invstd, _ = engine.norm_moments(sums, shift, count, 1e-5)
    close(engine.norm_apply(x, mean, invstd, scale, bias), REFERENCE.norm_apply(x64, mean, invstd, scale64, bias64))
    back = engine.norm_backward_sums(x, dy, mean, invstd)
    close(back, REFERENCE.norm_backward_sums(x64, dy64, mean, invstd))
    close(
        engine.norm_backward_data(x, dy, mean, invstd, scale, back, count),
        REFERENCE.norm_backward_data(x64, dy64, mean, invstd, scale64, back, count),
    )
    for extra in (None, residual):
        y = engine.norm_relu_forward(x, mean, invstd, scale, bias, extra)
        want = REFERENCE.norm_apply(x64, mean, invstd, scale64, bias64) + (0 if extra is None else residual64)
        close(y, np.maximum(want, 0))
        sums, masked = engine.norm_relu_backward_sums(x, y, dy, mean, invstd)
        np.testing.assert_array_equal(masked, np.where(y > 0, dy, 0))
        close(sums, REFERENCE.norm_backward_sums(x64, masked.astype(np.float64), mean, invstd))


@pytest.mark.parametrize("ratio", [1e2, 1e3, 1e4])
@pytest.mark.parametrize("shape", [(1, 300, 301, 3), (1, 224, 224, 64)])
def test_mean_far_from_zero(either, rng, ratio, shape):
    """Statistics of float32 numbers whose mean is ``ratio`` standard deviations: within what float32 can tell apart."""
    x = (ratio + array(rng, *shape)).astype(np.float32)
    x64 = x.reshape(-1, shape[-1]).astype(np.float64)
    shift = np.zeros(shape[-1])
    mean, invstd, var = either.norm_moments(either.norm_sums(x, shift), shift, len(x64), 0.0)
    spacing = ratio * np.finfo(np.float32).eps
    assert np.abs(mean - x64.mean(0)).max() < 4 * spacing
    np.testing.assert_allclose(var, x64.var(0), rtol=max(2e-6, 4 * spacing))
    np.testing.assert_allclose(either.norm_apply(x, mean, invstd, None, None).std(dtype=np.float64), 1, rtol=1e-3)


# -- special values and fused forms ------------------------------------------------------------------------------------


def test_relu_keeps_nan_in_large_and_fused_forms(engine, rng):
    x, w = array(rng, 4, 40, 40, 8), array(rng, 8, 1, 1, 8)
    x[1, 2, 3, 4] = np.nan
    win = (LocalWindow(1),) * 2
    assert np.isnan(engine.relu_forward(x)).sum() == 1
    assert np.isnan(engine.conv_relu_forward(x, w, None, win, 1, (40, 40))[1, 2, 3]).all()
    zero = np.zeros(8)
    mean, invstd, _ = engine.norm_moments(engine.norm_sums(x, zero), zero, x.size // 8, 1e-5)
    assert np.isnan(mean[4])
    assert np.isnan(engine.norm_relu_forward(x, mean, invstd, None, None)[..., 4]).all()


def test_infinite_gradient_behind_a_shut_relu_counts_for_nothing(engine, rng):
    y, x, dy = (array(rng, 1, 40, 40, 16) for _ in range(3))
    y[0, 0, 0, 0], dy[0, 0, 0, 0] = 0, np.inf
    sums, masked = engine.norm_relu_backward_sums(x, y, dy, np.zeros(16), np.ones(16))
    assert np.isfinite(sums).all()
    assert masked[0, 0, 0, 0] == 0
    assert engine.relu_backward(y, dy)[0, 0, 0, 0] == 0


def test_max_pool_of_nan_and_minus_infinity_is_left_to_the_reference(engine, rng):
    x = array(rng, 1, 6, 6, 3)
    x[0, 1, 1, 0], x[0, 2:4, 2:4, 1] = np.nan, -np.inf
    win = (LocalWindow(2, 2),) * 2
    y, arg = engine.max_pool_forward(x, win, (3, 3))
    want, _ = REFERENCE.max_pool_forward(x.astype(np.float64), win, (3, 3))
    np.testing.assert_array_equal(y, want)
    assert engine.max_pool_backward(np.ones_like(y), arg, win, (6, 6)).sum() == y.size


@pytest.mark.parametrize(("kernel", "pad"), [(1, 0), (1, -1), (3, 0), (3, 1)])
def test_weights_of_a_convolution_of_single_pixels(engine, rng, kernel, pad):
    less = kernel - 1 - 2 * pad
    x, dy = array(rng, 2, 9, 7, 24), array(rng, 2, 9 - less, 7 - less, 10)
    win = (LocalWindow(kernel, pad=pad),) * 2
    got = engine.conv_backward_weights(x, dy, win, 1)
    close(got, REFERENCE.conv_backward_weights(*wide(x, dy), win, 1))
    plan = next(iter(engine._plans.values()))
    assert isinstance(plan, conv.PointwiseWeights) == ((kernel, pad) == (1, 0))


def test_conv_relu(engine, rng):
    x, w, b = array(rng, 2, 30, 30, 16), array(rng, 16, 3, 3, 16), array(rng, 16)
    win = (LocalWindow(3, pad=1),) * 2
    got = engine.conv_relu_forward(x, w, b, win, 1, (30, 30))
    close(got, np.maximum(REFERENCE.conv_forward(*wide(x, w, b), win, 1, (30, 30)), 0))


def test_two_threads_give_what_one_gives(engine, rng):
    two = OneDnnEngine(np.float32, threads=2)
    x, w, dy = array(rng, 3, 24, 24, 24), array(rng, 16, 3, 3, 24), array(rng, 3, 24, 24, 16)
    win, shift = (LocalWindow(3, pad=1),) * 2, np.zeros(24)
    for op in (
        lambda e: e.conv_forward(x, w, None, win, 1, (24, 24)),
        lambda e: e.conv_backward_data(dy, w, win, 1, (24, 24)),
        lambda e: e.conv_backward_weights(x, dy, win, 1),
        lambda e: joined(e.norm_sums(x, shift)),
        lambda e: e.norm_backward_sums(x, x, shift, shift + 1),
        lambda e: e.bias_backward(x),
        lambda e: e.relu_forward(x),
    ):
        close(op(two), op(engine))


# -- compiled passes ---------------------------------------------------------------------------------------------------


ROWS = [(5, 3), (1, 1), (70, 4, 130), (9, 9, 9, 7), (300, 64), (33, 1000), (700, 48)]


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("relu", [False, True])
def test_norm_backward_with_another_gradient(either, rng, shape, relu):
    x, y, dy, more = (array(rng, *shape) for _ in range(4))
    mean, invstd, scale = rng.standard_normal(shape[-1]), rng.random(shape[-1]) + 0.5, array(rng, shape[-1])
    extra = array(rng, *shape[:-1], shape[-1] + 5)
    if relu:
        sums, g = either.norm_relu_backward_sums(x, y, dy, mean, invstd, more)
        want, masked = REFERENCE.norm_relu_backward_sums(*wide(x, y, dy), mean, invstd, wide(more)[0])
        close(g, masked)
        close(sums, want)
    count = x.size // shape[-1]
    sums = rng.standard_normal((2, shape[-1])) * count
    for z in (more, extra):
        got = either.norm_backward_data_add(x, dy, mean, invstd, scale, sums, count, z)
        close(got, REFERENCE.norm_backward_data_add(*wide(x, dy), mean, invstd, *wide(scale), sums, count, *wide(z)))


@pytest.mark.parametrize("shape", ROWS)
def test_threads_share_rows_of_any_number(rng, shape, monkeypatch):
    monkeypatch.setattr(native, "SMALL", 0)
    engines = [OneDnnEngine(np.float32, threads=t) for t in (1, 3)]
    x, dy, shift = array(rng, *shape), array(rng, *shape), rng.standard_normal(shape[-1])
    for method, arguments in (
        ("norm_sums", (x, shift)),
        ("norm_backward_sums", (x, dy, shift, np.ones(shape[-1]))),
        ("norm_apply", (x, shift, np.ones(shape[-1]), None, None)),
        ("bias_backward", (x,)),
        ("relu_forward", (x,)),
        ("relu_backward", (x, dy)),
        ("concat", ([x, dy],)),
    ):
        one, three = (getattr(e, method)(*arguments) for e in engines)
        if method == "norm_sums":
            one, three = joined(one), joined(three)
        close(three, one, 1e-12 if one.dtype == np.float64 else 2e-6)


def test_sums_are_added_in_double(rng):
    engine = OneDnnEngine(np.float32, threads=1)
    if engine.native is None:
        pytest.skip("no C compiler")
    x = array(rng, 100_000, 3) + np.float32(1000)
    close(
        joined(engine.norm_sums(x, np.zeros(3))), joined(REFERENCE.norm_sums(x.astype(np.float64), np.zeros(3))), 1e-13
    )


def test_without_a_compiler_the_engine_still_works(rng, monkeypatch, tmp_path):
    build._library.cache_clear()
    monkeypatch.setenv(build.CACHE, str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    engine = OneDnnEngine(np.float32, threads=1)
    monkeypatch.undo()
    build._library.cache_clear()
    assert engine.native is None
    x = array(rng, 50, 6)
    close(joined(engine.norm_sums(x, np.zeros(6))), joined(REFERENCE.norm_sums(x.astype(np.float64), np.zeros(6))))
