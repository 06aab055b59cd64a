"""Named ways to bring each sample to a common range, by its own statistics: z-score, percentiles, windows of known units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.streamed import moments, percentiles

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
        return np.array([self._of(self._counted(x[..., c])) for c in range(x.shape[-1])]).T

    def streamed(self, pieces: Callable[[int], Iterator[Array]], channels: int) -> Array:
        """The same, to rounding, of a sample whose channels come in pieces of float32 or float64, as often as they are asked for."""

        def of_channel(c: int) -> tuple[float, float, float, float]:
            def counted() -> Iterator[Array]:
                return map(self._counted, pieces(c))

            if self.name == "zscore":
                number, mean, std = moments(counted)
                return _centred(mean, std) if number else _NOTHING
            if self.name == "percentile":
                ends = percentiles(counted, (self.low, self.high))
                return _clipped(*ends) if ends else _NOTHING
            return self._of(np.empty(0))

        return np.array([of_channel(c) for c in range(channels)]).T

    def _counted(self, x: Array) -> Array:
        """The elements that count in statistics."""
        x = x[np.isfinite(x)] if x.dtype.kind == "f" else x.reshape(-1)
        return x[x != 0] if self.nonzero else x

    def _of(self, x: Array) -> tuple[float, float, float, float]:
        if self.name == "window":
            return _clipped(self.low, self.high)
        if not x.size:
            return _NOTHING
        if self.name == "zscore":
            wide = x.astype(np.float64)
            return _centred(float(wide.mean()), float(wide.std()))
        return _clipped(*(float(v) for v in np.percentile(x, (self.low, self.high))))

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any] | None) -> Rule | None:
        """From `state_dict`, or from fields of the run file."""
        return None if state is None else cls(**state)


_NOTHING = (-np.inf, np.inf, 0.0, 1.0)
"""Where no element counts."""


def _centred(mean: float, std: float) -> tuple[float, float, float, float]:
    return -np.inf, np.inf, mean, 1.0 / std if std > 8 * np.finfo(float).eps * abs(mean) else 1.0


def _clipped(low: float, high: float) -> tuple[float, float, float, float]:
    return low, high, low, 1.0 / (high - low) if high > low else 1.0


def applied(x: Array, statistics: Array) -> Array:
    """A part of samples (n, ..., C) by their statistics (n, 4, C), in x's type and place."""
    shape = (len(x), *(1,) * (x.ndim - 2), x.shape[-1])
    low, high, shift, factor = (statistics[:, i].astype(x.dtype).reshape(shape) for i in range(4))
    np.clip(x, low, high, out=x)
    x -= shift
    x *= factor
    return x
