"""The machine that a run file names, measured where it says `auto`."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import inf
from time import perf_counter
from typing import Any, get_args

import numpy as np

from lbpar.calibrate.kernel_speeds import measure_compute
from lbpar.calibrate.links import Timed, measure_links
from lbpar.calibrate.samples import own_programs, samples_by_turns
from lbpar.calibrate.trust import Load, Trust, Watcher
from lbpar.calibrate.whole_steps import WholeSteps, measure_steps, slower
from lbpar.config.engine import EngineConfig
from lbpar.config.machine_file import ComputeConfig, LevelConfig, MachineFile
from lbpar.config.run_file import AUTO
from lbpar.cost.machine import Machine, find_machine
from lbpar.engine.base import Engine
from lbpar.engine.registry import build_engine
from lbpar.errors import EngineError, LbparError
from lbpar.graph.graph import Graph
from lbpar.program.steps import Program
from lbpar.provenance import timestamp
from lbpar.runtime.devices import over_devices
from lbpar.runtime.room import node_memory
from lbpar.threads import node_cores
from lbpar.transport.base import Transport
from lbpar.transport.single import SingleTransport

log = logging.getLogger(__name__)

TYPES = get_args(EngineConfig.model_fields["dtype"].annotation)
ROUNDS = 3
"""Runs of each program for `machine: auto`, at most."""
LIMIT = 3.0
"""Seconds for the kernels of `machine: auto`, about: on a machine that is busy, fewer programs and runs must do."""
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
        try:
            found = _alone(engine)
        except EngineError as error:
            if transport is not None:
                raise
            raise EngineError(
                f"machine: auto measures this machine: {error} To plan for another one, name it: --machine, such as h100-nvl8."
            ) from error
    else:
        found = measure_machine(engine, samples_by_turns(), ROUNDS, transport, limit=LIMIT, every=False)
        _measured[engine] = found.file
    log.info("machine: auto: %s", found.file.notes["measured"]["took"])
    doubts = found.trust.doubts()
    if doubts and (transport is None or transport.rank == 0):
        log.warning(
            "machine: auto: what was measured is in doubt, so that the plan may not be the best: %s",
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
    limit: float = inf,
    every: bool = True,
    network: tuple[Graph, int] | None = None,
) -> Measured:
    """What ranks reach on the kernels of some programs, and, if there are several, on the links between them.

    Programs that cannot be lowered are refused before anything is measured.

    Parameters
    ----------
    engine, transport
        As for `machine_of`. Collective over all ranks; all get the same.
    programs : iterable of Program
        Whose kernels are measured.
    rounds : int
        Runs of each program, at most.
    seconds : float
        To spend on moves, about, and as many on whole steps.
    parts : Parts, optional
        Where parts are kept.
    limit, every
        Seconds for kernels, and whether all programs run once whatever these are: see `measure_compute`.
    network : Graph with losses and batch, optional
        A network whose own kernels are measured as well, and whole steps of it: all is as slow as it is within these.
    """
    own = [] if network is None else list(own_programs(*network, 1 if transport is None else transport.size))
    began, programs = perf_counter(), chain(programs, own)
    transport, parts = transport or SingleTransport(), parts or Parts()
    made = _alike(engine) if transport.size == 1 else build_engine(engine)
    hosts = transport.allgather_obj(platform.node())
    cores = max(1, min(transport.allgather_obj(node_cores())) // (made.threads or 1))
    ranks = max(map(hosts.count, hosts))  # on one node, at most
    before = hosts[: transport.rank].count(hosts[transport.rank])
    places = transport.allgather_obj(made.place)
    memory = (made.capacity or node_memory()) // max(map(places.count, places))
    with transport.counter.paused():
        kernels = transport.bcast(parts.find("kernels"))
        if kernels is None:
            kernels = _kernels(made, engine.arithmetic, transport, programs, rounds, before < cores, limit, every)
            parts.keep("kernels", kernels, Trust(kernels.loads, kernels.spread))
        after = perf_counter()
        file, moves, whole = _file(kernels.compute, memory), [], WholeSteps()
        moved = transport if transport.size == 1 else over_devices(transport, engine)
        if transport.size > 1:
            found = transport.bcast(parts.find("links"))
            if found is None:
                found = transport.bcast(measure_links(made, moved, hosts, ranks > cores, file, seconds))
                parts.keep("links", found, Trust((), 0.0, _in_doubt(found[0])))
            levels, moves = found
            file = file.model_copy(update={"levels": levels})
        linked = perf_counter()
        # Nodes differ, and all ranks must time the same plans.
        file = transport.bcast(file.model_copy(update={"cores": cores if ranks > cores else None}))
        if network is not None:
            whole = measure_steps(made, moved, *network, Machine(file), engine.arithmetic, seconds)
            file = slower(file, whole.factor, whole.between)
        if moved is not transport:
            moved.disconnect()
    trust = Trust(kernels.loads, kernels.spread, _in_doubt(file.levels) if moves else (), whole)
    rates = f"{len(kernels.compute.table)} rates of kernels in {after - began:.1f} s"
    links = f", {len(moves)} moves in {linked - after:.1f} s" if moves else ""
    steps = f", steps of {whole.plans} plans in {perf_counter() - linked:.1f} s" if whole.plans else ""
    facts = trust.facts() | {
        "took": rates + links + steps,
        "date": timestamp(),
        "hosts": list(dict.fromkeys(hosts)),
        "ranks": transport.size,
    }
    file = file.model_copy(update={"notes": {"measured": facts}})
    return Measured(transport.bcast(file), moves, trust)  # clocks of ranks differ


def _in_doubt(levels: Iterable[LevelConfig]) -> list[str]:
    links = [(level.name, link) for level in levels for link in level.moves]
    return [f"{link.kind} between {link.ways} ({name}): {link.doubt}" for name, link in links if link.doubt]


def _kernels(
    engine: Engine,
    dtype: str,
    transport: Transport,
    programs: Iterable[Program],
    rounds: int,
    mine: bool,
    limit: float,
    every: bool,
) -> Kernels:
    """Kernels as measured by as many ranks at once as training will find room for (``mine`` says whether this rank is one of them);
    those of rank 0 count."""
    transport.barrier()
    found = load = None
    if mine:
        watcher = Watcher()
        found = measure_compute(engine, dtype, programs, rounds, limit, every)
        load = watcher.load(engine.host)
    if transport.size > 1:  # a barrier would take the cores of those that measure
        done = transport.allreduce(np.zeros(1), transport.grid.axes)
        while not done.test():
            time.sleep(NAP)
        done.wait()
    loads = [x for x in transport.allgather_obj(load) if x is not None]
    compute, apart = transport.bcast(found)
    return Kernels(compute, loads, apart)


def _alike(engine: EngineConfig) -> Engine:
    """The engine, or the same in float32 for a type that is only planned with."""
    try:
        return build_engine(engine, engine.dtype if engine.dtype in TYPES else "float32")
    except LbparError:
        return build_engine(engine, "float32")


@lru_cache(maxsize=4)
def _alone(engine: EngineConfig) -> Measured:
    return measure_machine(engine, samples_by_turns(), ROUNDS, limit=LIMIT, every=False)


def _file(compute: ComputeConfig, memory: int) -> MachineFile:
    """A machine of one rank's computation and memory, and the links of ``laptop``."""
    base = find_machine("laptop").file
    return base.model_copy(update={"name": AUTO, "description": None, "compute": compute, "memory": memory})
