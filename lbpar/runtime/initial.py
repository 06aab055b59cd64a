"""Initial parameter values, drawn by global element index: the same network on any grid, no rank holding more than its block."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from math import sqrt

import numpy as np

from lbpar.graph.loops import Param
from lbpar.layout.layout import Layout
from lbpar.layout.runs import Box, box_shape, flat_index, indices
from lbpar.random import fold, normal, uniform


def initial_state(
    params: Mapping[str, Param],
    layouts: Mapping[str, Layout],
    rank: int,
    seed: int,
    dtype: np.dtype,
    weights: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """This rank's blocks of all parameters (in ``dtype``) and running statistics (float64).

    Those named in ``weights``, whole arrays in memory order, are cut out of them; the others are drawn.
    """
    given = weights or {}
    out = {}
    for name, layout in layouts.items():
        box = layout.box(rank)
        if name in given:
            out[name] = given_block(given[name], params[name], box, dtype)
        else:
            out[name] = initial_block(name, params[name], box, seed, dtype)
    return out


def given_block(array: np.ndarray, param: Param, box: Box, dtype: np.dtype) -> np.ndarray:
    """The part ``box`` of one parameter whose values are given, a C-contiguous copy."""
    assert array.shape == param.shape, (array.shape, param.shape)
    kind = np.dtype(np.float64) if param.kind == "statistic" else dtype
    return np.array(array[np.ix_(*map(indices, box))], kind, order="C")


def initial_block(name: str, param: Param, box: Box, seed: int, dtype: np.dtype) -> np.ndarray:
    """The part ``box`` of one parameter's initial values.

    He: normal with variance 2/fan_in [He et al. 2015]. Glorot: uniform with variance 2/(fan_in + fan_out) [Glorot 2010].
    """
    kind = np.dtype(np.float64) if param.kind == "statistic" else dtype
    if isinstance(param.init, float) or param.init in ("zeros", "ones"):
        value = param.init if isinstance(param.init, float) else float(param.init == "ones")
        return np.full(box_shape(box), value, kind)
    key = fold(seed, zlib.crc32(name.encode()))
    index = flat_index(box, param.shape)
    if param.init == "he":
        values = normal(key, index) * sqrt(2.0 / param.fan_in)
    else:
        values = (2.0 * uniform(key, index) - 1.0) * sqrt(6.0 / (param.fan_in + param.fan_out))
    return values.astype(kind)
