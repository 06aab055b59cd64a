"""How far repetitions of a measurement lie apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spread(times: Sequence[float]) -> float:
    """Half the distance of the quartiles, as a part of the median."""
    low, middle, high = np.percentile(times, (25, 50, 75))
    return float((high - low) / 2 / middle) if middle else 0.0


def unsure(times: Sequence[float]) -> float:
    """Standard error of the median, as a part of it; 1 for fewer than three: nothing is known of these.

    It is 1.25 standard deviations over the root of their number (less 1, which suits few better), and a deviation is `spread` / 0.674 where
    times scatter normally.
    """
    return 1.25 / 0.674 * spread(times) / (len(times) - 1) ** 0.5 if len(times) > 2 else 1.0
