"""Mean and standard deviation per channel of more samples than fit into memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.pieces import pieces
from lbpar.errors import DataError

Moments = NDArray[np.float64]


def channel_moments(x: Any, scale: float = 1.0, where: str = "x") -> tuple[Moments, Moments]:
    """Return mean and standard deviation per channel of ``scale * x``, over samples and space, in float64.

    Constant channels get the deviation 1, so that dividing by it is harmless.

    Parameters
    ----------
    x : (samples, ..., C) array, or anything with a shape and slices
    scale : float
    where : str
        For messages.

    Raises
    ------
    DataError
        A value is not finite; names sample and channel.

    References
    ----------
    T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979: pieces are merged by their means and sums of squares about them, so large offsets do no harm.
    """
    count, mean, squares = 0, np.zeros(x.shape[-1]), np.zeros(x.shape[-1])
    shift = np.asarray(x[:1], np.float64).reshape(-1, x.shape[-1])[
        :1
    ]  # differences from a first value are nearly exact
    for index, part in pieces(x, 8):
        part = part.astype(np.float64).reshape(len(part), -1, x.shape[-1])
        wrong = np.argwhere(~np.isfinite(part).all(axis=1))
        if len(wrong):
            sample, channel = wrong[0]
            raise DataError(
                f"{where}: channel {channel} of sample {index[0].start + sample} holds values that are not finite, so there is no mean. "
                "Replace them, or leave --normalise out."
            )
        part -= shift
        new = part.shape[0] * part.shape[1]
        centre = part.mean(axis=(0, 1))
        part -= centre
        rest = part.mean(axis=(0, 1))  # what rounding left of the mean
        off = centre + rest - mean
        squares += (part * part).sum(axis=(0, 1)) - new * rest**2 + off**2 * (count * new / (count + new))
        count += new
        mean += off * (new / count)
    std = np.sqrt(np.maximum(squares, 0) / max(1, count))
    mean += shift[0]
    constant = std <= 8 * np.finfo(np.float64).eps * np.abs(mean)
    return mean * scale, np.where(constant, 1.0, std * scale)
