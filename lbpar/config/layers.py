"""Layers written inline in a run file: a small type per op, so that a wrong field is refused with the nearest."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, create_model

from lbpar.config.section import (
    BelowOne,
    Count,
    Custom,
    Flag,
    Kinds,
    Naturals,
    NonNegative,
    Pad,
    Positive,
    Section,
    Sizes,
    Text,
    UpToOne,
    check_text,
)
from lbpar.text import shorten

NormStats = Literal["global", "sample", "local"]
"""Over which processes a norm's training statistics are merged: all, those that share the same samples, or none."""


def _sources(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = value if isinstance(value, (list, tuple)) else (value,)
    if names and all(isinstance(v, str) and v for v in names):
        return tuple(map(check_text, names))
    raise ValueError("expected the name of a layer, or a list of names")


Sources = Annotated[tuple[str, ...] | None, Custom(_sources, "name of a layer or `input`, or a list of names")]


class Layer(Section):
    """The fields that every layer has. Those of a kind are the options of its op; their defaults, ranges and meaning are given here only."""

    joins: ClassVar[bool] = False  # whether it takes several inputs

    name: Text | None = Field(
        default=None, description="Name, unique in the network; default: op and a running number."
    )
    sources: Sources = Field(
        default=None,
        alias="from",
        description="Where its input comes from: `input` or a name; default: the layer before.",
    )

    share: Text | None = Field(
        default=None,
        description="An earlier layer whose parameters it has, of the same names and shapes; gradients of both are added. Default: its own.",
    )

    @property
    def kind(self) -> str:
        """The op, as written in the file."""
        return LAYERS.kind(type(self))

    @classmethod
    def own(cls) -> list[str]:
        """Names of the op's options, in order."""
        return [name for name in cls.model_fields if name not in ("op", *Layer.model_fields)]

    def options(self, rank: int) -> dict[str, Any]:
        """The op's options, with an entry per spatial dimension where they are sizes.

        Raises
        ------
        ValueError
            A list is not as long as there are spatial dimensions.
        """
        out = {name: getattr(self, name) for name in self.own()}
        for name, spread in _spreads(type(self)).items():
            if out[name] is not None:
                try:
                    out[name] = spread(out[name], rank)
                except ValueError as error:
                    raise ValueError(f"{name}: got {shorten(out[name])}, {error}") from None
        return out

    @classmethod
    def has_sizes(cls) -> bool:
        """Whether its options are about spatial dimensions."""
        return bool(_spreads(cls))


LAYERS: Kinds[Layer] = Kinds("op")


@cache
def _spreads(layer: type[Layer]) -> dict[str, Callable[[Any, int], Any]]:
    """Options that are given per spatial dimension, and how one entry is made of them for each."""
    found: dict[str, Callable[[Any, int], Any]] = {}
    for name in layer.own():
        field = layer.model_fields[name]
        marks = [*field.metadata, *(m for a in get_args(field.annotation) for m in getattr(a, "__metadata__", ()))]
        found.update((name, m.spread) for m in marks if isinstance(m, Custom) and m.spread is not None)
    return found


def _plain(op: str, text: str, joins: bool = False) -> type[Layer]:
    """A layer without options of its own."""
    word: Any = Literal[op]
    made = create_model(op, __base__=Layer, __doc__=text, op=(word, ...))
    made.joins = joins
    return LAYERS.add(made)


Init = Literal["he", "glorot"]
_INIT: Any = Field(default="he", description="Initial weights: He (normal, for relu) or Glorot (uniform).")


class _Convolution(Layer):
    filters: Count = Field(description="Number of filters, the channels of the output.")
    kernel: Sizes = Field(description="Kernel size.")
    stride: Sizes = Field(default=1, description="Step of the window.")
    pad: Pad = Field(default=0, description="Zeros around the input.")
    dilation: Sizes = Field(default=1, description="Distance between taps of the kernel.")
    groups: Count = Field(default=1, description="Number of groups; channels and filters must divide by it.")
    bias: Flag = Field(default=True, description="Add a bias per filter.")
    init: Init = _INIT


PadMode = Literal["zeros", "reflect", "replicate"]
_MODE: Any = Field(
    default="zeros",
    description="What lies around: zeros, the inputs mirrored at the first and last, or these repeated.",
)


@LAYERS.add
class Conv(_Convolution):
    """Convolution."""

    op: Literal["conv"]
    pad_mode: PadMode = _MODE


@LAYERS.add
class ConvTranspose(_Convolution):
    """Transposed convolution."""

    op: Literal["conv_transpose"]
    output_pad: Naturals = Field(default=0, description="Extra rows at the end of the output.")


class _Pool(Layer):
    kernel: Sizes = Field(description="Window size.")
    stride: Sizes | None = Field(default=None, description="Step of the window; default: the kernel.")
    pad: Pad = Field(default=0, description="Padding around the input.")
    ceil_mode: Flag = Field(default=False, description="Round the output size up, so that the last window may be cut.")


@LAYERS.add
class MaxPool(_Pool):
    """Maximum over a window."""

    op: Literal["max_pool"]
    dilation: Sizes = Field(default=1, description="Distance between the elements of a window.")


@LAYERS.add
class AvgPool(_Pool):
    """Mean over a window."""

    op: Literal["avg_pool"]
    count_include_pad: Flag = Field(default=True, description="Whether padding counts in the divisor.")


GlobalAvgPool = _plain("global_avg_pool", "Mean over all of space.")


@LAYERS.add
class Norm(Layer):
    """Batch normalisation per channel."""

    op: Literal["norm"]
    eps: Positive = Field(default=1e-5, description="Added to the variance.")
    momentum: UpToOne = Field(default=0.1, description="Weight of the new value in the running statistics.")
    affine: Flag = Field(default=True, description="Learn a scale and a shift per channel.")
    stats: NormStats = Field(
        default="global",
        description="Which processes merge their training statistics: all, those that share the same samples, or none; "
        "see `parallel.norm`, which says it for all norms.",
    )


class _SampleNorm(Layer):
    eps: Positive = Field(default=1e-5, description="Added to the variance.")
    affine: Flag = Field(default=True, description="Learn a scale and a shift per channel.")


@LAYERS.add
class InstanceNorm(_SampleNorm):
    """Normalisation of each channel of each sample, over space. Keeps no running statistics."""

    op: Literal["instance_norm"]


@LAYERS.add
class GroupNorm(Layer):
    """Normalisation of each group of channels of each sample, over space and the group. Keeps no running statistics."""

    op: Literal["group_norm"]
    groups: Count = Field(description="Number of groups of neighbouring channels; the channels must divide by it.")
    eps: Positive = Field(default=1e-5, description="Added to the variance.")
    affine: Flag = Field(default=True, description="Learn a scale and a shift per channel.")


@LAYERS.add
class LayerNorm(_SampleNorm):
    """Normalisation of each position of each sample, over the channels. Keeps no running statistics."""

    op: Literal["layer_norm"]


Relu = _plain("relu", "Maximum of x and 0.")


@LAYERS.add
class LeakyRelu(Layer):
    """x where positive, else slope · x."""

    op: Literal["leaky_relu"]
    slope: NonNegative = Field(default=0.01, description="Slope for negative inputs.")


@LAYERS.add
class PRelu(Layer):
    """x where positive, else a learnt slope times x, at first 0.25."""

    op: Literal["prelu"]
    per_channel: Flag = Field(default=False, description="A slope per channel, not one for all.")


Sigmoid = _plain("sigmoid", "1 / (1 + exp(-x)).")


@LAYERS.add
class Tanh(Layer):
    """scale · tanh(x)."""

    op: Literal["tanh"]
    scale: Positive = Field(default=1.0, description="The output lies between -scale and scale.")


@LAYERS.add
class Elu(Layer):
    """x where positive, else alpha · (exp(x) - 1)."""

    op: Literal["elu"]
    alpha: NonNegative = Field(default=1.0, description="The output lies above -alpha.")


@LAYERS.add
class Gelu(Layer):
    """x times the normal distribution's probability of less than x."""

    op: Literal["gelu"]
    approximate: Literal["none", "tanh"] = Field(default="none", description="Exact, or by a hyperbolic tangent.")


Silu = _plain("silu", "x / (1 + exp(-x)), also called swish.")


@LAYERS.add
class Softplus(Layer):
    """log(1 + exp(beta · x)) / beta."""

    op: Literal["softplus"]
    beta: Positive = Field(default=1.0, description="How sharp the bend at 0 is.")


@LAYERS.add
class Hardsigmoid(Layer):
    """slope · x + 1/2, between 0 and 1."""

    op: Literal["hardsigmoid"]
    slope: Positive = Field(default=1 / 6, description="Slope in between.")


Hardswish = _plain("hardswish", "x · (x / 6 + 1/2, between 0 and 1), as in MobileNet v3.")


@LAYERS.add
class LocalResponseNorm(Layer):
    """x / (k + alpha · mean of x² over neighbouring channels)^beta, as in AlexNet."""

    op: Literal["local_response_norm"]
    size: Count = Field(default=5, description="Number of neighbouring channels, its own in the middle.")
    alpha: NonNegative = Field(default=1e-4, description="Factor of the mean of squares.")
    beta: NonNegative = Field(default=0.75, description="The exponent.")
    k: Positive = Field(default=1.0, description="Added to the mean of squares.")


Softmax = _plain(
    "softmax",
    "Exponentials over their sum, over the channels. The loss `cross_entropy` contains one; do not put it before that.",
)


@LAYERS.add
class ChannelShuffle(Layer):
    """Channels as a table of `groups` rows, read column by column, as in ShuffleNet."""

    op: Literal["channel_shuffle"]
    groups: Count = Field(description="Number of groups; the channels must divide by it.")


Add = _plain("add", "Sum of two or more layers of one shape.", joins=True)
Multiply = _plain("multiply", "Product of two or more layers of one shape.", joins=True)
Concat = _plain("concat", "Join of two or more layers along the channels.", joins=True)
Flatten = _plain("flatten", "All dimensions of a sample as one.")


@LAYERS.add
class Linear(Layer):
    """Fully connected layer."""

    op: Literal["linear"]
    features: Count = Field(description="Number of outputs.")
    bias: Flag = Field(default=True, description="Add a bias per output.")
    init: Init = _INIT


@LAYERS.add
class Dropout(Layer):
    """Set a random part of the elements to zero while training."""

    op: Literal["dropout"]
    rate: BelowOne = Field(default=0.5, description="Part of the elements that is dropped.")


@LAYERS.add
class Upsample(Layer):
    """Enlargement, to the nearest neighbour or linear in each dimension (bilinear, trilinear)."""

    op: Literal["upsample"]
    factor: Sizes = Field(default=2, description="How many times larger.")
    mode: Literal["nearest", "linear"] = Field(default="nearest", description="How new elements follow from old ones.")
    align_corners: Flag = Field(
        default=False,
        description="With `linear`: the first and last elements stay where they are, as PyTorch's `align_corners`.",
    )


@LAYERS.add
class PadLayer(Layer):
    """A rim around space: of zeros, or of what lies inside."""

    op: Literal["pad"]
    pad: Pad = Field(description="How many before and after.")
    mode: PadMode = _MODE


@LAYERS.add
class Crop(Layer):
    """Space without its rim."""

    op: Literal["crop"]
    crop: Pad = Field(description="How much to leave out before and after.")


Fit = _plain(
    "fit",
    "The first of two layers, cropped or padded with zeros at the ends to the spatial extents of the second.",
    joins=True,
)
AnyLayer = Annotated[Layer, LAYERS]
