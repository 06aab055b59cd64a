"""OptCNN's cost model (Jia et al., ICML 2018, arXiv 1802.04924): t_o = sum of t_c + t_s over layers + t_x over edges.

A layer's output is cut into equal blocks by degrees (n, h, w, c), one block a device, on any number of devices up to those
available; the summed dimension is never cut. Blocks lie on devices 0, 1, ... in the order of (n, h, w, c). Per step:

* t_c: forward and backward time of a block. The paper measures it; here a :class:`Machine` models it.
* t_s: every replica of a parameter shard sends gradients to the shard's server and gets parameters back, the servers being
  spread over the replicas: 2 * shard bytes / bandwidth, nothing where there is one replica.
* t_x: bytes of the input that its readers need and do not hold, forward and again backward, over the bandwidth of all
  devices together. There is no latency.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lbpar.errors import ConfigError
from lbpar.layout.runs import block
from lbpar.papers.networks import Costs, Floats, Layers

Ints = NDArray[np.int64]
Kind = Literal["conv", "pool", "fc", "softmax", "concat", "add"]

WORD = 4  # bytes
DIMS = ("n", "h", "w", "c")
Degrees = tuple[int, ...]
Size = tuple[int, int, int]


@dataclass(frozen=True)
class Layer:
    """A layer by the shapes of one sample, (h, w, c); an input is cut from ``offset`` channels on by a concatenation.

    ``kernel`` and ``pad`` are per (h, w). A fully connected layer has output (1, 1, features) and reads everything.
    """

    kind: Kind
    inputs: tuple[Size, ...]
    output: Size
    weights: int = 0
    kernel: tuple[int, ...] = (1, 1)
    stride: int = 1
    pad: tuple[int, ...] = (0, 0)


Graph = Layers[Layer]


@dataclass(frozen=True)
class Machine:
    """A P100-like cluster with efficiencies of the kind that measured kernels have.

    Attributes
    ----------
    rate : single-precision operations per second of a device (a multiply-add being two).
    conv_efficiency, fc_efficiency : share of ``rate`` that large convolutions and matrix products reach.
    tile : convolutions compute ``tile`` x ``tile`` output positions at once (Winograd); a block that is no multiple of it
        wastes the rest.
    cache : bytes of the last-level cache. A larger weight shard is read again for every tile position and shared by the
        samples of the block, which costs like ``reread`` further samples.
    saturation : output elements that a matrix product needs to fill the device; smaller blocks run no faster.
    memory_bandwidth : bytes per second, for pooling, softmax and element-wise layers.
    launch : seconds, the least time of a layer.
    node, inside, outside : devices per node; bytes per second of a device inside a node and of a node's network link.
    """

    rate: float = 10.6e12
    conv_efficiency: float = 0.6
    fc_efficiency: float = 0.9
    tile: int = 4
    cache: float = 4 * 2**20
    reread: float = 4.0
    saturation: int = 65536
    memory_bandwidth: float = 732e9
    launch: float = 1e-5
    node: int = 4
    inside: float = 18e9
    outside: float = 12.5e9

    def bandwidth(self, procs: int) -> float:
        """Bytes per second that one device moves when ``procs`` take part: the node's link is shared by its devices."""
        return self.inside if procs <= self.node else self.outside / self.node


def configurations(layer: Layer, batch: int, procs: int) -> list[Degrees]:
    """All degrees (n, h, w, c) of equal blocks on at most ``procs`` devices, in lexicographic order.

    A pooling may also be cut where its input, not its output, falls into equal parts. Concatenations are never cut along
    channels, fully connected layers and the loss never in space (they have none).
    """
    h, w, c = layer.output
    by_input = layer.inputs[0][:2] if layer.kind == "pool" else (h, w)
    extents = ((batch, batch), (h, by_input[0]), (w, by_input[1]), (1 if layer.kind == "concat" else c, 0))
    options = (
        [d for d in range(1, min(extent, procs) + 1) if extent % d == 0 or (also and also % d == 0)]
        for extent, also in extents
    )
    return [d for d in itertools.product(*options) if prod(d) <= procs]


def _bounds(layer: Layer, batch: int, degrees: Degrees, procs: int) -> Ints:
    """Output block of each device, shape (procs, 4, 2); devices without a block have empty ones."""
    out = np.zeros((procs, 4, 2), np.int64)
    for device, where in enumerate(itertools.product(*map(range, degrees))):
        out[device] = [block(0, e, d, i) for e, d, i in zip((batch, *layer.output), degrees, where, strict=True)]
    return out


def _needs(layer: Layer, number: int, bounds: Ints) -> Ints:
    """Region of input ``number`` that each device reads for its output block, same shape as ``bounds``."""
    h, w, c = layer.inputs[number]
    need = bounds.copy()
    used = (bounds[:, :, 1] > bounds[:, :, 0]).all(axis=1)
    if layer.kind == "concat":
        offset = sum(s[2] for s in layer.inputs[:number])
        need[:, 3] = np.clip(bounds[:, 3] - offset, 0, c)
    elif layer.kind in ("conv", "pool"):
        for axis, extent in ((1, h), (2, w)):
            start = bounds[:, axis, 0] * layer.stride - layer.pad[axis - 1]
            stop = (bounds[:, axis, 1] - 1) * layer.stride - layer.pad[axis - 1] + layer.kernel[axis - 1]
            need[:, axis] = np.clip(np.stack([start, stop], axis=1), 0, extent)
        if layer.kind == "conv":
            need[:, 3] = (0, c)
    elif layer.kind in ("fc", "softmax"):
        need[:, 1:] = ((0, h), (0, w), (0, c))
    need[~used] = 0
    return need


def _volume(boxes: Ints) -> Floats:
    return np.clip(boxes[..., 1] - boxes[..., 0], 0, None).prod(axis=-1).astype(np.float64)


def edge_bytes(have: Ints, need: Ints) -> Floats:
    """Bytes moved forward for each pair of configurations, from all the devices' held blocks and needed regions.

    ``have``: (k_u, procs, 4, 2), ``need``: (k_v, procs, 4, 2); returns shape (k_u, k_v).
    """
    wanted = _volume(need)
    out = np.empty((len(have), len(need)))
    for i, held in enumerate(have):
        low = np.maximum(held[None, :, :, 0], need[..., 0])
        high = np.minimum(held[None, :, :, 1], need[..., 1])
        out[i] = (wanted - _volume(np.stack([low, high], axis=-1))).sum(axis=1)
    return out * WORD


def sync_bytes(layer: Layer, degrees: Degrees) -> float:
    """Bytes of gradients and parameters moved for a layer: every replica sends and receives its shard; none if alone."""
    replicas = degrees[0] * degrees[1] * degrees[2]
    return 2.0 * replicas * layer.weights * WORD if replicas > 1 else 0.0


def compute_seconds(layer: Layer, batch: int, degrees: Degrees, machine: Machine) -> float:
    """t_c: forward and backward seconds of the largest block."""
    n, h, w, c = (-(-e // d) for e, d in zip((batch, *layer.output), degrees, strict=True))
    if layer.kind in ("conv", "fc"):
        operations = 3 * 2.0 * n * h * w * (layer.weights / layer.output[2]) * c
        if layer.kind == "fc":
            share = machine.fc_efficiency * min(1.0, n * c / machine.saturation)
        else:
            t = machine.tile
            share = machine.conv_efficiency * h / (-(-h // t) * t) * w / (-(-w // t) * t)
            if layer.weights / degrees[3] * WORD > machine.cache:
                share *= n / (n + machine.reread)
        return max(machine.launch, operations / (machine.rate * share))
    if layer.kind == "concat":
        return 0.0
    read = n * c * (h * w if layer.kind != "pool" else h * layer.stride * w * layer.stride) * len(layer.inputs)
    return max(machine.launch, 2.0 * WORD * (read + n * h * w * c) / machine.memory_bandwidth)


@dataclass(frozen=True, eq=False)
class Tables:
    """Per layer its degrees; t_c + t_s and t_x in seconds, and the bytes behind t_s and t_x."""

    degrees: dict[str, list[Degrees]]
    seconds: Costs
    bytes: Costs

    def choose(self, strategy: Mapping[str, Degrees]) -> dict[str, int]:
        """Configuration numbers of a strategy given by degrees."""
        for name, degrees in strategy.items():
            if degrees not in self.degrees[name]:
                raise ConfigError(f"optcnn: {name} cannot be cut by (n, h, w, c) = {degrees}")
        return {name: self.degrees[name].index(d) for name, d in strategy.items()}


def build_tables(graph: Graph, batch: int, procs: int, machine: Machine | None = None) -> Tables:
    """All configurations of ``graph`` on up to ``procs`` devices, with their costs; equal layers share their arrays."""
    if batch < 1 or procs < 1:
        raise ConfigError(f"optcnn: got batch {batch} on {procs} devices; expected positive numbers")
    machine = machine or Machine()
    speed = machine.bandwidth(procs)

    @cache
    def options(layer: Layer) -> list[Degrees]:
        return configurations(layer, batch, procs)

    @cache
    def held(layer: Layer) -> Ints:
        return np.stack([_bounds(layer, batch, d, procs) for d in options(layer)])

    @cache
    def node(layer: Layer) -> tuple[Floats, Floats]:
        """Seconds and bytes."""
        compute = np.array([compute_seconds(layer, batch, d, machine) for d in options(layer)])
        moved = np.array([sync_bytes(layer, d) for d in options(layer)])
        return compute + moved / np.array([prod(d) for d in options(layer)]) / speed, moved

    @cache
    def edge(u: Layer, v: Layer, number: int) -> tuple[Floats, Floats]:
        moved = 2 * edge_bytes(held(u), np.stack([_needs(v, number, bounds) for bounds in held(v)]))
        return moved / (procs * speed), moved

    layers = graph.layers
    nodes = {n: node(x) for n, x in layers.items()}
    edges = {(a, b): edge(layers[a], layers[b], number) for a, b, number in graph.edges}
    seconds, moved = (
        Costs({n: pair[i] for n, pair in nodes.items()}, {e: pair[i] for e, pair in edges.items()}) for i in (0, 1)
    )
    return Tables({n: options(x) for n, x in layers.items()}, seconds, moved)


def uniform(tables: Tables, letters: str) -> dict[str, Degrees]:
    """A strategy that cuts every layer as far as it can along the first of ``letters`` that it has.

    "n" is data parallelism, "cn" model parallelism: layers without channels to cut are cut along samples.
    """
    out: dict[str, Degrees] = {}
    for name, degrees in tables.degrees.items():
        axes = [DIMS.index(letter) for letter in letters]
        pure = [[d for d in degrees if all(x == 1 for i, x in enumerate(d) if i != axis)] for axis in axes]
        out[name] = max((max(options, key=prod) for options in pure), key=prod)
    return out


def one_weird_trick(graph: Graph, tables: Tables) -> dict[str, Degrees]:
    """Convolutions and poolings cut along samples, fully connected layers along channels."""
    data, model = uniform(tables, "n"), uniform(tables, "cn")
    return {n: model[n] if x.kind in ("fc", "softmax") else data[n] for n, x in graph.layers.items()}


def total_bytes(layers: Iterable[Layer], procs: int) -> float:
    """Bytes of pure data parallelism in a step: every replica sends and receives all parameters, 2 p |W| words."""
    return sum(sync_bytes(x, (procs, 1, 1, 1)) for x in layers)
