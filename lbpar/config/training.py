"""Section ``train``: batch, loss, optimizer and how long to train."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AllowInfNan, Field, Strict, model_validator

from lbpar.config.losses import METRICS, AnyLoss, CrossEntropy, Metric
from lbpar.config.optimizers import AnyOptimizer, AnySchedule, Constant, Sgd
from lbpar.config.section import (
    BelowOne,
    Count,
    Custom,
    Natural,
    NonNegative,
    Positive,
    Section,
    Seed,
    Text,
    check_text,
)
from lbpar.text import nearest

_NUMBERS = ("loss", "accuracy", "test_loss", "test_accuracy", *(f"test_{m}" for m in METRICS if m != "confusion"))
_OF_CLASS = ("test_dice_of", "test_iou_of", "test_dice_per_volume_of")
_OF_OUTPUT = re.compile(
    r"(?P<test>test_)?(?P<output>.+?)_"
    r"(?P<number>loss|accuracy|balanced_accuracy|mae|rmse|dice|iou|dice_per_volume|(dice|iou|dice_per_volume)_of/\d+)"
)


def _watched(value: Any) -> str:
    """A number of the epochs' records: also of one class, as in ``test_dice_of/2``."""
    head, _, number = value.partition("/") if isinstance(value, str) else ("", "", "")
    of_class = head in _OF_CLASS and number.isdecimal()
    if value in _NUMBERS or of_class or of_output(value):  # whether there is such an output is seen to below
        return check_text(value)
    raise ValueError(
        f"{nearest(value, _NUMBERS)}expected one of {', '.join(_NUMBERS)}, or of one class as test_dice_of/1, test_iou_of/1"
    )


def of_output(metric: Any) -> tuple[str, str] | None:
    """The output, and the number without it, of the number of one of several outputs, as ``test_seg_dice`` or ``seg_loss``."""
    found = _OF_OUTPUT.fullmatch(metric) if isinstance(metric, str) else None
    return (found["output"], f"{found['test'] or ''}{found['number']}") if found else None


Growth = Annotated[float, Strict(), AllowInfNan(False), Field(ge=1)]
Backoff = Annotated[float, Strict(), AllowInfNan(False), Field(gt=0, lt=1)]
Watched = Annotated[
    str, Custom(_watched, f"{', '.join(f'`{n}`' for n in _NUMBERS)}, or of class 1 `test_dice_of/1`, `test_iou_of/1`")
]


class Evaluate(Section):
    """When to evaluate on the test split."""

    every_epochs: Count = Field(default=1, description="After every so many epochs, and after the last.")
    batch: Count | None = Field(default=None, description="Samples at a time; default: the training batch.")
    metrics: tuple[Metric, ...] = Field(
        default=(),
        description=f"Measured on the test split, all of it together: {'; '.join(f'`{n}`, {what}' for n, what in METRICS.items())}.",
    )
    watch: Watched | None = Field(
        default=None,
        description="Which number says what weights are the best; default: early_stop's, else test_accuracy with cross_entropy, else test_loss. "
        "Losses and errors should fall, others rise.",
    )


class EarlyStop(Section):
    """Stop when a metric no longer improves."""

    patience: Count = Field(description="Evaluations without improvement after which to stop.")
    metric: Watched = Field(
        default="test_accuracy", description="What is watched; losses and errors should fall, others rise."
    )
    min_delta: NonNegative = Field(default=0.0, description="Smaller changes are no improvement.")


class LossScale(Section):
    """What gradients are multiplied by on their way back, so that small ones do not vanish in float16. Powers of two change no digit."""

    start: Positive = Field(default=65536.0, description="The factor of the first update.")
    interval: Count = Field(default=2000, description="Updates in a row without overflow after which it grows.")
    growth: Growth = Field(default=2.0, description="By how much it grows.")
    backoff: Backoff = Field(
        default=0.5, description="By what it is multiplied after an overflow; that update is left out on all processes."
    )
    most: Positive = Field(default=2.0**24, description="It never grows above this.")


class OutputLoss(Section):
    """The loss of one of several outputs."""

    loss: AnyLoss = Field(description="What is minimised: a name, or a name with options.")
    weight: Positive = Field(default=1.0, description="Its factor in the sum of all.")
    target: Text | None = Field(
        default=None, description="The target that it is compared with; default: called like the output."
    )


class TrainConfig(Section):
    """How to train."""

    batch: Count = Field(description="Samples per step, over all processes (of one accumulation step).")
    epochs: Natural = Field(default=1, description="Passes over the training data.")
    max_steps: Count | None = Field(default=None, description="Stop after so many updates even if epochs remain.")
    loss: AnyLoss = Field(
        default=CrossEntropy(name="cross_entropy"), description="What is minimised: a name, or a name with options."
    )
    losses: dict[str, OutputLoss] = Field(
        default={},
        description="Instead of `loss`, where the network has several outputs: a loss for each, by name. Their weighted sum is minimised; losses "
        "and metrics are reported of each, as `seg_loss`, `test_seg_dice`.",
    )
    label_smoothing: BelowOne = Field(
        default=0.0, description="Part of the target spread over all classes (cross_entropy, dice_cross_entropy)."
    )
    seed: Seed = Field(default=0, description="Fixes weights, sample order, augmentation and dropout.")
    optimizer: AnyOptimizer = Field(default=Sgd(name="sgd", lr=0.01, momentum=0.9), description="The update rule.")
    schedule: AnySchedule = Field(default=Constant(name="constant"), description="The learning rate over time.")
    accumulate: Count = Field(default=1, description="Batches whose gradients are added before each update.")
    clip_norm: Positive | None = Field(default=None, description="Scale gradients down to this global norm.")
    loss_scale: LossScale | None = Field(
        default=None, description="Loss scaling; default: with `engine.dtype: float16`, which needs it, and else not."
    )
    no_decay: tuple[Literal["norm", "bias"], ...] = Field(
        default=("norm", "bias"), description="Kinds of parameters without weight decay; `[]` decays all."
    )
    evaluate: Evaluate = Field(default=Evaluate(), description="When to evaluate.")
    early_stop: EarlyStop | None = Field(default=None, description="When to stop before the last epoch.")

    @model_validator(mode="after")
    def _check_watched(self) -> Any:
        for where, metric in (
            ("evaluate.watch", self.evaluate.watch),
            ("early_stop.metric", self.early_stop and self.early_stop.metric),
        ):
            output = None if metric is None or metric in _NUMBERS else of_output(metric)
            if output and not metric.startswith(tuple(f"{n}/" for n in _OF_CLASS)) and output[0] not in self.losses:  # type: ignore[union-attr]
                raise ValueError(
                    f"{where}: {nearest(str(metric), _NUMBERS)}got {metric}, expected a number of an output in train.losses"
                )
        if self.losses and self.loss != type(self).model_fields["loss"].default:
            raise ValueError("got loss and losses, expected either: losses has one for each output")
        return self
