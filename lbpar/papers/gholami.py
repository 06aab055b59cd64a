"""Gholami et al., "Integrated Model, Batch and Domain Parallelism in Training Neural Networks" (SPAA 2018, arXiv 1712.04432v3).

Communication seconds of one training step on a Pr x Pc grid: Pr processes share a layer's weights (or the space of a
sample), Pc groups share the mini-batch. Equations are numbered as in version 3. ``alpha`` is s per message, ``beta`` s
per 4-byte word, ``batch`` the global mini-batch B. The equations are kept as printed: all layers in both sums, the output
size for both activations collectives, one halo per pass. With ``form`` "log" they are the paper's; "ring" and
"tree" replace the latency (and the tree allreduce its bandwidth).

:func:`recipe_epoch_seconds` is something else: a formula fitted to the bars of Figures 6, 7, 9 and 10, which (8) and
(9) as printed do not give (except the best grids of Figure 7).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lbpar.errors import ConfigError
from lbpar.papers.collectives import (
    Form,
    allgather_seconds,
    allreduce_seconds,
    log2_ceil,
    message_seconds,
)
from lbpar.papers.records import LayerRecord, alexnet

ALPHA = 2e-6  # s, Cori KNL (section 5 of the paper)
BETA = 4 / 6e9  # s per 4-byte word at 6 GB/s, Cori KNL
IMAGES = 1_200_000  # ImageNet as the paper counts it


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


def model_seconds(
    layers: Sequence[LayerRecord], batch: int, procs: int, alpha: float = ALPHA, beta: float = BETA, form: Form = "log"
) -> float:
    """Equation (3): every layer's weights split over all processes."""
    _check(batch, procs)
    return sum(_activations(x, batch, procs, alpha, beta, form) for x in layers)


def batch_seconds(
    layers: Sequence[LayerRecord], procs: int, alpha: float = ALPHA, beta: float = BETA, form: Form = "log"
) -> float:
    """Equation (4): the mini-batch split over all processes."""
    return sum(allreduce_seconds(x.weights, procs, alpha, beta, form) for x in layers)


def volume_ratio(layer: LayerRecord, batch: float) -> float:
    """Equation (5): words of batch over words of model parallelism; batch parallelism wins below 1."""
    return 2 * layer.weights / (3 * batch * layer.outputs)


def crossover_batch(layer: LayerRecord) -> float:
    """The mini-batch at which (5) is 1: batch parallelism wins above, model parallelism below."""
    return 2 * layer.weights / (3 * layer.outputs)


def redistribution_seconds(
    layer: LayerRecord, batch: int, procs: int, alpha: float = ALPHA, beta: float = BETA, form: Form = "log"
) -> float:
    """Equation (6): from batch to model parallelism after ``layer``."""
    _check(batch, procs)
    return allgather_seconds(batch * layer.outputs, procs, alpha, beta, form)


def domain_seconds(
    layers: Sequence[LayerRecord], batch: int, procs: int, alpha: float = ALPHA, beta: float = BETA, form: Form = "log"
) -> float:
    """Equation (7): every sample cut along its height over all processes."""
    _check(batch, procs)
    halos = sum(_halos(x, batch, alpha, beta) for x in layers)
    return halos + batch_seconds(layers, procs, alpha, beta, form)


def integrated(
    layers: Sequence[LayerRecord],
    batch: int,
    pr: int,
    pc: int,
    alpha: float = ALPHA,
    beta: float = BETA,
    form: Form = "log",
) -> Terms:
    """Equation (8): model and batch parallelism, the same Pr x Pc grid for all layers."""
    return by_layer(layers, batch, {x.name: (pr, pc) for x in layers}, (), alpha, beta, form)


def mixed(
    layers: Sequence[LayerRecord],
    batch: int,
    pr: int,
    pc: int,
    domain: Collection[str],
    alpha: float = ALPHA,
    beta: float = BETA,
    form: Form = "log",
) -> Terms:
    """Equation (9): as (8), but the layers named in ``domain`` use their Pr processes on space instead of weights."""
    return by_layer(layers, batch, {x.name: (pr, pc) for x in layers}, domain, alpha, beta, form)


def by_layer(
    layers: Sequence[LayerRecord],
    batch: int,
    grids: Mapping[str, tuple[int, int]],
    domain: Collection[str] = (),
    alpha: float = ALPHA,
    beta: float = BETA,
    form: Form = "log",
) -> Terms:
    """Equations (8) and (9) with a grid of its own for each layer; redistribution between grids is free, as in (6)'s remark."""
    total = Terms()
    for x in layers:
        total += layer_terms(x, batch, *grids[x.name], x.name in domain, alpha, beta, form)
    return total


def layer_terms(
    layer: LayerRecord,
    batch: int,
    pr: int,
    pc: int,
    domain: bool = False,
    alpha: float = ALPHA,
    beta: float = BETA,
    form: Form = "log",
) -> Terms:
    """One layer's share of (8), or of (9) when ``domain``."""
    _check(batch, pr, pc)
    if domain:
        weights = allreduce_seconds(layer.weights, pr * pc, alpha, beta, form)
        return Terms(batch=weights, domain=_halos(layer, batch / pc, alpha, beta))
    return Terms(
        model=_activations(layer, batch / pc, pr, alpha, beta, form),
        batch=allreduce_seconds(layer.weights / pr, pc, alpha, beta, form),
    )


def _activations(layer: LayerRecord, samples: float, p: int, alpha: float, beta: float, form: Form) -> float:
    """Allgather of the outputs forward and allreduce of the input gradients backward, both of d_i words a sample."""
    words = samples * layer.outputs
    return allgather_seconds(words, p, alpha, beta, form) + allreduce_seconds(words, p, alpha, beta, form)


def halo_words(layer: LayerRecord) -> tuple[int, int]:
    """Words of a sample's halo in the forward and in the backward pass: one neighbour each, as in (7)."""
    kh, kw = layer.kernel
    return layer.in_shape[1] * layer.in_shape[2] * (kh // 2), layer.out_shape[1] * layer.out_shape[2] * (kw // 2)


def _halos(layer: LayerRecord, samples: float, alpha: float, beta: float) -> float:
    return sum(message_seconds(samples * words, alpha, beta) for words in halo_words(layer))


def grids(procs: int) -> Iterator[tuple[int, int]]:
    """Every Pr x Pc with Pr * Pc = ``procs``, by increasing Pr."""
    return ((pr, procs // pr) for pr in range(1, procs + 1) if procs % pr == 0)


def fc_only(layers: Sequence[LayerRecord], pr: int, pc: int) -> dict[str, tuple[int, int]]:
    """Grids of Figure 7: convolutions pure batch, fully connected layers on Pr x Pc."""
    return {x.name: (pr, pc) if x.kind == "fc" else (1, pr * pc) for x in layers}


# The recipe of the figures ------------------------------------------------------------------------------------------

W_CONV = 2_332_704  # convolution weights of the grouped AlexNet
W_FC = 37_748_736 + 16_777_216  # fc6 and fc7; the figures leave fc8 out
S_FC = 9216 + 4096 + 2 * (4096 + 4096)  # gathered inputs of fc6 and fc7 and twice their outputs
_CONV_LAYERS, _FC_LAYERS = 5, 3

Figure = Literal["6", "7", "9", "10"]


def recipe_terms(
    figure: Figure, batch: int, pr: int, pc: int, alpha: float = ALPHA, beta: float = BETA, images: int = IMAGES
) -> Terms:
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
    steps = images / batch
    weights = allreduce_bandwidth(W_CONV, p, beta) + allreduce_bandwidth(W_FC / pr, pc, beta)
    messages = 2 * _CONV_LAYERS * log2_ceil(p) + _FC_LAYERS * 2 * log2_ceil(pc)
    return Terms(
        model=steps * (beta * (batch / pc) * (pr - 1) / pr * S_FC + alpha * _FC_LAYERS * 3 * log2_ceil(pr)),
        batch=steps * (weights + alpha * messages),
        domain=steps * beta * samples * 2 * halo,
    )


def allreduce_bandwidth(words: float, p: int, beta: float) -> float:
    """The bandwidth term of an allreduce, without latency."""
    return allreduce_seconds(words, p, 0.0, beta)


def recipe_epoch_seconds(
    figure: Figure, batch: int, pr: int, pc: int, alpha: float = ALPHA, beta: float = BETA, images: int = IMAGES
) -> float:
    """Sum of :func:`recipe_terms`."""
    return recipe_terms(figure, batch, pr, pc, alpha, beta, images).total


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


def compute_epoch_seconds(batch: int, procs: int, images: int = IMAGES) -> float:
    """Compute seconds of an epoch; they depend on B / P only."""
    return images / batch * compute_step_seconds(batch / procs)


def overlapped_epoch_seconds(batch: int, pr: int, pc: int) -> float:
    """Total seconds per epoch of Figure 8: the batch term hides behind the compute time, the model term does not."""
    terms = recipe_terms("7", batch, pr, pc)
    compute = compute_epoch_seconds(batch, pr * pc)
    return compute + max(0.0, terms.batch - compute) + terms.model
