"""Section ``train``: batch, loss, optimizer and how long to train."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lbpar.config.optimizers import AnyOptimizer, AnySchedule, Constant, Sgd
from lbpar.config.section import BelowOne, Count, Custom, Natural, NonNegative, Positive, Section, Seed
from lbpar.text import nearest

LOSSES = {
    "cross_entropy": "softmax cross-entropy",
    "mse": "mean squared error",
    "l1": "mean absolute error",
    "huber": "mean of half the square up to an error of 1, of its size less a half beyond",
    "bce": "binary cross-entropy on logits",
    "dice": "soft Dice of the softmax (sums over the whole batch per class, 1 added to both terms of the ratio, mean over classes)",
}
"""Names and meaning; more can be added (`lbpar.graph.ops.losses.register_loss`)."""


def _loss(value: Any) -> str:
    if isinstance(value, str) and value in LOSSES:
        return value
    raise ValueError(f"{nearest(value, LOSSES)}expected one of {', '.join(LOSSES)}")


LossName = Annotated[str, Custom(_loss, ", ".join(f"`{name}`" for name in LOSSES))]


class Evaluate(Section):
    """When to evaluate on the test split."""

    every_epochs: Count = Field(default=1, description="After every so many epochs, and after the last.")
    batch: Count | None = Field(default=None, description="Samples at a time; default: the training batch.")


class EarlyStop(Section):
    """Stop when a metric no longer improves."""

    patience: Count = Field(description="Evaluations without improvement after which to stop.")
    metric: Literal["loss", "accuracy", "test_loss", "test_accuracy"] = Field(
        default="test_accuracy",
        description="What is watched; losses should fall, accuracies (of cross_entropy and dice) rise.",
    )
    min_delta: NonNegative = Field(default=0.0, description="Smaller changes are no improvement.")


class TrainConfig(Section):
    """How to train."""

    batch: Count = Field(description="Samples per step, over all processes (of one accumulation step).")
    epochs: Natural = Field(default=1, description="Passes over the training data.")
    max_steps: Count | None = Field(default=None, description="Stop after so many updates even if epochs remain.")
    loss: LossName = Field(
        default="cross_entropy",
        description=f"What is minimised: {'; '.join(f'`{name}`, {what}' for name, what in LOSSES.items())}.",
    )
    label_smoothing: BelowOne = Field(
        default=0.0, description="Part of the target spread over all classes (cross_entropy)."
    )
    seed: Seed = Field(default=0, description="Fixes weights, sample order, augmentation and dropout.")
    optimizer: AnyOptimizer = Field(default=Sgd(name="sgd", lr=0.01, momentum=0.9), description="The update rule.")
    schedule: AnySchedule = Field(default=Constant(name="constant"), description="The learning rate over time.")
    accumulate: Count = Field(default=1, description="Batches whose gradients are added before each update.")
    clip_norm: Positive | None = Field(default=None, description="Scale gradients down to this global norm.")
    no_decay: tuple[Literal["norm", "bias"], ...] = Field(
        default=("norm", "bias"), description="Kinds of parameters without weight decay; `[]` decays all."
    )
    evaluate: Evaluate = Field(default=Evaluate(), description="When to evaluate.")
    early_stop: EarlyStop | None = Field(default=None, description="When to stop before the last epoch.")
