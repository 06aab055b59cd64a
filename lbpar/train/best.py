"""The best weights of a run: by which metric, which checkpoint has them, and when to stop for want of better ones.

Every checkpoint's metadata say which step was the best so far; there is no second record that could disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf, isfinite
from typing import Any

from lbpar.config import training
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.runtime.scores import FALLING


def gain(metric: str, value: float, best: float | None) -> float:
    """By how much a value is better than the best so far; losses and errors should fall, others rise. Never for NaN or infinity."""
    if not isfinite(value):
        return -inf
    return inf if best is None else best - value if metric.endswith(FALLING) else value - best


def told(record: Mapping[str, Any], metric: str) -> float | None:
    """A metric in the record of an epoch: ``test_dice``, or of one class ``test_dice_of/1``; None if it was not measured."""
    value = record
    for name in metric.split("/"):
        value = value.get(name, {})
    return value if isinstance(value, int | float) else None


@dataclass
class Best:
    """The best value of a metric so far, and when it was reached. Ranks that see the same records agree."""

    metric: str
    value: float | None = None
    epoch: int | None = None
    step: int | None = None

    def update(self, record: Mapping[str, Any]) -> None:
        """Take the record of an epoch; NaN, infinity and metrics that were not measured are never the best."""
        value = told(record, self.metric)
        if value is not None and gain(self.metric, value, self.value) > 0:
            self.value, self.epoch, self.step = float(value), record["epoch"], record["step"]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep; JSON values."""
        return asdict(self)


@dataclass
class EarlyStop:
    """Counts evaluations without improvement; ranks that see the same values decide alike without communication."""

    config: training.EarlyStop
    best: float | None = None
    waited: int = 0

    @property
    def stop(self) -> bool:
        """Whether training should end."""
        return self.waited >= self.config.patience

    @property
    def reason(self) -> str:
        """Why, in words: ``test_accuracy no better than 0.91 in 3 evaluations``."""
        best = "any number" if self.best is None else f"{self.best:.4g}"
        return f"{self.config.metric} no better than {best} in {self.waited} evaluation{'s' * (self.waited > 1)}"

    def update(self, record: Mapping[str, Any]) -> None:
        """Take the record of an epoch, if the metric was measured in it."""
        value = told(record, self.config.metric)
        if value is None:
            return
        better = gain(self.config.metric, value, self.best) > self.config.min_delta
        self.best, self.waited = (float(value), 0) if better else (self.best, self.waited + 1)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep; JSON values."""
        return {"metric": self.config.metric, "best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; a state of another metric is ignored, because its best value means nothing here."""
        if state.get("metric") == self.config.metric:
            self.best, self.waited = state["best"], state["waited"]


def watched_metric(train: training.TrainConfig, test: bool) -> str | None:
    """The metric that says which weights are the best: the one asked for, else that of early stop or of the test data; None without any."""
    if train.evaluate.watch is not None:
        return train.evaluate.watch
    if train.early_stop is not None:
        return train.early_stop.metric
    if not test:
        return None
    return "test_accuracy" if train.loss.kind == CrossEntropy.kind and not train.losses else "test_loss"
