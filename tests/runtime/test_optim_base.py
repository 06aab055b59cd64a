"""What all optimizers share: state, saving and loading, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.config import optimizers as config
from lbpar.errors import CheckpointError, ConfigError, TrainingError
from lbpar.runtime.optim.rules import LAMB, LARS, SGD, Adam, AdamW
from tests.util.optimizers import problem, run


@pytest.mark.parametrize(
    "make", [lambda: SGD(0.1, momentum=0.9), lambda: Adam(0.01), lambda: LAMB(0.01), lambda: SGD(0.1)]
)
def test_saved_and_loaded_run_equals_the_uninterrupted_one(make):
    params, grads = problem()
    whole = run(make(), params, grads)
    first, second = make(), make()
    middle = run(first, params, grads[:20])
    saved = {k: v.copy() for k, v in first.state_dict().items()}
    second.load_state_dict(saved, first.counters())
    run(first, middle, grads[20:])  # must not disturb the copy
    kept = {k: v.copy() for k, v in saved.items()}
    result = run(second, middle, grads[20:])
    for key, array in kept.items():
        np.testing.assert_array_equal(saved[key], array)
    for name in whole:
        np.testing.assert_array_equal(result[name], whole[name])


def test_loading_another_optimizers_state_is_refused():
    with pytest.raises(CheckpointError, match="expected slots"):
        SGD(0.1, momentum=0.9).load_state_dict({"w/exp_avg": np.zeros(2)}, {"steps": 1})
    with pytest.raises(CheckpointError, match="lacks exp_avg_sq"):
        Adam().load_state_dict({"w/exp_avg": np.zeros(2)}, {"steps": 1})
    with pytest.raises(CheckpointError, match="lack 'steps'"):
        Adam().load_state_dict({}, {})


def test_step_leaves_gradients_and_gradientless_parameters_alone():
    for optimizer in (
        SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        Adam(weight_decay=0.1),
        LARS(0.1, weight_decay=0.1),
        LAMB(0.1),
    ):
        params, (grads, *_) = problem()
        before = {n: g.copy() for n, g in grads.items()}
        frozen = params["fc.weight"].copy()
        del grads["fc.weight"]
        optimizer.step(params, grads)
        np.testing.assert_array_equal(params["fc.weight"], frozen)
        for n, g in grads.items():
            np.testing.assert_array_equal(g, before[n])


def test_bad_blocks_are_refused():
    with pytest.raises(TrainingError, match="not C-contiguous"):
        SGD(0.1).step({"w": np.zeros((3, 4)).T}, {"w": np.zeros((4, 3))})
    with pytest.raises(TrainingError, match="expected the parameter's shape"):
        SGD(0.1).step({"w": np.zeros((3, 4))}, {"w": np.zeros((4, 3))})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(), "optimizer sgd: lr: missing; it is required"),
        (lambda: SGD(1.0, momentun=0.9), "did you mean 'momentum'"),
        (lambda: SGD(float("nan")), "lr: got nan"),
        (lambda: SGD(1.0, momentum=1.0), "momentum: got 1.0, expected less than 1"),
        (lambda: SGD(1.0, nesterov=True), "momentum above 0"),
        (lambda: Adam(betas=(0.9, 1.5)), r"betas\[1\]: got 1.5"),
        (lambda: LARS(1.0, trust=0.0), "trust: got 0.0"),
    ],
)
def test_options_are_checked_as_in_a_run_file(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_defaults_are_those_of_the_run_file():
    assert Adam().config == config.Adam(name="adam") and AdamW().weight_decay == 0.01
    assert SGD(0.1).slots == () and SGD(0.1, momentum=0.5).slots == ("momentum",) and LAMB().slots == Adam().slots
