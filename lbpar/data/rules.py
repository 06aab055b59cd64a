"""Named ways to bring each sample to a common range, by its own statistics: z-score, percentiles, windows of known units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Rule:
    """What is done to each sample, per channel, after ``scale``; elements that are not finite count in no statistic.

    Parameters
    ----------
    name : {"zscore", "percentile", "window"}
        Subtract the mean and divide by the deviation; clip to two percentiles, or to two values, and bring these to 0 and 1.
    low, high : float
        The percentiles, or the values.
    nonzero : bool
        Statistics are of elements that are not 0 (of an image whose background is).
    """

    name: str
    low: float = 0.0
    high: float = 1.0
    nonzero: bool = False

    @property
    def asks(self) -> bool:
        """Whether it must see whole samples."""
        return self.name != "window"

    def statistics(self, x: Array) -> Array:
        """float64 (4, C) of a whole sample: the least and largest value, what is subtracted, and the factor."""
        out = np.empty((4, x.shape[-1]))
        for c in range(x.shape[-1]):
            out[:, c] = self._of(x[..., c])
        return out

    def _of(self, x: Array) -> tuple[float, float, float, float]:
        if self.name == "window":
            low, high = self.low, self.high
        else:
            x = x[np.isfinite(x)] if x.dtype.kind == "f" else x.reshape(-1)
            x = x[x != 0] if self.nonzero else x
            if not x.size:
                return -np.inf, np.inf, 0.0, 1.0
            if self.name == "zscore":
                wide = x.astype(np.float64)
                mean, std = wide.mean(), wide.std()
                return -np.inf, np.inf, float(mean), 1.0 / std if std > 8 * np.finfo(float).eps * abs(mean) else 1.0
            low, high = (float(v) for v in np.percentile(x, (self.low, self.high)))
        return low, high, low, 1.0 / (high - low) if high > low else 1.0

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any] | None) -> Rule | None:
        """From `state_dict`, or from fields of the run file."""
        return None if state is None else cls(**state)


def applied(x: Array, statistics: Array) -> Array:
    """A part of samples (n, ..., C) by their statistics (n, 4, C), in x's type and place."""
    shape = (len(x), *(1,) * (x.ndim - 2), x.shape[-1])
    low, high, shift, factor = (statistics[:, i].astype(x.dtype).reshape(shape) for i in range(4))
    np.clip(x, low, high, out=x)
    x -= shift
    x *= factor
    return x
