"""Optimizers by name."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from lbpar.config.fields import as_fields, choose
from lbpar.engine.base import Engine
from lbpar.errors import ConfigError
from lbpar.runtime.optim.adam import Adam, AdamW
from lbpar.runtime.optim.base import Optimizer
from lbpar.runtime.optim.groups import Group, undecayed
from lbpar.runtime.optim.lamb import LAMB
from lbpar.runtime.optim.lars import LARS
from lbpar.runtime.optim.sgd import SGD

OPTIMIZERS: dict[str, type[Optimizer]] = {cls.name: cls for cls in (SGD, Adam, AdamW, LARS, LAMB)}


def make_optimizer(
    config: Any,
    kinds: Mapping[str, str] | None = None,
    no_decay: Collection[str] = (),
    engine: Engine | None = None,
) -> Optimizer:
    """Build the optimizer that a run file names.

    Parameters
    ----------
    config : mapping, dataclass instance or pydantic model
        ``name`` (default sgd), arguments of that optimizer's constructor (None stands for its default), and ``groups``
        (kind -> fields of `Group`), which win over ``no_decay``. `lbpar.config.optimizers` has such models.
    kinds : mapping from parameter name to "weight", "bias" or "norm", optional
        See `Optimizer`.
    no_decay : collection of str
        Kinds without weight decay, and without trust ratio in LARS and LAMB.
    engine : Engine, optional
        Holds the parameters; default: NumPy.

    Raises
    ------
    ConfigError
        Unknown optimizer or field (with the nearest name), or a value out of range.
    """
    fields = as_fields(config)
    name = choose("optimizer", "name", str(fields.pop("name", SGD.name)).lower(), OPTIMIZERS)
    groups = undecayed(no_decay)
    for kind, exceptions in fields.pop("groups", {}).items():
        groups[kind] = exceptions if isinstance(exceptions, Group) else _group(as_fields(exceptions))
    cls = OPTIMIZERS[name]
    allowed = [p for p in inspect.signature(cls).parameters if p not in ("kinds", "groups")]
    for field in fields:
        choose(f"optimizer {name}", "field", field, allowed)
    if "lr" not in fields and inspect.signature(cls).parameters["lr"].default is inspect.Parameter.empty:
        raise ConfigError(f"optimizer {name}: no learning rate given, expected for example 'lr: 0.1'.")
    optimizer = cls(**fields, kinds=kinds, groups=groups)
    if engine is not None:
        optimizer.engine = engine
    return optimizer


def _group(fields: dict[str, Any]) -> Group:
    for field in fields:
        choose("parameter group", "field", field, list(Group.__dataclass_fields__))
    return Group(**fields)
