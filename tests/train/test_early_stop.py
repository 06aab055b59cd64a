"""Early stop on rising and falling metrics."""

from __future__ import annotations

import pytest

from lbpar.config.training import EarlyStop as Config
from lbpar.errors import ConfigError
from lbpar.train.early_stop import EarlyStop


def feed(early, values):
    return [(early.update({early.metric: v}), early.stop) for v in values]


def test_accuracy_rises():
    early = EarlyStop(**Config(patience=2).model_dump())
    steps = feed(early, [0.5, 0.6, 0.6, 0.7, 0.7, 0.1])
    assert [better for better, _ in steps] == [True, True, False, True, False, False]
    assert [stop for _, stop in steps] == [False, False, False, False, False, True]
    assert early.best == 0.7


def test_loss_falls_by_more_than_min_delta():
    early = EarlyStop(1, "test_loss", 0.1)
    assert feed(early, [1.0, 0.5, 0.45]) == [(True, False), (True, False), (False, True)]


def test_nan_is_never_the_best():
    early = EarlyStop(3, "loss")
    assert feed(early, [float("nan"), 2.0, float("-inf")]) == [(False, False), (True, False), (False, False)]
    assert early.best == 2.0


def test_goes_on_from_a_checkpoint():
    first = EarlyStop(2, "loss")
    feed(first, [1.0, 1.0])
    second, other = EarlyStop(2, "loss"), EarlyStop(2, "accuracy")
    second.load_state_dict(first.state_dict())
    other.load_state_dict(first.state_dict())
    assert feed(second, [1.0]) == [(False, True)]
    assert other.best is None


def test_missing_metric_and_bad_values_are_refused():
    with pytest.raises(ConfigError, match="'test_accuracy' was not measured, got loss"):
        EarlyStop(1).update({"loss": 1.0})
    with pytest.raises(ConfigError, match="patience"):
        EarlyStop(0)
    with pytest.raises(ConfigError, match="min_delta"):
        EarlyStop(1, min_delta=-1.0)
