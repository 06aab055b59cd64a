"""The machine that a run file names, measured where it says `auto`."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable
from functools import lru_cache
from typing import get_args

import numpy as np

from lbpar.calibrate.kernel_speeds import measure_compute
from lbpar.calibrate.links import measure_links
from lbpar.calibrate.samples import samples
from lbpar.config.engine import EngineConfig
from lbpar.config.machine_file import ComputeConfig, MachineFile
from lbpar.config.run_file import AUTO
from lbpar.cost.machine import Machine, find_machine
from lbpar.engine.base import Engine
from lbpar.engine.registry import get_engine
from lbpar.errors import LbparError
from lbpar.graph.graph import Graph
from lbpar.runtime.room import node_memory
from lbpar.threads import node_cores, share
from lbpar.transport.base import Transport

TYPES = get_args(EngineConfig.model_fields["dtype"].annotation)
REPEATS = 3
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
        return Machine(_alone(engine))
    file = _measured[engine] = measure_machine(engine, samples(), REPEATS, transport)
    return Machine(file)


def measured(engine: EngineConfig) -> MachineFile | None:
    """The job's ranks as `machine_of` last measured them in this process, if it did."""
    return _measured.get(engine)


def measure_machine(
    engine: EngineConfig, graphs: Iterable[tuple[Graph, int]], repeats: int, transport: Transport | None = None
) -> MachineFile:
    """What ranks reach on the kernels of some networks, and, if there are several, on the links between them.

    Parameters
    ----------
    engine, transport
        As for `machine_of`. Collective over all ranks; all get the same.
    graphs : iterable of (Graph, int)
        Networks with a loss, and the batch of each.
    repeats : int
        Runs of each network.
    """
    threads = share() if engine.threads == AUTO else int(engine.threads)
    if transport is None or transport.size == 1:
        return _file(measure_compute(_alike(engine, threads), engine.dtype, graphs, repeats), 1)
    return _together(get_engine(engine.name, engine.dtype, threads), engine.dtype, transport, graphs, repeats)


def _alike(engine: EngineConfig, threads: int) -> Engine:
    """The engine, or the same in float32 for a type that is only planned with."""
    try:
        return get_engine(engine.name, engine.dtype if engine.dtype in TYPES else "float32", threads)
    except LbparError:
        return get_engine(engine.name, "float32", threads)


@lru_cache(maxsize=4)
def _alone(engine: EngineConfig) -> MachineFile:
    return measure_machine(engine, samples(), REPEATS)


def _together(
    engine: Engine, dtype: str, transport: Transport, graphs: Iterable[tuple[Graph, int]], repeats: int
) -> MachineFile:
    hosts = transport.allgather_obj(platform.node())
    cores = max(1, min(transport.allgather_obj(node_cores())) // (engine.threads or 1))
    ranks = max(map(hosts.count, hosts))  # on one node, at most
    place = hosts[: transport.rank].count(hosts[transport.rank])
    compute = None
    with transport.counter.paused():
        transport.barrier()
        if place < cores:  # as many at once as training will find room for
            compute = measure_compute(engine, dtype, graphs, repeats)
        done = transport.allreduce(np.zeros(1), transport.grid.axes)
        while not done.test():
            time.sleep(NAP)
        done.wait()
        file = transport.bcast(None if compute is None else _file(compute, ranks))
        linked = transport.bcast(measure_links(engine, transport, hosts, file))
    return linked.model_copy(update={"cores": cores}) if ranks > cores else linked


def _file(compute: ComputeConfig, ranks: int) -> MachineFile:
    """A machine of one rank's computation, the links of ``laptop`` and a share of the node's memory."""
    base = find_machine("laptop").file
    memory = node_memory() // ranks
    return base.model_copy(update={"name": AUTO, "description": None, "compute": compute, "memory": memory})
