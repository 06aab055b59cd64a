"""What cannot be had with delayed gradients."""

from __future__ import annotations

import numpy as np

from lbpar.config.run_file import RunConfig
from lbpar.engine.base import Engine
from lbpar.errors import ConfigError
from lbpar.program.plan import Plan


def check_delayed(config: RunConfig, plan: Plan, engine: Engine) -> None:
    """Refuse what stages that do not wait for each other cannot do. Local; the same on all ranks.

    Raises
    ------
    ConfigError
        Names the field.
    """
    delayed, t = plan.delayed, config.train
    if config.parallel.reschedule is not None and not delayed:
        raise ConfigError(
            f"parallel.reschedule: got {config.parallel.reschedule}, but no gradients are delayed; remove it, or set parallel.schedule: delayed "
            "and at least 2 parallel.stages."
        )
    if not delayed:
        return
    remedy = "leave it out, or choose another parallel.schedule"
    if t.accumulate > 1:
        raise ConfigError(
            f"train.accumulate: got {t.accumulate} with parallel.schedule: delayed, which updates with every batch; {remedy}."
        )
    if t.clip_norm is not None:
        raise ConfigError(
            f"train.clip_norm: got {t.clip_norm:g} with parallel.schedule: delayed, in which no stage waits for the gradients of all; {remedy}."
        )
    if t.loss_scale is not None or engine.activations == np.float16:
        where = "engine.dtype: got float16" if t.loss_scale is None else "train.loss_scale: given"
        raise ConfigError(
            f"{where} with parallel.schedule: delayed, in which no stage knows whether the gradients of the others have overflowed; choose "
            "engine.dtype: bfloat16 or float32, or another parallel.schedule."
        )
