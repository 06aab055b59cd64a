"""Optimizers' compiled passes against their NumPy code, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.native.engine import Compiled
from lbpar.engine.native.passes import is_dense, native
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.runtime.optim.rules import SGD, Adam, AdamW

SIZES = {"one": (1,), "odd": (7, 5, 3), "none": (0, 4), "long": (40_001,)}

MAKERS = {
    "sgd": lambda: SGD(0.1),
    "sgd, decay": lambda: SGD(0.1, weight_decay=0.01),
    "sgd, momentum": lambda: SGD(0.1, momentum=0.9),
    "sgd, momentum, decay": lambda: SGD(0.1, momentum=0.9, weight_decay=0.01),
    "sgd, nesterov": lambda: SGD(0.1, momentum=0.9, nesterov=True),
    "sgd, nesterov, decay": lambda: SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda: Adam(0.01),
    "adam, decay": lambda: Adam(0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
    "adamw": lambda: AdamW(0.01),
}


@pytest.fixture(autouse=True)
def needs_passes():
    if native() is None:
        pytest.skip("no C compiler")


def compiled(threads: int | None = None) -> Compiled:
    engine = Compiled()
    engine.native = native(threads)
    return engine


def train(make, engine, spoil=None):
    """Five steps from the same start with the same gradients; weights and state at the end."""
    rng = np.random.default_rng(3)
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SIZES.items()}
    optimizer = make()
    optimizer.engine = engine
    for _ in range(5):
        grads = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SIZES.items()}
        if spoil is not None:
            grads["odd"].flat[:3] = spoil
        kept = {name: g.copy() for name, g in grads.items()}
        optimizer.step(params, grads, np.float64(0.05))
        for name, g in grads.items():
            np.testing.assert_array_equal(g, kept[name])
    return params | optimizer.state_dict()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_equals_numpy_to_the_last_bit(make, threads):
    want, got = train(make, NumpyEngine()), train(make, compiled(threads))
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.mark.parametrize("make", [MAKERS["sgd, nesterov, decay"], MAKERS["adamw"]])
@pytest.mark.parametrize("bad", [[np.nan, np.inf, -np.inf], [3e38, -3e38, 0]], ids=["not finite", "overflow"])
def test_bad_gradients_spoil_the_same_elements(make, bad):
    with np.errstate(all="ignore"):
        want, got = train(make, NumpyEngine(), bad), train(make, compiled(), bad)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_only_float32_blocks_are_taken():
    single, double = np.ones(3, np.float32), np.ones(3)
    assert is_dense(single, single)
    assert not is_dense(single, double) and not is_dense(double) and not is_dense(single[:0])


@pytest.mark.parametrize("engine", [NumpyEngine, compiled])
def test_a_float64_gradient_of_a_float32_block_still_works(engine):
    w, rule = {"w": np.ones(4, np.float32)}, SGD(0.5)
    rule.engine = engine()
    rule.step(w, {"w": np.ones(4)})
    np.testing.assert_array_equal(w["w"], np.full(4, 0.5, np.float32))
