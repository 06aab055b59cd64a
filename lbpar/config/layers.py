"""Layers written inline in a run file: a small type per op, so that a wrong field is refused with the nearest."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lbpar.config.section import (
    Count,
    Custom,
    Flag,
    Fraction,
    Naturals,
    NonNegative,
    Pad,
    Positive,
    Section,
    Sizes,
    Text,
    check_text,
)

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
    """What every layer may say."""

    name: Text | None = Field(
        default=None, description="Name, unique in the network; default: op and a running number."
    )
    sources: Sources = Field(
        default=None,
        alias="from",
        description="Where its input comes from: `input` or a name; default: the layer before.",
    )

    @property
    def kind(self) -> str:
        """The op, as written in the file."""
        return str(self.op)  # type: ignore[attr-defined]


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


class Conv(_Convolution):
    """Convolution."""

    op: Literal["conv"]


class ConvTranspose(_Convolution):
    """Transposed convolution."""

    op: Literal["conv_transpose"]
    output_pad: Naturals = Field(default=0, description="Extra rows at the end of the output.")


class _Pool(Layer):
    kernel: Sizes = Field(description="Window size.")
    stride: Sizes | None = Field(default=None, description="Step of the window; default: the kernel.")
    pad: Pad = Field(default=0, description="Padding around the input.")
    ceil_mode: Flag = Field(default=False, description="Round the output size up, so that the last window may be cut.")


class MaxPool(_Pool):
    """Maximum over a window."""

    op: Literal["max_pool"]
    dilation: Sizes = Field(default=1, description="Distance between the elements of a window.")


class AvgPool(_Pool):
    """Mean over a window."""

    op: Literal["avg_pool"]
    count_include_pad: Flag = Field(default=True, description="Whether padding counts in the divisor.")


class GlobalAvgPool(Layer):
    """Mean over all of space."""

    op: Literal["global_avg_pool"]


class Norm(Layer):
    """Batch normalisation per channel."""

    op: Literal["norm"]
    eps: Positive = Field(default=1e-5, description="Added to the variance.")
    momentum: Fraction = Field(default=0.1, description="Weight of the new value in the running statistics.")
    affine: Flag = Field(default=True, description="Learn a scale and a shift per channel.")
    stats: NormStats = Field(
        default="global",
        description="Which processes merge their training statistics: all, those that share the same samples, or none; "
        "see `parallel.norm`, which says it for all norms.",
    )


class Relu(Layer):
    """Maximum of x and 0."""

    op: Literal["relu"]


class LeakyRelu(Layer):
    """x where positive, else slope · x."""

    op: Literal["leaky_relu"]
    slope: NonNegative = Field(default=0.01, description="Slope for negative inputs.")


class Sigmoid(Layer):
    """1 / (1 + exp(-x))."""

    op: Literal["sigmoid"]


class Tanh(Layer):
    """scale · tanh(x)."""

    op: Literal["tanh"]
    scale: Positive = Field(default=1.0, description="The output lies between -scale and scale.")


class Add(Layer):
    """Sum of two or more layers of one shape."""

    op: Literal["add"]


class Multiply(Layer):
    """Product of two or more layers of one shape."""

    op: Literal["multiply"]


class Concat(Layer):
    """Join of two or more layers along the channels."""

    op: Literal["concat"]


class Flatten(Layer):
    """All dimensions of a sample as one."""

    op: Literal["flatten"]


class Linear(Layer):
    """Fully connected layer."""

    op: Literal["linear"]
    features: Count = Field(description="Number of outputs.")
    bias: Flag = Field(default=True, description="Add a bias per output.")
    init: Init = _INIT


class Dropout(Layer):
    """Set a random part of the elements to zero while training."""

    op: Literal["dropout"]
    rate: Fraction = Field(default=0.5, description="Part of the elements that is dropped.")


class Upsample(Layer):
    """Nearest-neighbour enlargement."""

    op: Literal["upsample"]
    factor: Sizes = Field(default=2, description="How many times larger.")


AnyLayer = Annotated[
    Conv
    | ConvTranspose
    | MaxPool
    | AvgPool
    | GlobalAvgPool
    | Norm
    | Relu
    | LeakyRelu
    | Sigmoid
    | Tanh
    | Add
    | Multiply
    | Concat
    | Flatten
    | Linear
    | Dropout
    | Upsample,
    Field(discriminator="op"),
]
JOINS = ("add", "multiply", "concat")
