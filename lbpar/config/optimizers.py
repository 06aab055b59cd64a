"""Fields ``train.optimizer`` and ``train.schedule``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lbpar.config.section import MOST, BelowOne, Flag, Kinds, NonNegative, Number, Positive, Section


class Optimizer(Section):
    """The fields that every update rule has. Defaults, ranges and meaning of options are given here only."""

    slots: ClassVar[tuple[str, ...]] = ()  # arrays of state, each like the parameter

    lr: Positive = Field(description="Learning rate after warm-up.")
    weight_decay: NonNegative = Field(default=0.0, description="Factor of the L2 term (decoupled in adamw, lamb).")

    @property
    def kind(self) -> str:
        """The rule, as written in the file."""
        return OPTIMIZERS.kind(type(self))

    @property
    def state(self) -> tuple[str, ...]:
        """The arrays of state that these options need."""
        return self.slots


OPTIMIZERS: Kinds[Optimizer] = Kinds("name")


@OPTIMIZERS.add
class Sgd(Optimizer):
    """Gradient descent with momentum, as PyTorch's `SGD`."""

    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    name: Literal["sgd"]
    momentum: BelowOne = Field(default=0.0, description="Factor of the running gradient.")
    nesterov: Flag = Field(default=False, description="Nesterov's form of momentum.")

    @model_validator(mode="after")
    def _check(self) -> Sgd:
        if self.nesterov and not self.momentum:
            raise ValueError("got nesterov without momentum, expected momentum above 0")
        return self

    @property
    def state(self) -> tuple[str, ...]:
        """The velocity, if there is momentum."""
        return self.slots if self.momentum else ()


class _Adaptive(Optimizer):
    slots: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    lr: Positive = Field(default=1e-3, description="Learning rate after warm-up.")
    betas: tuple[BelowOne, BelowOne] = Field(default=(0.9, 0.999), description="Factors of the two running moments.")
    eps: Positive = Field(default=1e-8, description="Added to the denominator.")


@OPTIMIZERS.add
class Adam(_Adaptive):
    """Adam, weight decay added to the gradient, as PyTorch's `Adam`."""

    name: Literal["adam"]


@OPTIMIZERS.add
class AdamW(_Adaptive):
    """Adam with decoupled weight decay, as PyTorch's `AdamW`."""

    name: Literal["adamw"]
    weight_decay: NonNegative = Field(default=1e-2, description="Part of the weights taken off per unit of rate.")


@OPTIMIZERS.add
class Lars(Optimizer):
    """Layer-wise adaptive rate scaling: SGD whose step is scaled by ‖w‖ / ‖dw‖ of each tensor."""

    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    name: Literal["lars"]
    momentum: BelowOne = Field(default=0.9, description="Factor of the running gradient.")
    trust: Positive = Field(default=0.001, description="Trust coefficient η.")
    eps: NonNegative = Field(default=0.0, description="Added to the denominator of the ratio.")


@OPTIMIZERS.add
class Lamb(_Adaptive):
    """Adam whose step is scaled by ‖w‖ / ‖step‖ of each tensor."""

    name: Literal["lamb"]
    eps: Positive = Field(default=1e-6, description="Added to the denominator.")


AnyOptimizer = Annotated[Optimizer, OPTIMIZERS]


class Schedule(Section):
    """The fields that every schedule has."""

    warmup_epochs: NonNegative = Field(
        default=0.0, le=MOST, description="Epochs over which the rate rises linearly; may be a fraction."
    )
    warmup_start: NonNegative | None = Field(
        default=None, le=1, description="Part of the rate at which warm-up starts; default: one increment."
    )


SCHEDULES: Kinds[Schedule] = Kinds("name")


@SCHEDULES.add
class Constant(Schedule):
    """The same rate throughout."""

    name: Literal["constant"]


@SCHEDULES.add
class Step(Schedule):
    """The rate times `gamma` at given epochs."""

    name: Literal["step"]
    every: Positive | None = Field(
        default=None, le=MOST, description="Multiply each time so many epochs have passed; may be a fraction."
    )
    milestones: tuple[Positive, ...] | None = Field(default=None, description="Or: multiply at these epochs.")
    gamma: Positive = Field(default=0.1, description="The factor.")

    @model_validator(mode="after")
    def _check(self) -> Step:
        if (self.every is None) == (self.milestones is None):
            raise ValueError("expected exactly one of every and milestones")
        if self.milestones is not None and not (self.milestones and list(self.milestones) == sorted(self.milestones)):
            raise ValueError(f"milestones: got {list(self.milestones)}, expected epochs in increasing order")
        return self


@SCHEDULES.add
class Cosine(Schedule):
    """Half a cosine from the rate down to `min_lr` at the last step."""

    name: Literal["cosine"]
    min_lr: NonNegative = Field(default=0.0, description="Rate at the end.")


@SCHEDULES.add
class Polynomial(Schedule):
    """From the rate down to `min_lr` at the last step, as (1 - t)^power."""

    name: Literal["polynomial"]
    power: Number = Field(default=1.0, gt=0, description="The exponent.")
    min_lr: NonNegative = Field(default=0.0, description="Rate at the end.")


AnySchedule = Annotated[Schedule, SCHEDULES]
