"""Early stop: end training when a metric no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from lbpar.errors import ConfigError


def gain(metric: str, value: float, best: float) -> float:
    """By how much a value is better than another; losses should fall, all other metrics rise."""
    return best - value if metric.endswith("loss") else value - best


class EarlyStop:
    """Counts evaluations without improvement.

    Deterministic in the values it is given: ranks that see the same metric decide alike without communication.

    Parameters
    ----------
    patience : int
        Evaluations in a row without improvement after which `stop` is true.
    metric : str
        Key of the metric. Names that end in ``loss`` should fall, all others rise.
    min_delta : float
        Smaller changes are no improvement.

    Attributes
    ----------
    best : float or None
        Best value so far.
    waited : int
        Evaluations since then.
    """

    def __init__(self, patience: int, metric: str = "test_accuracy", min_delta: float = 0.0) -> None:
        if patience < 1:
            raise ConfigError(f"early stop: patience is {patience}, expected an integer >= 1.")
        if not min_delta >= 0:
            raise ConfigError(f"early stop: min_delta is {min_delta}, expected a number >= 0.")
        self.patience = patience
        self.metric = metric
        self.min_delta = min_delta
        self.best: float | None = None
        self.waited = 0

    @property
    def stop(self) -> bool:
        """Whether training should end."""
        return self.waited >= self.patience

    @property
    def reason(self) -> str:
        """Why, in words: ``test_accuracy no better than 0.91 in 3 evaluations``."""
        best = "any number" if self.best is None else f"{self.best:.4g}"
        return f"{self.metric} no better than {best} in {self.waited} evaluation{'s' if self.waited > 1 else ''}"

    def update(self, metrics: Mapping[str, Any]) -> bool:
        """Take the metrics of one evaluation; whether they are the best so far. NaN and infinity never are.

        Raises
        ------
        ConfigError
            The metric is not among them.
        """
        if metrics.get(self.metric) is None:
            raise ConfigError(
                f"early stop: metric {self.metric!r} was not measured, got {', '.join(metrics) or 'none'}. "
                "Watch one of these, or give test data."
            )
        value = float(metrics[self.metric])
        better = isfinite(value) and (self.best is None or gain(self.metric, value, self.best) > self.min_delta)
        if better:
            self.best = value
        self.waited = 0 if better else self.waited + 1
        return better

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep; JSON values."""
        return {"metric": self.metric, "best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; a state of another metric is ignored, because its best value means nothing here."""
        if state.get("metric") == self.metric:
            self.best = state["best"]
            self.waited = state["waited"]
