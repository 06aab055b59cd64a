"""Learning-rate schedules: pure functions of the step.

The first steps rise linearly to the base rate; cosine and polynomial decay over the steps that remain, the milestones of
a step schedule count from the start of training. Steps beyond the end keep the last value.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from math import cos, pi

from lbpar.config import optimizers
from lbpar.errors import ConfigError

Schedule = Callable[[int], float]
"""Learning rate of a step, counted from 0; the same on all ranks."""


def make_schedule(config: optimizers.Schedule, base_lr: float, steps_per_epoch: int, total_steps: int) -> Schedule:
    """Build the schedule that a run file names.

    Parameters
    ----------
    config : lbpar.config.optimizers.Schedule
        Section ``train.schedule`` of a run file.
    base_lr : float
        The optimizer's learning rate.
    steps_per_epoch, total_steps : int
        To turn epochs into steps; both at least 1.

    Raises
    ------
    ConfigError
        The warm-up is longer than training, or a stretch of equal rates shorter than a step.
    """
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if warmup > total_steps:
        raise ConfigError(
            f"train.schedule: the warm-up takes {warmup} steps, expected at most the training's {total_steps}. "
            "Shorten the warm-up or train for more epochs."
        )
    decayed = _decay(config, base_lr, steps_per_epoch, total_steps, warmup)
    # By default equal increments, and never a step of rate 0.
    start = 1 / (warmup + 1) if config.warmup_start is None else config.warmup_start

    def rate(step: int) -> float:
        if step < warmup:
            return decayed(step) * (start + (1 - start) * step / warmup)
        return decayed(min(step, total_steps))

    return rate


def _decay(
    config: optimizers.Schedule, base_lr: float, steps_per_epoch: int, total_steps: int, warmup: int
) -> Schedule:
    """The rate without the warm-up's factor; cosine and polynomial are at the base rate during warm-up."""

    def done(step: int) -> float:
        """Part of the steps after the warm-up that lie behind."""
        return max(step - warmup, 0) / max(total_steps - warmup, 1)

    match config:
        case optimizers.Step(gamma=gamma):
            milestones = _milestones(config, steps_per_epoch, total_steps)
            return lambda step: float(base_lr * gamma ** bisect_right(milestones, step))
        case optimizers.Cosine(min_lr=least):
            return lambda step: least + (base_lr - least) * (1 + cos(pi * done(step))) / 2
        case optimizers.Polynomial(min_lr=least, power=power):
            return lambda step: float(least + (base_lr - least) * (1 - done(step)) ** power)
        case _:
            return lambda step: base_lr


def _milestones(config: optimizers.Step, steps_per_epoch: int, total_steps: int) -> list[int]:
    if config.milestones is not None:
        return [round(epoch * steps_per_epoch) for epoch in config.milestones]
    stride = round((config.every or 0) * steps_per_epoch)
    if stride < 1:
        raise ConfigError(f"train.schedule.every: got {config.every} epochs, expected at least one step.")
    return list(range(stride, total_steps + 1, stride))
