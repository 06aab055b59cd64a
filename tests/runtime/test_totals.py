"""Sums over steps, and over parts of whole samples, are what one look at all of them gives."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.runtime.totals import Totals
from lbpar.runtime.worker import StepResult
from tests.runtime.test_scores import per_volume


def test_totals_weigh_by_samples() -> None:
    totals = Totals()
    totals.add(StepResult(1.0, 3, 6, 3.0, 6.0))
    totals.add(StepResult(5.0, 1, 2, 0.0, 1.0))
    assert totals.record("test_") == {"test_loss": 2.0, "test_accuracy": 3 / 8, "test_top5": 7 / 8}
    assert Totals().record() == {"loss": 0.0}
    few = Totals()
    few.add(StepResult(1.0, 3, 6, 3.0))  # no more than five classes
    assert few.record() == {"loss": 1.0, "accuracy": 0.5}


@pytest.mark.parametrize("ignore", [None, 2])
def test_parts_of_whole_samples_add_up(ignore: int | None) -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(-2, 3, (2, 5, 4, 3)).astype(float), rng.integers(0, 3, (2, 5, 4))
    totals = Totals(samples=2)
    for part in (slice(0, 2), slice(2, 5)):
        totals.add_whole(scores[:, part], labels[:, part], ignore, True, part.stop == 5)
    known, found = np.full(labels.shape, True) if ignore is None else labels != ignore, scores.argmax(-1)
    record = totals.record("test_", ("confusion", "balanced_accuracy", "dice_per_volume"))
    want = [[int((known & (labels == i) & (found == j)).sum()) for j in range(3)] for i in range(3)]
    assert record["test_confusion"] == want
    each = per_volume(found, labels, 3, ignore)
    assert record["test_dice_per_volume"] == pytest.approx(np.nanmean(np.nanmean(each[:, 1:], 0)), rel=1e-14)
    assert record["test_accuracy"] == (known & (labels == found)).sum() / known.sum()


def test_errors_of_parts_add_up() -> None:
    rng = np.random.default_rng(0)
    out, target, totals = rng.random((2, 5, 3)), rng.random((2, 5, 3)), Totals(samples=2)
    for part in (slice(0, 2), slice(2, 5)):
        totals.add_whole(out[:, part], target[:, part], None, False, part.stop == 5)
    assert totals.record("", ("mae",), 15)["mae"] == pytest.approx(np.abs(out - target).mean(), rel=1e-13)
