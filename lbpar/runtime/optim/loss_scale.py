"""Loss scaling: small gradients are kept from vanishing in half types, and updates that overflowed are left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lbpar.config.training import LossScale
from lbpar.engine.base import Engine
from lbpar.engine.device import Array
from lbpar.errors import ConfigError, TrainingError
from lbpar.program.steps import Compute, Program
from lbpar.runtime.binding import loss_gradient
from lbpar.runtime.optim.base import flat

SMALLEST = 2.0**-14
"""A factor below which no overflow is the factor's fault: half types hold what is 2**30 times as large."""


def check_scalable(program: Program) -> None:
    """Refuse a loss whose gradient cannot be scaled."""
    own = [s.kernel for s in program.steps if isinstance(s, Compute) and s.kernel.name.endswith("_backward")]
    if not any(map(loss_gradient, own)):
        raise ConfigError(
            "train.loss_scale: no kernel of this loss says how to scale its gradient, expected one with the attribute scale; choose "
            "engine.dtype: bfloat16 or float32, or a loss of lbpar."
        )


@dataclass
class Scaler:
    """The factor by which gradients are multiplied on their way back, the same on all ranks.

    Parameters
    ----------
    config : LossScale
    engine : Engine
    reduce : callable
        Takes a float64 array and returns its sum over all ranks.

    Attributes
    ----------
    scale : float
    good : int
        Updates since it last changed.
    skipped : int
        Updates left out since the start.
    """

    config: LossScale
    engine: Engine
    reduce: Callable[[Array], Array]
    scale: float = field(init=False)
    good: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        self.scale = self.config.start

    def unscale(self, grads: Mapping[str, Array]) -> bool:
        """Divide gradients by the scale, in place; whether all are finite on all ranks. Collective over these."""
        bad = self.engine.unscale([flat(name, g) for name, g in grads.items()], 1 / self.scale)
        return self.update(float(self.engine.to_host(self.reduce(bad))[0]) == 0)

    def update(self, finite: bool) -> bool:
        """Count an update; the next scale follows. Gives ``finite`` back.

        Raises
        ------
        TrainingError
            Gradients overflow however small the scale is.
        """
        if finite:
            self.good += 1
            if self.good == self.config.interval:
                self.scale, self.good = min(self.scale * self.config.growth, self.config.most), 0
        else:
            self.skipped += 1
            self.scale, self.good = self.scale * self.config.backoff, 0
            if self.scale < SMALLEST:
                raise TrainingError(
                    f"train.loss_scale: gradients are not finite even with a loss scale of {self.scale / self.config.backoff:g}; "
                    "lower the learning rate, clip gradients (train.clip_norm), or choose engine.dtype: bfloat16 or float32."
                )
        return finite

    def state_dict(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave."""
        self.scale, self.good, self.skipped = float(state["scale"]), int(state["good"]), int(state["skipped"])
