"""Numbers too small to be normal: zero while a program runs on the float32 engine, themselves before and after."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from lbpar.engine.base import LocalWindow
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.registry import get_engine
from lbpar.errors import EngineError

TINY, LARGE = np.float32(1e-40), np.float32(1e10)
WINDOW = (LocalWindow(3, pad=1),) * 2


def make(threads: int, dtype: str = "float32"):
    try:
        engine = get_engine("onednn", dtype, threads)
    except EngineError as error:
        pytest.skip(str(error))
    if engine.native is None or engine.native.lib.lbpar_flush_bits() == 0:
        pytest.skip("no compiled passes, or a processor without the switch")
    return engine


def convolve(engine) -> np.ndarray:
    """Ordinary numbers, about 1e-29, unless denormal inputs count as zero. Samples enough for all threads."""
    x, w = np.full((6, 16, 16, 16), TINY), np.full((16, 3, 3, 16), LARGE)
    return engine.conv_forward(x, w, None, WINDOW, 1, (16, 16))


def numpy_keeps_denormals() -> bool:
    return bool((np.full(1000, 1e-30, np.float32) * np.float32(1e-10) > 0).all())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_denormals_are_zero_in_all_threads_while_running(threads):
    engine = make(threads)
    assert (convolve(engine) > 1e-30).all()
    with engine.running():
        assert (convolve(engine) == 0).all()
        assert not numpy_keeps_denormals()
        with engine.running():
            pass
        assert (convolve(engine) == 0).all()  # one inside restores what was there, not the default
    assert (convolve(engine) > 1e-30).all()
    assert numpy_keeps_denormals()


@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_passes_follow(threads, monkeypatch):
    engine = make(threads)
    monkeypatch.setattr("lbpar.engine.native.passes.SMALL", 0)
    x = np.full((1000, 8), TINY)
    with engine.running():
        inside = engine.norm_apply(x, np.zeros(8), np.full(8, 1e10), None, None)
    outside = engine.norm_apply(x, np.zeros(8), np.full(8, 1e10), None, None)
    assert (inside == 0).all()
    assert (outside > 0).all()


def test_errors_restore_too():
    engine = make(1)
    with pytest.raises(ZeroDivisionError), engine.running():
        raise ZeroDivisionError
    assert numpy_keeps_denormals()


def test_other_python_threads_are_left_alone():
    engine, seen = make(2), []
    ready, done = threading.Event(), threading.Event()

    def work():
        ready.set()
        done.wait()
        seen.append(numpy_keeps_denormals())

    other = threading.Thread(target=work)
    other.start()
    ready.wait()
    with engine.running():
        done.set()
        other.join()
    assert seen == [True]


@pytest.mark.parametrize("engine", [NumpyEngine(np.float32), NumpyEngine(np.float64)], ids=["float32", "float64"])
def test_the_reference_keeps_denormals(engine):
    with engine.running():
        assert numpy_keeps_denormals()


def test_float64_keeps_denormals():
    with make(1, "float64").running():
        assert numpy_keeps_denormals()
