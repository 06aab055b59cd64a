"""Parameter groups: what differs between weights, biases and the scales and shifts of normalisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lbpar.errors import ConfigError

KINDS = ("weight", "bias", "norm")


@dataclass(frozen=True)
class Group:
    """Exceptions for the parameters of one kind.

    Parameters
    ----------
    weight_decay : float, optional
        Replaces the optimizer's weight decay; None keeps it.
    lr_scale : float
        Multiplies the learning rate.
    adapt : bool
        Whether LARS and LAMB scale the step by the trust ratio; other optimizers ignore it.
    """

    weight_decay: float | None = None
    lr_scale: float = 1.0
    adapt: bool = True

    def __post_init__(self) -> None:
        if self.weight_decay is not None and self.weight_decay < 0:
            raise ConfigError(f"parameter group: weight_decay is {self.weight_decay}, expected a number >= 0.")
        if self.lr_scale < 0:
            raise ConfigError(f"parameter group: lr_scale is {self.lr_scale}, expected a number >= 0.")


def undecayed(kinds: Iterable[str] = ("bias", "norm"), adapt: bool = False) -> dict[str, Group]:
    """Groups without weight decay for ``kinds``; LARS and LAMB also leave them unscaled unless ``adapt``."""
    return {kind: Group(weight_decay=0.0, adapt=adapt) for kind in kinds}


def check_groups(groups: Mapping[str, Group]) -> dict[str, Group]:
    """The groups as a dict of their own; ConfigError if a kind is unknown."""
    for kind in groups:
        if kind not in KINDS:
            raise ConfigError(f"parameter groups: unknown kind {kind!r}, expected one of {', '.join(KINDS)}.")
    return dict(groups)
