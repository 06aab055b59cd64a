"""Field ``train.loss``: what is minimised."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from lbpar.config.section import Flag, Kinds, NonNegative, Positive, Section


class Loss(Section):
    """The base of all losses. Defaults, ranges and meaning of their options are given here only; the op has the same ones."""

    @property
    def kind(self) -> str:
        """The loss, as written in the file."""
        return LOSSES.kind(type(self))

    def options(self) -> dict[str, Any]:
        """All but the name."""
        return {name: getattr(self, name) for name in type(self).model_fields if name != "name"}


LOSSES: Kinds[Loss] = Kinds("name", short=True)


class _Classes(Loss):
    class_weights: tuple[NonNegative, ...] | None = Field(
        default=None,
        description="A factor per class, as PyTorch's `weight`: the mean is divided by those of the targets; a Dice's mean over "
        "classes by those of the classes.",
    )
    ignore_index: Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)] | None = Field(
        default=None, description="Positions with this label count nowhere: not in the loss, not in metrics."
    )


@LOSSES.add
class CrossEntropy(_Classes):
    """Softmax cross-entropy, the mean over samples (and voxels). Where a batch has nothing but ignored positions it is 0."""

    name: Literal["cross_entropy"]


@LOSSES.add
class Focal(_Classes):
    """Focal loss of the softmax: cross-entropy times (1 - p)^gamma, with p the probability of the target."""

    name: Literal["focal"]
    gamma: NonNegative = Field(default=2.0, description="The exponent; 0 is the cross-entropy.")


class _Regions(_Classes):
    eps: Positive = Field(default=1.0, description="Added to both terms of the ratio (nnU-Net: 1e-5).")
    background: Flag = Field(default=True, description="Whether class 0 counts in the mean over classes.")
    per_sample: Flag = Field(
        default=False, description="The mean of each sample's Dice, instead of one over the sums of the whole batch."
    )


@LOSSES.add
class Dice(_Regions):
    """Soft Dice of the softmax: the mean over classes of 1 - (2 Σ p t + eps) / (Σ p + Σ t + eps)."""

    name: Literal["dice"]


@LOSSES.add
class DiceCrossEntropy(_Regions):
    """The weighted sum of `dice` and `cross_entropy` (or `focal`), which most segmentation of volumes is trained with."""

    name: Literal["dice_cross_entropy"]
    dice: Positive = Field(default=1.0, description="Factor of the Dice term.")
    cross_entropy: Positive = Field(default=1.0, description="Factor of the cross-entropy.")
    gamma: NonNegative = Field(
        default=0.0, description="Above 0, the cross-entropy is the focal loss with this exponent."
    )


@LOSSES.add
class Mse(Loss):
    """Mean squared error."""

    name: Literal["mse"]


@LOSSES.add
class L1(Loss):
    """Mean absolute error."""

    name: Literal["l1"]


@LOSSES.add
class Huber(Loss):
    """Mean over errors: half the square up to 1, beyond that the size less a half."""

    name: Literal["huber"]


@LOSSES.add
class Bce(Loss):
    """Binary cross-entropy on logits."""

    name: Literal["bce"]


AnyLoss = Annotated[Loss, LOSSES]


def register_options(kind: str, doc: str) -> None:
    """Let run files name a loss that has no options."""
    fields: Any = {"name": (Literal[kind], ...)}
    LOSSES.add(create_model(kind, __base__=Loss, __doc__=doc, **fields))


METRICS = {
    "dice": "twice the overlap by the sum of both sizes, per class, and its mean over the classes but 0, the background",
    "iou": "overlap by union, likewise",
    "dice_per_volume": "the Dice of each sample by itself, its mean over the samples that have one (the class is in the truth or in the prediction), per class, and the mean "
    "of these over the classes but 0",
    "balanced_accuracy": "the mean over classes of the share of their positions that were found",
    "confusion": "how many positions of each class (rows) were taken for each class (columns)",
    "mae": "mean absolute error",
    "rmse": "root of the mean squared error",
}
"""What evaluation can measure besides the loss and accuracies: names and meaning."""

Metric = Literal["dice", "iou", "dice_per_volume", "balanced_accuracy", "confusion", "mae", "rmse"]
