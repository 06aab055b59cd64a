"""The machine that a run file names, measured where it says `auto`."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args

import numpy as np

from lbpar.calibrate.kernel_speeds import measure_compute
from lbpar.calibrate.links import Timed, measure_links
from lbpar.calibrate.samples import samples
from lbpar.calibrate.trust import Load, Trust, Watcher
from lbpar.config.engine import EngineConfig
from lbpar.config.machine_file import ComputeConfig, LevelConfig, MachineFile
from lbpar.config.run_file import AUTO
from lbpar.cost.machine import Machine, find_machine
from lbpar.engine.base import Engine
from lbpar.engine.registry import get_engine
from lbpar.errors import LbparError
from lbpar.program.steps import Program
from lbpar.provenance import timestamp
from lbpar.runtime.devices import over_devices
from lbpar.runtime.room import node_memory
from lbpar.threads import node_cores, share
from lbpar.transport.base import Transport
from lbpar.transport.single import SingleTransport

log = logging.getLogger(__name__)

TYPES = get_args(EngineConfig.model_fields["dtype"].annotation)
ROUNDS = 3
"""Runs of each program for `machine: auto`, at most."""
SECONDS = 1.0
"""To spend on its moves, about."""
#: Seconds between two looks of a rank that waits for others to have measured; it must not take their cores.
NAP = 0.005
_measured: dict[EngineConfig, MachineFile] = {}


def machine_of(which: str, engine: EngineConfig, transport: Transport | None = None) -> Machine:
    """A machine by name or file, or as measured where ``which`` is ``auto``.

    Parameters
    ----------
    which : str
        ``auto``, a name, or a machine file.
    engine : EngineConfig
        What computes, in which type, with how many threads.
    transport : Transport, optional
        The job's ranks, whose links are measured too, and who share cores where there are more of them; the call is then collective
        over all ranks, and all get the same. Without it the links are those of ``laptop``.

    Raises
    ------
    ConfigError
        No such machine, or a mistake in its file.
    """
    if which != AUTO:
        return find_machine(which)
    if transport is None or transport.size == 1:
        found = _alone(engine)
    else:
        found = measure_machine(engine, samples(), ROUNDS, transport)
        _measured[engine] = found.file
    doubts = found.trust.doubts()
    if doubts and (transport is None or transport.rank == 0):
        log.warning(
            "machine: auto was measured while the machine did other work, so that its plan may not be the best: %s",
            "; ".join(doubts),
        )
    return Machine(found.file)


def measured(engine: EngineConfig) -> MachineFile | None:
    """The job's ranks as `machine_of` last measured them in this process, if it did."""
    return _measured.get(engine)


@dataclass(frozen=True)
class Measured:
    """A machine as measured, and what that rests on.

    Parameters
    ----------
    file : MachineFile
    moves : list of Timed
        Every move that links were fitted to; none for one rank.
    trust : Trust
    """

    file: MachineFile
    moves: list[Timed]
    trust: Trust


@dataclass(frozen=True)
class Kernels:
    """Kernels as measured, what the ranks that did it saw of other work, and the mean spread of repetitions."""

    compute: ComputeConfig
    loads: list[Load]
    spread: float


class Parts:
    """What has been measured so far, for a measurement that goes on where it was cut off. Here nothing is kept."""

    def find(self, name: str) -> Any:
        """A part that rank 0 knows; None on the others, and for what is to be measured."""

    def keep(self, name: str, part: Any, trust: Trust) -> None:
        """Let rank 0 keep a part, if it can be trusted."""


def measure_machine(
    engine: EngineConfig,
    programs: Iterable[Program],
    rounds: int,
    transport: Transport | None = None,
    seconds: float = SECONDS,
    parts: Parts | None = None,
) -> Measured:
    """What ranks reach on the kernels of some programs, and, if there are several, on the links between them.

    Parameters
    ----------
    engine, transport
        As for `machine_of`. Collective over all ranks; all get the same.
    programs : iterable of Program
        Whose kernels are measured.
    rounds : int
        Runs of each program, at most.
    seconds : float
        To spend on moves, about.
    parts : Parts, optional
        Where parts are kept.
    """
    threads = share() if engine.threads == AUTO else int(engine.threads)
    transport, parts = transport or SingleTransport(), parts or Parts()
    made = _alike(engine, threads) if transport.size == 1 else get_engine(engine.name, engine.dtype, threads)
    hosts = transport.allgather_obj(platform.node())
    cores = max(1, min(transport.allgather_obj(node_cores())) // (made.threads or 1))
    ranks = max(map(hosts.count, hosts))  # on one node, at most
    before = hosts[: transport.rank].count(hosts[transport.rank])
    places = transport.allgather_obj(made.place)
    memory = (made.capacity or node_memory()) // max(map(places.count, places))
    with transport.counter.paused():
        kernels = transport.bcast(parts.find("kernels"))
        if kernels is None:
            kernels = _kernels(made, engine.dtype, transport, programs, rounds, before < cores)
            parts.keep("kernels", kernels, Trust(kernels.loads, kernels.spread, {}))
        file, moves = _file(kernels.compute, memory), []
        if transport.size > 1:
            found = transport.bcast(parts.find("links"))
            if found is None:
                moved = over_devices(transport, engine)
                found = transport.bcast(measure_links(made, moved, hosts, file, seconds))
                if moved is not transport:
                    moved.disconnect()
                parts.keep("links", found, Trust((), 0.0, _quality(found[0])))
            levels, moves = found
            file = file.model_copy(update={"levels": levels})
    trust = Trust(kernels.loads, kernels.spread, _quality(file.levels) if moves else {})
    facts = trust.facts() | {"date": timestamp(), "hosts": list(dict.fromkeys(hosts)), "ranks": transport.size}
    file = file.model_copy(update={"cores": cores if ranks > cores else None, "notes": {"measured": facts}})
    return Measured(transport.bcast(file), moves, trust)  # clocks of ranks differ


def _quality(levels: Iterable[LevelConfig]) -> dict[str, tuple[float, float]]:
    return {
        f"{link.kind} between {link.ways} ({level.name})": (link.spread, link.residual)
        for level in levels
        for link in level.moves
    }


def _kernels(
    engine: Engine, dtype: str, transport: Transport, programs: Iterable[Program], rounds: int, mine: bool
) -> Kernels:
    """Kernels as measured by as many ranks at once as training will find room for (``mine`` says whether this rank is one of them);
    those of rank 0 count."""
    transport.barrier()
    found = load = None
    if mine:
        watcher = Watcher()
        found = measure_compute(engine, dtype, programs, rounds)
        load = watcher.load(engine.host)
    if transport.size > 1:  # a barrier would take the cores of those that measure
        done = transport.allreduce(np.zeros(1), transport.grid.axes)
        while not done.test():
            time.sleep(NAP)
        done.wait()
    loads = [x for x in transport.allgather_obj(load) if x is not None]
    compute, apart = transport.bcast(found)
    return Kernels(compute, loads, apart)


def _alike(engine: EngineConfig, threads: int) -> Engine:
    """The engine, or the same in float32 for a type that is only planned with."""
    try:
        return get_engine(engine.name, engine.dtype if engine.dtype in TYPES else "float32", threads)
    except LbparError:
        return get_engine(engine.name, "float32", threads)


@lru_cache(maxsize=4)
def _alone(engine: EngineConfig) -> Measured:
    return measure_machine(engine, samples(), ROUNDS)


def _file(compute: ComputeConfig, memory: int) -> MachineFile:
    """A machine of one rank's computation and memory, and the links of ``laptop``."""
    base = find_machine("laptop").file
    return base.model_copy(update={"name": AUTO, "description": None, "compute": compute, "memory": memory})
