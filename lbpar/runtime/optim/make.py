"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from lbpar.config import optimizers
from lbpar.engine.base import Engine
from lbpar.runtime.optim.base import Optimizer
from lbpar.runtime.optim.rules import LAMB, LARS, SGD, Adam, AdamW

O = TypeVar("O", bound=type[Optimizer])

OPTIMIZERS: dict[str, type[Optimizer]] = {cls.name: cls for cls in (SGD, Adam, AdamW, LARS, LAMB)}


def register_optimizer(cls: O) -> O:
    """Make an update rule known to run files, checkpoints and the planner; a decorator. See docs/howto/add-an-op.md."""
    optimizers.OPTIMIZERS.add(cls.options)
    from lbpar.cost.price import SLOTS  # not in every rank

    OPTIMIZERS[cls.name] = cls
    SLOTS[cls.name] = len(cls.options.slots)
    return cls


def make_optimizer(
    config: optimizers.Optimizer,
    kinds: Mapping[str, str] | None = None,
    no_decay: Collection[str] = (),
    engine: Engine | None = None,
) -> Optimizer:
    """Build the optimizer that a run file names.

    Parameters
    ----------
    config : lbpar.config.optimizers.Optimizer
        Section ``train.optimizer`` of a run file.
    kinds, no_decay
        See `Optimizer`.
    engine : Engine, optional
        Holds the parameters; default: NumPy.
    """
    optimizer = OPTIMIZERS[config.kind](config=config, kinds=kinds, no_decay=no_decay)
    if engine is not None:
        optimizer.engine = engine
    return optimizer
