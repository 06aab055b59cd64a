"""How far repetitions of a measurement lie apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spread(times: Sequence[float]) -> float:
    """Half the distance of the quartiles, as a part of the median."""
    low, middle, high = np.percentile(times, (25, 50, 75))
    return float((high - low) / 2 / middle) if middle else 0.0
