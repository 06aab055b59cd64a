"""Gholami et al., "Integrated Model, Batch and Domain Parallelism in Training Neural Networks" (SPAA 2018, arXiv 1712.04432v3).

Communication seconds of one training step on a Pr x Pc grid: Pr processes share a layer's weights (or the space of a
sample), Pc groups share the mini-batch. Equations are numbered as in version 3; words have 4 bytes, ``batch`` is the global
mini-batch B. The equations are kept as printed: all layers in both sums, the output size for both activations collectives, one halo
per pass. (3), (4) and (7) are (8) and (9) on one column or row. With a link of form "log" they are the paper's; "ring" and "tree"
replace the latency (and the tree allreduce its bandwidth).

:func:`recipe_terms` is something else: a formula fitted to the bars of Figures 6, 7, 9 and 10, which (8) and (9) as printed do not
give (except the best grids of Figure 7).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from lbpar.errors import ConfigError
from lbpar.papers import networks
from lbpar.papers.collectives import Link, log2_ceil
from lbpar.papers.records import LayerRecord, layer_records

CORI = Link(2e-6, 4 / 6e9)
"""Cori KNL, section 5 of the paper: 2 microseconds, 6 GB/s."""
IMAGES = 1_200_000  # ImageNet as the paper counts it

Grids = Mapping[str, tuple[int, int]]
"""Pr x Pc of each layer, by name."""


@cache
def alexnet() -> tuple[LayerRecord, ...]:
    """The eight weighted layers of the original AlexNet, 60,954,656 weights."""
    return layer_records(networks.alexnet(groups=2))


@dataclass(frozen=True)
class Terms:
    """Communication seconds by what causes them: activations (model), weight gradients (batch), halos (domain)."""

    model: float = 0.0
    batch: float = 0.0
    domain: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the three."""
        return self.model + self.batch + self.domain

    def __add__(self, other: Terms) -> Terms:
        return Terms(self.model + other.model, self.batch + other.batch, self.domain + other.domain)


def _check(batch: float, *procs: int) -> None:
    if batch <= 0 or any(p < 1 for p in procs):
        raise ConfigError(
            f"gholami: got batch {batch} on a grid {'x'.join(map(str, procs))}; expected positive numbers"
        )


def volume_ratio(layer: LayerRecord, batch: float) -> float:
    """Equation (5): words of batch over words of model parallelism; batch parallelism wins below 1."""
    return 2 * layer.weights / (3 * batch * layer.outputs)


def crossover_batch(layer: LayerRecord) -> float:
    """The mini-batch at which (5) is 1: batch parallelism wins above, model parallelism below."""
    return 2 * layer.weights / (3 * layer.outputs)


def redistribution_seconds(layer: LayerRecord, batch: int, procs: int, link: Link = CORI) -> float:
    """Equation (6): from batch to model parallelism after ``layer``."""
    _check(batch, procs)
    return link.allgather(batch * layer.outputs, procs)


def by_layer(
    layers: Sequence[LayerRecord], batch: int, grids: Grids, domain: Collection[str] = (), link: Link = CORI
) -> Terms:
    """Equations (8) and (9): a grid for each layer; redistribution between grids is free, as in (6)'s remark.

    The layers named in ``domain`` use their Pr processes on space instead of weights, as in (9).
    """
    return sum((layer_terms(x, batch, *grids[x.name], x.name in domain, link) for x in layers), Terms())


def layer_terms(layer: LayerRecord, batch: int, pr: int, pc: int, domain: bool = False, link: Link = CORI) -> Terms:
    """One layer's share of (8), or of (9) when ``domain``."""
    _check(batch, pr, pc)
    samples = batch / pc
    if domain:
        halos = sum(link.message(samples * words) for words in halo_words(layer))
        return Terms(batch=link.allreduce(layer.weights, pr * pc), domain=halos)
    words = (
        samples * layer.outputs
    )  # gathered forward; the input gradients are summed backward, of as many words in the paper
    return Terms(
        model=link.allgather(words, pr) + link.allreduce(words, pr), batch=link.allreduce(layer.weights / pr, pc)
    )


def halo_words(layer: LayerRecord) -> tuple[int, int]:
    """Words of a sample's halo in the forward and in the backward pass: one neighbour each, as in (7)."""
    kh, kw = layer.kernel
    return layer.in_shape[1] * layer.in_shape[2] * (kh // 2), layer.out_shape[1] * layer.out_shape[2] * (kw // 2)


def grids(procs: int) -> Iterator[tuple[int, int]]:
    """Every Pr x Pc with Pr * Pc = ``procs``, by increasing Pr."""
    return ((pr, procs // pr) for pr in range(1, procs + 1) if procs % pr == 0)


def one_grid(layers: Sequence[LayerRecord], pr: int, pc: int) -> Grids:
    """All layers on Pr x Pc."""
    return {x.name: (pr, pc) for x in layers}


def fc_only(layers: Sequence[LayerRecord], pr: int, pc: int) -> Grids:
    """Grids of Figure 7: convolutions pure batch, fully connected layers on Pr x Pc."""
    return {x.name: (pr, pc) if x.kind == "fc" else (1, pr * pc) for x in layers}


# The recipe of the figures ------------------------------------------------------------------------------------------

W_CONV = 2_332_704  # convolution weights of the grouped AlexNet
W_FC = 37_748_736 + 16_777_216  # fc6 and fc7; the figures leave fc8 out
S_FC = 9216 + 4096 + 2 * (4096 + 4096)  # gathered inputs of fc6 and fc7 and twice their outputs
_CONV_LAYERS, _FC_LAYERS = 5, 3

Figure = Literal["6", "7", "9", "10"]


def recipe_terms(figure: Figure, batch: int, pr: int, pc: int, link: Link = CORI) -> Terms:
    """Communication seconds per epoch of a bar of Figures 6, 7, 9 or 10, by a formula fitted to the drawn bars.

    The convolutions' weight gradients are always summed over all P processes. In Figure 6 a grid with Pr > 1 pays halos
    for the convolutions, in Figure 10 it does where P exceeds the batch (one image per group).
    """
    _check(batch, pr, pc)
    p = pr * pc
    halo = sum(sum(halo_words(x)) for x in alexnet() if x.kind == "conv")
    samples = 0.0
    if figure == "6" and pr > 1:
        samples = batch / pc
    elif figure == "10" and p > batch:
        samples = 1.0
    steps, wire = IMAGES / batch, Link(0.0, link.beta)
    messages = 2 * _CONV_LAYERS * log2_ceil(p) + _FC_LAYERS * 2 * log2_ceil(pc)
    weights = wire.allreduce(W_CONV, p) + wire.allreduce(W_FC / pr, pc)
    return Terms(
        model=steps * (wire.allgather(batch / pc * S_FC, pr) + link.alpha * _FC_LAYERS * 3 * log2_ceil(pr)),
        batch=steps * (weights + link.alpha * messages),
        domain=steps * link.beta * samples * 2 * halo,
    )


# Seconds of one AlexNet step on one KNL by images per process, read from the figures; below one image the paper halves.
_IMAGES_PER_PROCESS = (1, 4, 16, 64, 256)
_STEP_SECONDS = (0.0290, 0.0380, 0.0607, 0.148, 0.478)


def compute_step_seconds(images_per_process: float) -> float:
    """Compute seconds of a step: the figures' values, log-log between them, in proportion outside."""
    if images_per_process <= 1:
        return _STEP_SECONDS[0] * images_per_process
    if images_per_process >= _IMAGES_PER_PROCESS[-1]:
        return _STEP_SECONDS[-1] * images_per_process / _IMAGES_PER_PROCESS[-1]
    return float(np.exp(np.interp(np.log(images_per_process), np.log(_IMAGES_PER_PROCESS), np.log(_STEP_SECONDS))))


def compute_epoch_seconds(batch: int, procs: int) -> float:
    """Compute seconds of an epoch; they depend on B / P only."""
    return IMAGES / batch * compute_step_seconds(batch / procs)


def overlapped_epoch_seconds(batch: int, pr: int, pc: int) -> float:
    """Total seconds per epoch of Figure 8: the batch term hides behind the compute time, the model term does not."""
    terms = recipe_terms("7", batch, pr, pc)
    compute = compute_epoch_seconds(batch, pr * pc)
    return compute + max(0.0, terms.batch - compute) + terms.model
