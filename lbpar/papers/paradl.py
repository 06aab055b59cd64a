"""ParaDL's oracle (Kahira et al., HPDC 2021): communication per epoch and memory per process of one strategy for all layers.

Ring collectives. ``alpha`` s per message, ``beta`` s per byte, ``item`` bytes per element, ``data`` samples of an epoch,
``batch`` the global mini-batch. Sizes of a layer are elements per sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lbpar.errors import ConfigError
from lbpar.papers.collectives import Link
from lbpar.papers.records import LayerRecord


@dataclass(frozen=True)
class Setting:
    """What does not depend on the layers."""

    data: int
    batch: int
    alpha: float
    beta: float
    item: int = 4

    @property
    def steps(self) -> float:
        """Steps per epoch."""
        return self.data / self.batch

    @property
    def ring(self) -> Link:
        """Ring collectives of elements."""
        return Link(self.alpha, self.beta * self.item, "ring")


@dataclass(frozen=True)
class Price:
    """Communication seconds per epoch, bytes per process, and the largest number of processes the strategy allows."""

    seconds: float
    memory: float
    most: int


def data_parallel(layers: Sequence[LayerRecord], s: Setting, p: int) -> Price:
    """Samples over ``p`` processes; the weight gradients are summed."""
    _check(p)
    memory = 2 * s.item * sum(s.batch / p * _activations(x) + x.weights for x in layers)
    return Price(s.steps * _sum_weights(layers, s, p), memory, s.batch)


def spatial_parallel(layers: Sequence[LayerRecord], s: Setting, p: int) -> Price:
    """Height and width over ``p`` processes: halos of x forward and of dy backward."""
    _check(p)
    halos = sum(s.ring.message(s.batch * n) for x in layers for n in _halos(x))
    memory = 2 * s.item * sum(s.batch * _activations(x) / p + x.weights for x in layers)
    return Price(
        s.steps * (_sum_weights(layers, s, p) + 2 * halos),
        memory,
        min(h * w for x in layers for h, w, _ in (x.in_shape, x.out_shape)),
    )


def filter_parallel(layers: Sequence[LayerRecord], s: Setting, p: int) -> Price:
    """Filters over ``p`` processes: y gathered forward, dx summed backward, for all layers but the last."""
    _check(p)
    memory = 2 * s.item * sum(s.batch * _activations(x) + x.weights / p for x in layers)
    return Price(s.steps * _exchange(layers, s, s.batch, p), memory, min(x.out_shape[2] for x in layers))


def data_filter_parallel(layers: Sequence[LayerRecord], s: Setting, p1: int, p2: int) -> Price:
    """``p1`` sample groups of ``p2`` processes that split the filters; weight gradients are summed across the groups."""
    _check(p1, p2)
    seconds = s.steps * (_exchange(layers, s, s.batch / p1, p2) + _sum_weights(layers, s, p1, p2))
    memory = 2 * s.item * sum(s.batch * _activations(x) / p1 + x.weights / p2 for x in layers)
    return Price(seconds, memory, s.batch * min(x.out_shape[2] for x in layers))


def pipeline_parallel(stages: Sequence[Sequence[LayerRecord]], s: Setting, segments: int) -> Price:
    """One stage of consecutive layers per process, the mini-batch in ``segments`` pieces."""
    p = len(stages)
    _check(p, segments)
    slowest = max(s.ring.message(s.batch / segments * stage[-1].outputs) for stage in stages)
    memory = 2 * s.item * max(sum(s.batch * _activations(x) + x.weights for x in stage) for stage in stages)
    return Price(2 * s.data * (p + segments - 2) / s.batch * slowest, memory, sum(map(len, stages)))


def _activations(x: LayerRecord) -> int:
    return x.inputs + x.outputs


def _halos(x: LayerRecord) -> tuple[int, int]:
    """Elements per sample that one process gets from one neighbour above, of the input and of the output gradient."""
    (_, wi, c), (_, wo, f) = x.in_shape, x.out_shape
    return x.kernel[0] // 2 * wi * c, x.kernel[0] // 2 * wo * f


def _check(*procs: int) -> None:
    if min(procs) < 1:
        raise ConfigError(f"paradl: got {'x'.join(map(str, procs))} processes; expected positive numbers")


def _sum_weights(layers: Sequence[LayerRecord], s: Setting, p: int, parts: int = 1) -> float:
    """Ring allreduce over ``p`` processes of one of ``parts`` parts of the weights."""
    return s.ring.allreduce(sum(x.weights for x in layers) / parts, p)


def _exchange(layers: Sequence[LayerRecord], s: Setting, samples: float, p: int) -> float:
    """3 (p - 1) (alpha + B |y| item beta / p) for every layer but the last: an allgather and an allreduce of y."""
    return sum(3 * s.ring.allgather(samples * x.outputs, p) for x in layers[:-1])
