"""Early stop on rising and falling metrics."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from lbpar.config.training import EarlyStop as Config
from lbpar.train.best import EarlyStop


def stop(patience: int, **options: Any) -> EarlyStop:
    return EarlyStop(Config(patience=patience, **options))


def feed(early: EarlyStop, values: list[float]) -> list[tuple[bool, bool]]:
    """Per value: is it the best so far, is training to stop."""
    out = []
    for value in values:
        early.update({early.config.metric: value})
        out.append((early.waited == 0, early.stop))
    return out


def test_accuracy_rises():
    early = stop(2)
    steps = feed(early, [0.5, 0.6, 0.6, 0.7, 0.7, 0.1])
    assert [better for better, _ in steps] == [True, True, False, True, False, False]
    assert [stop for _, stop in steps] == [False, False, False, False, False, True]
    assert early.best == 0.7


def test_loss_falls_by_more_than_min_delta():
    early = stop(1, metric="test_loss", min_delta=0.1)
    assert feed(early, [1.0, 0.5, 0.45]) == [(True, False), (True, False), (False, True)]


def test_nan_is_never_the_best():
    early = stop(3, metric="loss")
    assert feed(early, [float("nan"), 2.0, float("-inf")]) == [(False, False), (True, False), (False, False)]
    assert early.best == 2.0


def test_goes_on_from_a_checkpoint():
    first = stop(2, metric="loss")
    feed(first, [1.0, 1.0])
    second, other = stop(2, metric="loss"), stop(2, metric="accuracy")
    second.load_state_dict(first.state_dict())
    other.load_state_dict(first.state_dict())
    assert feed(second, [1.0]) == [(False, True)]
    assert other.best is None


def test_an_epoch_without_the_metric_does_not_count_and_bad_values_are_refused():
    early = stop(1)
    early.update({"loss": 1.0})
    assert (early.waited, early.best) == (0, None)
    for wrong in ({"patience": 0}, {"patience": 1, "min_delta": -1.0}):
        with pytest.raises(ValidationError, match=list(wrong)[-1]):
            Config(**wrong)
