from __future__ import annotations

import inspect
import logging
import sys

import numpy as np
import pytest

from lbpar.engine.base import Engine
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.registry import get_engine
from lbpar.errors import ConfigError, EngineError


def test_numpy_by_name():
    engine = get_engine("numpy", "float64", 3)
    assert type(engine) is NumpyEngine
    assert (engine.name, engine.dtype, engine.threads) == ("numpy", np.dtype("float64"), 3)


def test_unknown_name_offers_the_nearest():
    with pytest.raises(ConfigError, match=r"engine\.name: got 'onednnn'.*did you mean 'onednn'\?.*auto, numpy, onednn"):
        get_engine("onednnn")
    with pytest.raises(ConfigError, match=r"engine\.name: got 'zzz', expected one of auto, numpy, onednn"):
        get_engine("zzz")


def test_bfloat16_is_computed_or_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"engine\.dtype: float16 is not available on engine\.name: numpy"):
        get_engine("numpy", "float16")
    numpy = get_engine("numpy", "bfloat16")
    assert (numpy.dtype, numpy.activations.name) == (np.dtype("float32"), "bfloat16")
    with monkeypatch.context() as m:
        m.setitem(sys.modules, "lbpar.engine.onednn.engine", None)
        with pytest.raises(EngineError):  # auto must not compute in another type than was asked for
            get_engine("auto", "bfloat16")
    onednn = pytest.importorskip("lbpar.engine.onednn.engine")
    try:
        engine = get_engine("onednn", "bfloat16", 1)
    except EngineError as error:
        assert "engine.dtype: bfloat16" in str(error)
        return
    assert (engine.dtype, engine.activations.name) == (np.dtype("float32"), "bfloat16")

    def refuse(*_: object) -> None:
        raise onednn.Refused("no such kernel")

    monkeypatch.setattr(onednn.conv, "Convolution", refuse)
    with pytest.raises(EngineError, match=r"engine\.dtype: bfloat16 needs a processor"):
        get_engine("onednn", "bfloat16", 1)


def test_auto_falls_back_and_says_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "lbpar.engine.onednn.engine", None)  # as if it could not be imported
    with caplog.at_level(logging.WARNING):
        assert get_engine("auto").name == "numpy"
    assert len(caplog.records) == 1 and "onednn" in caplog.text
    with pytest.raises(EngineError, match="onednn-cpu-gomp"):
        get_engine("onednn")


def test_engines_add_no_public_methods_and_keep_argument_names(engine):
    for name, method in inspect.getmembers(type(engine), inspect.isfunction):
        if name.startswith("_"):
            continue
        assert hasattr(Engine, name), f"{name} is not part of the interface"
        wanted = [n for n in inspect.signature(getattr(Engine, name)).parameters if n != "self"]
        assert [n for n in inspect.signature(method).parameters if n != "self"] == wanted


def test_every_kernel_is_described():
    for name in Engine.__abstractmethods__:
        assert inspect.getdoc(getattr(Engine, name)), name
