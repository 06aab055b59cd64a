"""The cost model of PaSE's public prototype (Elango, IPDPS 2021; github.com/baidu-research/PaSE), exactly.

Costs are in floating-point operations, a multiply-add counted as one; a word is 8 bytes and is worth ``flops_per_word``
operations of the device. There is no latency, and convolutions are never split in space. A vertex' configuration is one
split factor per loop dimension; the product is at most the number of processes.

Vertices of the same shape share one table of configurations and costs, and edges between the same shapes share one
matrix, stored by the distinct splits of the tensor (an `EdgeTable`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lbpar.errors import ConfigError
from lbpar.papers.networks import Costs, Floats, Layers
from lbpar.solver.search import EdgeTable

Ints = NDArray[np.int64]

CUTOFF = 4  # a block is at least this long, or the dimension is whole
WORD_BYTES = 8
_EXPONENTIAL = 3.0  # operations of one exponential
_NORM_OPERATIONS = 8.0  # per element and pass
_SOFTMAX_WORDS = 2.0  # per sample where the classes are split

Kind = Literal["conv", "linear", "pool", "norm", "add", "concat", "mean", "ravel", "unravel", "softmax"]


@dataclass(frozen=True)
class Vertex:
    """A layer: its loop dimensions and how they index its tensors.

    Attributes
    ----------
    loops : one letter per loop dimension, "bchwrsn" for a convolution, "bnc" for a linear layer.
    extents : extent of each loop; ``whole`` lists the letters that may not be split.
    inputs : shape of each input tensor; ``reads``: the letter that splits each of its dimensions.
    output, writes : the same for the output tensor.
    window : kernel height and width of a pooling, for its halo.
    pointwise : fused point-wise operations.
    """

    kind: Kind
    loops: str
    extents: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    reads: str
    output: tuple[int, ...]
    writes: str
    whole: str = ""
    window: tuple[int, ...] = (1, 1)
    pointwise: int = 0


@dataclass(frozen=True)
class Machine:
    """Device rate (10^12 operations/s, a multiply-add being one), link bandwidth (10^9 B/s), least length of a block."""

    tflops: float = 10.0
    gbps: float = 16.0
    cutoff: int = CUTOFF

    def __post_init__(self) -> None:
        if self.tflops <= 0 or self.gbps <= 0 or self.cutoff < 1:
            raise ConfigError(
                f"pase: got {self.tflops} TFLOPS, {self.gbps} GB/s, cutoff {self.cutoff}; expected positive numbers"
            )

    @property
    def flops_per_word(self) -> float:
        """Operations in the time of one word."""
        return self.tflops * 1000 / (self.gbps / WORD_BYTES)

    def allreduce(self, words: Floats, procs: Floats | Ints) -> Floats:
        """Ring allreduce of ``words`` over ``procs``, in operations; nothing over one process."""
        return self.flops_per_word * 2.0 * (procs - 1) * words / procs


Graph = Layers[Vertex]


@cache
def _divisors(n: int) -> tuple[int, ...]:
    """Divisors of ``n`` in increasing order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return (*small, *(n // d for d in reversed(small) if d * d != n))


def configurations(extents: Sequence[int], procs: int, cutoff: int = CUTOFF) -> Ints:
    """All split factors, shape (k, dims): divisors that leave at least ``cutoff`` (or 1), with product at most ``procs``.

    Rows are in lexicographic order.
    """
    options = [tuple(d for d in _divisors(n) if n / d >= cutoff and d <= procs) or (1,) for n in extents]
    rows = np.ones((1, len(extents)), np.int64)
    products = np.ones(1, np.int64)
    for dim, choices in enumerate(options):
        if choices == (1,):
            continue
        grown = np.multiply.outer(products, np.array(choices))
        which, option = np.nonzero(grown <= procs)
        rows = rows[which]
        rows[:, dim] = np.array(choices)[option]
        products = grown[which, option]
    return rows


def vertex_configurations(vertex: Vertex, procs: int, cutoff: int = CUTOFF) -> Ints:
    """Configurations of ``vertex``, shape (k, loops)."""
    extents = [1 if letter in vertex.whole else n for letter, n in zip(vertex.loops, vertex.extents, strict=True)]
    rows = configurations(extents, procs, cutoff)
    if vertex.kind in ("ravel", "unravel"):
        rows = rows[[_contiguous(vertex.extents, row) for row in rows.tolist()]]
    return rows


def _contiguous(extents: Sequence[int], row: Sequence[int]) -> bool:
    """Whether the blocks of ``row`` are contiguous in row-major order: whole dimensions after the first partly split one."""
    rest = itertools.dropwhile(lambda pair: pair[0] == pair[1], zip(extents, row, strict=True))
    return all(c == 1 for _, c in itertools.islice(rest, 1, None))


def node_costs(vertex: Vertex, rows: Ints, machine: Machine) -> Floats:
    """Compute and intra-layer communication of every configuration, shape (k,), in operations."""
    split = {letter: rows[:, i].astype(np.float64) for i, letter in enumerate(vertex.loops)}
    local = {letter: n / split[letter] for letter, n in zip(vertex.loops, vertex.extents, strict=True)}
    return _COSTS[vertex.kind](vertex, split, local, machine)


Blocks = dict[str, Floats]


def _product(of: Blocks, letters: str) -> Floats:
    out = of[letters[0]]
    for letter in letters[1:]:
        out = out * of[letter]
    return out


def _gemm(vertex: Vertex, split: Blocks, local: Blocks, machine: Machine, m: str, n: str, k: str) -> Floats:
    """A matrix product with loop groups m (rows), n (columns), k (summed): one product forward, two backward."""
    lm, ln, lk = (_product(local, letters) for letters in (m, n, k))
    pm, pn, pk = (_product(split, letters) for letters in (m, n, k))
    compute = 3 * lm * ln * lk + 3 * vertex.pointwise * lm * ln
    sums = machine.allreduce(lm * ln, pk) + machine.allreduce(lm * lk, pn) + machine.allreduce(ln * lk, pm)
    return compute + sums


def _pool(vertex: Vertex, split: Blocks, local: Blocks, machine: Machine) -> Floats:
    b, c, h, w = (n / split[letter] for n, letter in zip(vertex.inputs[0], "bchw", strict=True))
    r, s = vertex.window
    ghosts = b * c * ((h + r * (split["h"] > 1)) * (w + s * (split["w"] > 1)) - h * w)
    return _product(local, vertex.loops) + machine.flops_per_word * ghosts


def _norm(vertex: Vertex, split: Blocks, local: Blocks, machine: Machine) -> Floats:
    """The prototype normalises along the batch dimension: that is the axis it reduces over."""
    axis, others = vertex.loops[0], vertex.loops[1:]
    elements = _product(local, vertex.loops)
    moments = machine.allreduce(elements / local[axis], split[axis])
    scales = machine.allreduce(local[axis], _product(split, others))
    return 2 * _NORM_OPERATIONS * elements + 4 * moments + 4 * scales


def _add(vertex: Vertex, split: Blocks, local: Blocks, machine: Machine) -> Floats:
    return (1 + vertex.pointwise) * _product(local, vertex.loops)


def _free(vertex: Vertex, split: Blocks, local: Blocks, machine: Machine) -> Floats:
    return np.zeros_like(split[vertex.loops[0]])


def _mean(vertex: Vertex, split: Blocks, local: Blocks, machine: Machine) -> Floats:
    return machine.allreduce(_product(local, vertex.loops), _product(split, "hw"))


def _softmax(vertex: Vertex, split: Blocks, local: Blocks, machine: Machine) -> Floats:
    samples = local["b"]
    exchanged = machine.flops_per_word * _SOFTMAX_WORDS * samples * (split["n"] > 1)
    return (_EXPONENTIAL + 1) * samples * local["n"] + 2 * samples + exchanged


_COSTS: dict[str, Callable[[Vertex, Blocks, Blocks, Machine], Floats]] = {
    "conv": partial(_gemm, m="bhw", n="n", k="crs"),
    "linear": partial(_gemm, m="b", n="n", k="c"),
    "pool": _pool,
    "norm": _norm,
    "add": _add,
    "concat": _free,
    "mean": _mean,
    "ravel": _free,
    "unravel": _free,
    "softmax": _softmax,
}


def tensor_splits(vertex: Vertex, rows: Ints, letters: str) -> Ints:
    """Split factors of a tensor's dimensions, shape (k, dims); "*" stands for all loops together (a flat tensor)."""
    if letters == "*":
        return rows.prod(axis=1, keepdims=True)
    return rows[:, [vertex.loops.index(letter) for letter in letters]]


def edge_costs(shape: Sequence[int], have: Ints, need: Ints, machine: Machine) -> Floats:
    """Words moved between a producer's and a consumer's splits of a tensor, in operations, shape (len(have), len(need)).

    Twice, for the tensor and its gradient, what a block of the consumer needs less what it shares with a block of the
    producer: block shapes are compared, not positions, and nothing is shared if the consumer splits into more blocks.
    """
    extents = np.asarray(shape, np.float64)
    held, wanted = extents / have, extents / need
    shared = np.ones((len(have), len(need)))
    for d in range(len(shape)):
        shared *= np.minimum.outer(held[:, d], wanted[:, d])
    shared[have.prod(axis=1)[:, None] < need.prod(axis=1)[None, :]] = 0.0
    return machine.flops_per_word * 2.0 * np.maximum(wanted.prod(axis=1)[None, :] - shared, 0.0)


def _distinct(splits: Ints, procs: int) -> tuple[Ints, Ints]:
    """Distinct rows of ``splits`` in lexicographic order, and the number of each row among them."""
    if (procs + 1) ** splits.shape[1] < 2**62:  # a row is one number in base procs + 1, much quicker to sort
        weights = np.array([(procs + 1) ** i for i in reversed(range(splits.shape[1]))], np.int64)
        _, first, index = np.unique(splits @ weights, return_index=True, return_inverse=True)
        return splits[first], index
    found, index = np.unique(splits, axis=0, return_inverse=True)
    return found, index.reshape(-1)


@dataclass(frozen=True, eq=False)
class Tables(Costs):
    """Everything a search needs: costs, and per vertex its configurations (k, loops)."""

    configurations: dict[str, Ints]

    def row(self, name: str, configuration: Sequence[int]) -> int:
        """Number of a configuration of vertex ``name``."""
        hit = np.flatnonzero((self.configurations[name] == np.asarray(configuration)).all(axis=1))
        if hit.size == 0:
            raise ConfigError(f"pase: {name} has no configuration {tuple(configuration)}")
        return int(hit[0])


def build_tables(graph: Graph, procs: int, machine: Machine | None = None) -> Tables:
    """Configurations and costs of every vertex and edge of ``graph`` over ``procs`` processes.

    Vertices and edges of equal shapes get the very same arrays.
    """
    if procs < 1:
        raise ConfigError(f"pase: got {procs} processes; expected at least 1")
    machine = machine or Machine()
    tables: dict[tuple[tuple[int, ...], int, int], Floats] = {}
    distinct: dict[bytes, Ints] = {}

    @cache
    def rows(vertex: Vertex) -> Ints:
        return vertex_configurations(vertex, procs, machine.cutoff)

    @cache
    def costs(vertex: Vertex) -> Floats:
        return node_costs(vertex, rows(vertex), machine)

    @cache
    def splits(vertex: Vertex, letters: str) -> tuple[Ints, Ints]:
        """Distinct splits of a tensor of ``vertex``, and which of them each configuration has."""
        found, index = _distinct(tensor_splits(vertex, rows(vertex), letters), procs)
        return distinct.setdefault(found.tobytes() + bytes([found.shape[1]]), found), index

    @cache
    def edge(u: Vertex, v: Vertex) -> EdgeTable:
        (have, classes), (need, columns) = splits(u, u.writes), splits(v, v.reads)
        key = (u.output, id(have), id(need))
        if key not in tables:
            tables[key] = edge_costs(u.output, have, need, machine)
        return EdgeTable(tables[key], classes, columns)

    layers = graph.layers
    edges = {(a, b): edge(layers[a], layers[b]) for a, b, _ in graph.edges}
    return Tables({n: costs(v) for n, v in layers.items()}, edges, {n: rows(v) for n, v in layers.items()})
