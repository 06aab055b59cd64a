"""Gradient clipping by the norm of all gradients together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite, sqrt

import numpy as np

from lbpar.engine.base import Engine
from lbpar.engine.device import Array
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.errors import TrainingError
from lbpar.runtime.optim.base import flat
from lbpar.runtime.optim.norms import LocalNorms, Norms


def clip_by_global_norm(
    grads: Mapping[str, Array], max_norm: float, norms: Norms | None = None, engine: Engine | None = None
) -> Callable[[], float]:
    """Scale all gradients in place so that the norm of their concatenation is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``: factor ``min(1, max_norm / (norm + 1e-6))``.

    Parameters
    ----------
    grads : mapping from parameter name to array
        C-contiguous local blocks of the (fully summed) gradients.
    max_norm : float
        Bound on the Euclidean norm.
    norms : Norms, optional
        Default: this process holds whole parameters. Collective as `Norms.squared`.
    engine : Engine, optional
        Holds the gradients; default: NumPy.

    Returns
    -------
    callable
        Gives the norm before clipping once the device has it, or raises TrainingError, on all ranks alike, with the name of
        the first parameter whose gradient is not finite.
    """
    engine = engine or NumpyEngine()
    blocks, names = [flat(name, g) for name, g in grads.items()], list(grads)
    squares = engine.squared_norms(blocks).reshape(-1, 1)
    total = (norms or LocalNorms()).squared(names, squares)
    engine.clip(blocks, total, max_norm)
    fetched = engine.fetch(total)

    def norm() -> float:
        values = fetched()[:, 0].tolist()
        for name, square in zip(names, values, strict=True):
            if not isfinite(square):
                raise TrainingError(
                    f"gradient clipping: the gradient of {name} has norm {float(np.sqrt(square))}, expected a finite one. "
                    "Lower the learning rate, warm up for longer, or look for bad samples."
                )
        return sqrt(sum(values))

    return norm
