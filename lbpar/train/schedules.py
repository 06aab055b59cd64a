"""Learning-rate schedules: pure functions of the step.

A schedule is a base learning rate times a factor of the step. The first ``warmup`` steps rise linearly to the base
rate; cosine and polynomial decay over the steps that remain, the milestones of a step schedule count from the start of
training. Steps beyond the end keep the last value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi
from typing import Any

from lbpar.config.fields import as_fields, choose
from lbpar.errors import ConfigError


@dataclass(frozen=True)
class Schedule(ABC):
    """Constant parts of every schedule.

    Parameters
    ----------
    base_lr : float
        Rate at the end of the warm-up.
    total_steps : int
        Steps of the whole training.
    warmup : int
        Steps of linear warm-up.
    warmup_start : float, optional
        Fraction of the base rate at step 0. Default 1 / (warmup + 1): equal increments, never a step of rate 0.
    """

    base_lr: float
    total_steps: int
    warmup: int = 0
    warmup_start: float | None = None

    def __call__(self, step: int) -> float:
        """Learning rate of a step, counted from 0; the same on all ranks."""
        if step >= self.warmup:
            return self.decayed(min(step, max(self.total_steps, self.warmup)))
        start = 1 / (self.warmup + 1) if self.warmup_start is None else self.warmup_start
        return self.decayed(step) * (start + (1 - start) * step / self.warmup)

    @abstractmethod
    def decayed(self, step: int) -> float:
        """Learning rate without the warm-up's factor; cosine and polynomial are at the base rate during warm-up."""

    def progress(self, step: int) -> float:
        """Fraction of the steps after the warm-up that lie behind, from 0 to 1."""
        length = self.total_steps - self.warmup
        return min(max((step - self.warmup) / length, 0.0), 1.0) if length > 0 else 0.0


@dataclass(frozen=True)
class Constant(Schedule):
    """The base rate throughout."""

    def decayed(self, step: int) -> float:
        """See `Schedule.decayed`."""
        return self.base_lr


@dataclass(frozen=True)
class Step(Schedule):
    """Times ``gamma`` at each milestone (in steps, increasing)."""

    milestones: tuple[int, ...] = ()
    gamma: float = 0.1

    def decayed(self, step: int) -> float:
        """See `Schedule.decayed`."""
        return float(self.base_lr * self.gamma ** bisect_right(self.milestones, step))


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from the base rate to ``min_lr``."""

    min_lr: float = 0.0

    def decayed(self, step: int) -> float:
        """See `Schedule.decayed`."""
        return self.min_lr + (self.base_lr - self.min_lr) * (1 + cos(pi * self.progress(step))) / 2


@dataclass(frozen=True)
class Polynomial(Schedule):
    """``(1 - progress) ** power`` from the base rate to ``min_lr``."""

    power: float = 1.0
    min_lr: float = 0.0

    def decayed(self, step: int) -> float:
        """See `Schedule.decayed`."""
        return float(self.min_lr + (self.base_lr - self.min_lr) * (1 - self.progress(step)) ** self.power)


def make_schedule(config: Any, base_lr: float, steps_per_epoch: int, total_steps: int) -> Schedule:
    """Build the schedule that a run file names.

    Parameters
    ----------
    config : None, mapping, dataclass instance or pydantic model
        ``name`` (constant, step, cosine, polynomial), ``warmup_epochs`` or ``warmup_steps``, ``warmup_start``; for step
        ``milestones`` (epochs, may be fractions) or ``every`` (epochs) and ``gamma``; for cosine ``min_lr``; for
        polynomial ``power`` and ``min_lr``. None stands for the default everywhere.
    base_lr : float
        The optimizer's learning rate.
    steps_per_epoch, total_steps : int
        To turn epochs into steps; both at least 1.

    Raises
    ------
    ConfigError
        Unknown schedule or field (with the nearest name), or a value out of range.
    """
    fields = as_fields({} if config is None else config)
    name = choose("schedule", "name", str(fields.pop("name", "constant")).lower(), _MAKERS)
    maker, allowed = _MAKERS[name]
    for field in fields:
        choose(f"schedule {name}", "field", field, _COMMON + allowed)
    own = {k: fields.pop(k) for k in allowed if k in fields}
    common = {
        "base_lr": base_lr,
        "total_steps": total_steps,
        "warmup": _warmup_steps(fields, steps_per_epoch, total_steps),
        "warmup_start": fields.get("warmup_start"),
    }
    _check("warmup_start", common["warmup_start"], lambda v: v is None or 0 <= v <= 1, "a number from 0 to 1")
    return maker(common, own, steps_per_epoch)


def _warmup_steps(fields: dict[str, Any], steps_per_epoch: int, total_steps: int) -> int:
    # a zero is a default that somebody wrote out, not a second warm-up
    if fields.get("warmup_epochs") and fields.get("warmup_steps"):
        raise ConfigError("schedule: warmup_epochs and warmup_steps are both given, expected one of them.")
    epochs, steps = fields.get("warmup_epochs") or 0, fields.get("warmup_steps") or 0
    _check("warmup_epochs", epochs, lambda v: v >= 0, "a number >= 0")
    _check("warmup_steps", steps, lambda v: v >= 0, "an integer >= 0")
    warmup = int(steps) or round(epochs * steps_per_epoch)
    if warmup > total_steps:
        raise ConfigError(
            f"schedule: the warm-up takes {warmup} steps, expected at most the training's {total_steps}. "
            "Shorten the warm-up or train for more epochs."
        )
    return warmup


def _make_constant(common: dict[str, Any], own: dict[str, Any], steps_per_epoch: int) -> Schedule:
    return Constant(**common)


def _make_step(common: dict[str, Any], own: dict[str, Any], steps_per_epoch: int) -> Schedule:
    gamma, every = own.get("gamma", 0.1), own.get("every")
    milestones = list(own.get("milestones") or [])
    _check("gamma", gamma, lambda v: v > 0, "a number > 0")
    _check("milestones", milestones, lambda v: all(e > 0 for e in v) and v == sorted(v), "increasing epochs > 0")
    if (every is None) == (not milestones):
        raise ConfigError(f"schedule step: got milestones {milestones} and every {every}, expected one of the two.")
    if every is not None:
        _check("every", every, lambda v: round(v * steps_per_epoch) >= 1, "a number of epochs of at least one step")
        stride = round(every * steps_per_epoch)
        steps = tuple(range(stride, common["total_steps"] + 1, stride))
    else:
        steps = tuple(round(epoch * steps_per_epoch) for epoch in milestones)
    return Step(**common, milestones=steps, gamma=gamma)


def _make_cosine(common: dict[str, Any], own: dict[str, Any], steps_per_epoch: int) -> Schedule:
    return Cosine(**common, min_lr=_min_lr(own))


def _make_polynomial(common: dict[str, Any], own: dict[str, Any], steps_per_epoch: int) -> Schedule:
    power = own.get("power", 1.0)
    _check("power", power, lambda v: v > 0, "a number > 0")
    return Polynomial(**common, power=power, min_lr=_min_lr(own))


def _min_lr(own: dict[str, Any]) -> float:
    value = float(own.get("min_lr", 0.0))
    _check("min_lr", value, lambda v: v >= 0, "a number >= 0")
    return value


def _check(field: str, value: Any, ok: Callable[[Any], bool], expected: str) -> None:
    if not ok(value):
        raise ConfigError(f"schedule: {field} is {value}, expected {expected}.")


_Maker = Callable[[dict[str, Any], dict[str, Any], int], Schedule]
_COMMON = ("warmup_epochs", "warmup_steps", "warmup_start")
_MAKERS: dict[str, tuple[_Maker, tuple[str, ...]]] = {
    "constant": (_make_constant, ()),
    "step": (_make_step, ("milestones", "every", "gamma")),
    "cosine": (_make_cosine, ("min_lr",)),
    "polynomial": (_make_polynomial, ("power", "min_lr")),
}
