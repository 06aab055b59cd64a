"""Channel and filter parallelism: stationary-X, -Y and -W (Dryden et al., SC 2019; DiHydrogen's DistConv).

P processes form groups of G that share a sample block; every layer's input x and output y are split G ways along their
channels. Volumes are words that one process sends in one training step (the bandwidth term of ring collectives).

==============  ==============================================  =============================================
variant         forward                                         backward
==============  ==============================================  =============================================
stationary-X    reduce-scatter y over the group                 allgather dy over the group
stationary-Y    allgather x over the group                      reduce-scatter dx over the group
stationary-W    allgather x over G_F, reduce-scatter y over     allgather dy over G_C, reduce-scatter dx over
                G_C (G = G_C G_F)                               G_F
==============  ==============================================  =============================================

All three then sum the weight gradients over the P / G processes that hold the same part of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lbpar.errors import ConfigError
from lbpar.papers.collectives import Link

Variant = Literal["X", "Y", "W"]


@dataclass(frozen=True)
class Conv:
    """A convolution as one group of processes sees it.

    ``samples`` of the group; ``channels`` C and ``filters`` F in all; spatial sizes local to the group; ``kernel``
    positions K^2 (k_h * k_w).
    """

    samples: int
    channels: int
    filters: int
    in_spatial: int
    out_spatial: int
    kernel: int

    @property
    def input_words(self) -> int:
        """S_x = n C H W."""
        return self.samples * self.channels * self.in_spatial

    @property
    def output_words(self) -> int:
        """S_y = n F H' W'."""
        return self.samples * self.filters * self.out_spatial

    @property
    def weights(self) -> int:
        """F C K^2."""
        return self.filters * self.channels * self.kernel


def volume_x(conv: Conv, group: int) -> float:
    """V_X: words sent for activations with x in place."""
    return 2 * (group - 1) / group * conv.output_words


def volume_y(conv: Conv, group: int) -> float:
    """V_Y: words sent for activations with y in place."""
    return 2 * (group - 1) / group * conv.input_words


def volume_w(conv: Conv, channel_groups: int, filter_groups: int) -> float:
    """V_W: words sent for activations with w in place, cut into G_C x G_F; V_Y for G_C = 1 and V_X for G_F = 1."""
    x = 2 * (filter_groups - 1) / filter_groups * conv.input_words / channel_groups
    y = 2 * (channel_groups - 1) / channel_groups * conv.output_words / filter_groups
    return x + y


def volume_allreduce(conv: Conv, procs: int, group: int) -> float:
    """V_AR: words sent for weight gradients over the Q = P / G processes of a segment; G = 1 is data parallelism."""
    if group < 1 or procs % group:
        raise ConfigError(f"dryden: got groups of {group} among {procs} processes; expected a divisor")
    segment = procs // group
    return 2 * (segment - 1) / segment * conv.weights / group


@dataclass(frozen=True)
class Choice:
    """A variant with its G_C x G_F and the words it sends for activations."""

    variant: Variant
    channel_groups: int
    filter_groups: int
    words: float


def choices(conv: Conv, group: int) -> Iterator[Choice]:
    """X, Y and every proper W of ``group`` processes."""
    if group < 1:
        raise ConfigError(f"dryden: got a group of {group}; expected at least 1")
    yield Choice("X", group, 1, volume_x(conv, group))
    yield Choice("Y", 1, group, volume_y(conv, group))
    for filter_groups in range(2, group):
        if group % filter_groups == 0:
            parts = (group // filter_groups, filter_groups)
            yield Choice("W", *parts, volume_w(conv, *parts))


def best_choice(conv: Conv, group: int) -> Choice:
    """The variant that sends least; on a tie the simpler one (X, then Y, then W)."""
    return min(choices(conv, group), key=lambda c: c.words)


def seconds(conv: Conv, choice: Choice, procs: int, link: Link) -> float:
    """Communication seconds of a training step: the variant's collectives and the segmented allreduce."""
    gc, gf = choice.channel_groups, choice.filter_groups
    activations = link.allgather(conv.input_words / gc, gf) + link.allgather(conv.output_words / gf, gc)
    return 2 * activations + link.allreduce(conv.weights / (gc * gf), procs // (gc * gf))


def extra_words(conv: Conv, choice: Choice) -> float:
    """Words of the gathered buffers that a process keeps: S_y (X), S_x (Y), S_x / G_C + S_y / G_F (W)."""
    x = conv.input_words / choice.channel_groups if choice.filter_groups > 1 else 0.0
    y = conv.output_words / choice.filter_groups if choice.channel_groups > 1 else 0.0
    return x + y
