"""A machine as the cost model sees it: seconds of a collective, seconds of a kernel.

Communication is alpha-beta per axis level: a group that spans several levels works inside the fast one first and sends
what is left over the slow one (Thakur, Rabenseifner and Gropp 2005 for the terms). Bytes are those of
`lbpar.layout.exchange.volume`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files
from math import ceil, log2, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lbpar.config.machine_file import Latency, LevelConfig, LinkConfig, MachineFile, RateConfig, load_machine_file
from lbpar.config.report import check
from lbpar.config.yaml_text import parse_yaml
from lbpar.errors import ConfigError
from lbpar.layout.cuts import pick
from lbpar.layout.grid import Axes, Grid
from lbpar.layout.transition import MoveKind
from lbpar.text import nearest

#: A number, or an array of one number per configuration.
Many = Any

#: Where kernels were measured in one of these only, it stands for the other: the arrays are the same, and so are all kernels but products.
ALIKE = {"tf32": "float32", "float32": "tf32"}

#: Speeds of a machine file that are those of moves' own copies.
COPIES = ("rows", "columns")


def measured_as(kind: str) -> str:
    """The kind of move whose measured links stand for one of kind ``kind``."""
    return "p2p" if kind in ("halo", "accumulate") else kind


@dataclass(frozen=True)
class Part:
    """The part of a group that lies on one level: ``ways`` processes, alpha [s], bandwidth [B/s]."""

    ways: int
    level: LevelConfig

    def link(self, kind: MoveKind) -> LevelConfig | LinkConfig:
        """What holds for a move: its own entry, of the size that is nearest, or the level."""
        named = measured_as(kind)
        of_kind = [m for m in self.level.moves if m.kind == named]
        return min(of_kind, key=lambda m: abs(log2(m.ways / self.ways)), default=self.level)


class Term(NamedTuple):
    """Seconds of a move: its start (if anything is sent), each message, each byte, and what each byte beyond so many takes longer."""

    start: Many
    message: Many
    byte: Many
    beyond: Many = 0.0
    knee: Many = 0.0

    def seconds(self, sent: Many, messages: Many) -> Many:
        """Seconds of so many bytes in so many messages."""
        line = self.start * (messages > 0) + self.message * messages + self.byte * sent
        return line + self.beyond * np.maximum(0.0, sent - self.knee)


Terms = tuple[Term, Term]


@dataclass(frozen=True, eq=False)
class Machine:
    """A machine file with what follows from it.

    Parameters
    ----------
    file : MachineFile
        Levels, latency form, memory and compute rates.
    """

    file: MachineFile

    @property
    def name(self) -> str:
        """Its name."""
        return self.file.name

    @property
    def memory(self) -> int:
        """Bytes of memory of one device."""
        return self.file.memory

    def level(self, grid: Grid, axis: int) -> int:
        """Number of the level whose links an axis uses: the fastest that still joins all ranks of a group along it."""
        span = grid.strides[axis] * grid.sizes[axis]
        reach = 1
        last = len(self.file.levels) - 1
        for i, level in enumerate(self.file.levels):
            reach *= level.size or 1
            if i == last or (span <= reach and reach % span == 0):
                return i
        return last

    def parts(self, grid: Grid, axes: Axes) -> tuple[Part, ...]:
        """The levels that a group over ``axes`` spans, fastest first."""
        return _parts(self, grid, tuple(axes))

    def terms(self, kind: MoveKind, parts: Sequence[Part]) -> Terms:
        """What a move's seconds are made of: two forms, of which the faster one is taken.

        Parameters
        ----------
        kind : str
            Kind of move.
        parts : sequence of Part
            The levels of its group, fastest first.
        """
        if kind == "slice" or not parts:
            return (Term(0.0, 0.0, 0.0),) * 2
        links = [(x.ways, x.link(kind)) for x in parts]
        p, form, slow = prod(x.ways for x in parts), self.file.latency, links[-1][1]
        start = alpha = beta = 0.0
        inside = 1
        if kind == "allreduce" and form == "tree":
            hops = sum(_hops(ways, form) * x.alpha for ways, x in links)
            return (Term(hops, 0.0, sum(_hops(ways, form) / x.bandwidth for ways, x in links) * p / (2 * (p - 1))),) * 2
        if kind in ("allreduce", "reduce_scatter", "allgather"):
            for ways, x in links:
                inside *= ways
                start += (2 if kind == "allreduce" else 1) * _hops(ways, form) * x.alpha
                beta += (ways - 1) / inside / ((p - 1) / p) / x.bandwidth
            return (Term(start, 0.0, beta, *slow.large),) * 2
        if kind != "alltoall":
            return (Term(0.0, slow.alpha, 1 / slow.bandwidth, *slow.large),) * 2
        for ways, x in links:
            share = (inside * ways - inside) / (p - 1)
            inside *= ways
            alpha, beta = alpha + share * x.alpha, beta + share / x.bandwidth
        pairwise = Term(0.0, alpha, beta, *slow.large)
        if form != "log" or isinstance(slow, LinkConfig):  # what was measured were messages between pairs
            return pairwise, pairwise
        hops = _hops(p, "log")  # in log p rounds (Bruck), each of which carries half of all data
        return pairwise, Term(hops * slow.alpha, 0.0, hops / 2 / slow.bandwidth)

    def move_seconds(self, kind: MoveKind, parts: Sequence[Part], sent: float, messages: float) -> float:
        """Seconds of one move in which the busiest rank sends so many bytes in so many messages."""
        return min(t.seconds(sent, messages) for t in self.terms(kind, parts))

    def oversubscription(self, active: Many, procs: int) -> Many:
        """How many times longer a kernel takes because processes share cores.

        Parameters
        ----------
        active : float or array
            Processes, of all ``procs``, that run it at the same time.
        """
        if self.file.cores is None:
            return 1.0
        nodes = max(1.0, procs / (self.file.levels[0].size or procs))
        return np.maximum(1.0, active / nodes / self.file.cores)

    def copy_seconds(self, size: Many, columns: Many = False) -> Many:
        """Seconds to read and write so many bytes of a part of an array; of ``columns`` that is a part of each row, not rows."""
        rows, parts = self._copy_speeds
        return 2 * size / pick(columns, parts, rows)

    @property
    def columns_differ(self) -> bool:
        """Whether parts of rows are copied at another speed than rows."""
        rows, parts = self._copy_speeds
        return rows != parts

    @property
    def _copy_speeds(self) -> tuple[float, float]:
        c = self.file.compute
        rows = c.speeds.get("rows", c.memory_bandwidth)
        return rows, c.speeds.get("columns", rows)

    def sum_seconds(self, size: Many, count: Many) -> Many:
        """Seconds to add up ``count`` arrays of so many bytes."""
        c = self.file.compute
        return size * count / c.memory_bandwidth + c.starts.get("add", 0.0)

    @property
    def half_arrays(self) -> bool:
        """Whether activations of half types take two bytes."""
        return self.file.compute.half_arrays

    @property
    def volume_copies(self) -> bool:
        """Whether weight gradients of volumes are computed from a copy of the input."""
        return self.file.compute.volume_copies

    def update_seconds(self, size: Many, slots: int, count: int = 1) -> Many:
        """Seconds of the optimizer's step on ``count`` parameters of ``size`` bytes in all, with so many arrays of state: all are read,
        and all but the gradient are written."""
        c = self.file.compute
        return size * (3 + 2 * slots) / c.speeds.get("update", c.memory_bandwidth) + count * c.starts.get("update", 0.0)

    def rate(self, kernel: str, m: Many, n: Many, k: Many, dtype: str, taps: int = 1) -> Many:
        """Operations per second of a matrix-like kernel with ``m`` rows, ``n`` columns and ``k`` terms.

        Between the shapes of a measured table it is their geometric mean, weighted by the inverse fourth power of the distance between
        the logarithms of shapes (Shepard 1968).
        """
        c, measured = self.file.compute, self.measured_rate(kernel, (m, n, k, taps), dtype)
        if measured is not None:
            return measured
        peak = c.peak.get(dtype) or c.peak["float32" if "float32" in c.peak else next(iter(c.peak))]
        return (
            peak
            * c.efficiency
            * m
            / (m + c.half_m + 1e-300)
            * n
            / (n + c.half_n + 1e-300)
            * k
            / (k + c.half_k + 1e-300)
        )

    def measured_rate(self, kernel: str, shape: tuple[Many, Many, Many, int], dtype: str) -> Many | None:
        """The rate of a kernel by the measured table; None where that does not have it."""
        table = self._tables.get((kernel, dtype)) or self._tables.get((kernel, ALIKE.get(dtype, dtype)))
        if table is None:
            return None
        where, log_rates = table
        at = np.log(np.stack(np.broadcast_arrays(*(np.maximum(1, np.asarray(v, float)) for v in shape)), -1))
        weight = 1.0 / (((at[..., None, :] - where) ** 2).sum(-1) + 1e-6) ** 2
        return np.exp((weight * log_rates).sum(-1) / weight.sum(-1))

    @cached_property
    def _tables(self) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
        rows: dict[tuple[str, str], list[RateConfig]] = {}
        for r in self.file.compute.table:
            rows.setdefault((r.kernel, r.dtype), []).append(r)
        return {
            key: (np.log([(r.m, r.n, r.k, r.taps) for r in found]), np.log([r.rate for r in found]))
            for key, found in rows.items()
        }


def _hops(p: int, form: Latency) -> int:
    """Messages one after the other in one sweep over a group of ``p``."""
    return p - 1 if form == "ring" else ceil(log2(p)) if p > 1 else 0


@lru_cache(maxsize=1 << 14)
def _parts(machine: Machine, grid: Grid, axes: Axes) -> tuple[Part, ...]:
    ways: dict[int, int] = {}
    for a in axes:
        level = machine.level(grid, a)
        ways[level] = ways.get(level, 1) * grid.sizes[a]
    levels = machine.file.levels
    return tuple(Part(ways[i], levels[i]) for i in sorted(ways) if ways[i] > 1)


def machine_names() -> list[str]:
    """Names of the machines that lbpar ships."""
    folder = files("lbpar.cost") / "machines"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def find_machine(which: str) -> Machine:
    """A machine by name or by file. (``auto`` is measured, which needs an engine: `lbpar.calibrate.machine`.)

    Parameters
    ----------
    which : str
        A name of `machine_names`, or the path of a machine file.

    Raises
    ------
    ConfigError
        No such machine (with the nearest name), or a mistake in the file.
    """
    names = machine_names()
    if which in names:
        text = (files("lbpar.cost") / "machines" / f"{which}.yaml").read_text(encoding="utf-8")
        return Machine(check(MachineFile, parse_yaml(text, which), f"machine {which}"))
    if Path(which).suffix in (".yaml", ".yml", ".json"):
        return Machine(load_machine_file(which))
    raise ConfigError(
        f"machine: got {which!r}, {nearest(which, names)}expected auto, a machine file (.yaml), or one of {', '.join(names)}."
    )
