"""How arrays of devices travel between the ranks of a job: chosen by all ranks together, and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from lbpar.config.engine import EngineConfig
from lbpar.engine.base import Engine
from lbpar.errors import CommError, ConfigError, LbparError
from lbpar.program.plan import Plan
from lbpar.transport.base import Transport
from lbpar.transport.checked import CheckedTransport
from lbpar.transport.cuda_mpi import CudaMpiTransport
from lbpar.transport.launch import CHECKED
from lbpar.transport.nccl import NcclTransport, load_nccl
from lbpar.transport.probe import Found, cuda_aware

log = logging.getLogger(__name__)

Facts = Mapping[str, str]
"""Of a rank: ``place`` of its device, empty without one, and ``missing``, why it cannot use NCCL."""


def over_devices(transport: Transport, config: EngineConfig, plan: Plan | None = None) -> Transport:
    """The transport for arrays of the engine of a run file, which go through a plan's program, if there is one. Collective over all ranks.

    Raises
    ------
    CommError
        NCCL is asked for and cannot be used; on all ranks alike.
    ConfigError
        Steps are to be recorded whose moves cannot be, or moves of devices compared; on all ranks alike.
    """
    stages = 1 if plan is None or plan.pipeline is None else plan.pipeline.count
    if config.graphs and stages > 1 and transport.size > 1:
        raise ConfigError(
            f"engine.graphs: true with {stages} stages: each takes part in steps of its own, and only those of all ranks can be recorded. "
            "Leave out engine.graphs, or parallel.stages."
        )
    if config.name != "cupy" or transport.size == 1 or transport.direct:
        return transport
    if isinstance(transport, CheckedTransport):  # which compares what it carries itself
        if config.transport in ("nccl", "mpi"):
            raise ConfigError(
                f"engine.transport: {config.transport} with {CHECKED}=1: only what goes by way of the host can be compared; leave out one of them."
            )
        _check_recordable(config, f"by way of the host ({CHECKED}=1 compares what goes that way)")
        if transport.rank == 0:
            log.info("transport: host (%s=1 compares what goes that way)", CHECKED)
        return transport
    facts, found = transport.allgather_obj(_facts()), None

    def aware() -> Found:
        nonlocal found
        found = transport.bcast(cuda_aware() if transport.rank == 0 else None)
        return found

    way, why = choice(config.transport, facts, aware)
    if way == "nccl":
        moved = NcclTransport(transport)
        try:
            moved.connect()
        except CommError as error:  # of all ranks alike
            if config.transport == "nccl":
                raise
            way, why = _without_nccl(str(error).removesuffix("."), aware)
        else:
            log.info("transport: nccl (%s)", why)
            return moved
    _check_recordable(config, f"by way of {'MPI' if way == 'mpi' else 'the host'} ({why})")
    log.info("transport: %s (%s)", way, why)
    return CudaMpiTransport(transport, found.nonblocking) if way == "mpi" and found else transport


def _check_recordable(config: EngineConfig, way: str) -> None:
    if config.graphs:
        raise ConfigError(
            f"engine.graphs: true, but arrays travel {way}: the host has a part in these moves, and only those of NCCL can be recorded. Start "
            "one process for each GPU with engine.transport: nccl, or a single process, or leave out engine.graphs."
        )


def by(engine: Engine, transport: Transport) -> str:
    """Of a device, the libraries that compute, and how arrays travel: both may be others than was hoped for."""
    if engine.host:
        return ""
    ways = [*engine.libraries] or ["lbpar's own kernels"]
    if transport.size > 1:
        ways.append(transport.name if transport.direct else "moves by way of the host")
    return f" ({', '.join(ways)})"


def choice(wanted: str, facts: Sequence[Facts], aware: Callable[[], Found]) -> tuple[str, str]:
    """``nccl``, ``mpi`` or ``host``, and why.

    Parameters
    ----------
    wanted : "auto" or one of these
    facts : of all ranks
    aware : callable
        Finds out whether MPI takes device memory; called where it matters, by all ranks alike.
    """
    ranks: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        ranks.setdefault(fact["place"], []).append(rank)
    shared = {place: found for place, found in ranks.items() if place and len(found) > 1}
    if shared:
        place, found = next(iter(shared.items()))
        log.warning("engine: ranks %s share the GPU %s and take turns on it", found, place)
    if wanted == "host":
        return "host", "as the run file says"
    if wanted == "mpi":
        found_out = aware()
        if not found_out.aware:
            raise CommError(
                f"engine.transport: mpi cannot be used: {found_out.why}. Load an MPI that was built with CUDA (with Cray MPICH, set "
                "MPICH_GPU_SUPPORT_ENABLED=1), or choose engine.transport: nccl or host."
            )
        return "mpi", found_out.why
    missing = [(rank, fact["missing"]) for rank, fact in enumerate(facts) if fact["missing"]]
    if shared:
        why = f"ranks {found} share the GPU {place}, which NCCL does not allow"
    elif missing:
        why = f"rank {missing[0][0]}: {missing[0][1]}"
    else:
        return "nccl", "each rank has a GPU of its own"
    if wanted == "nccl" and missing and not shared:
        raise CommError(f"engine.transport: nccl cannot be used: {why}, or choose engine.transport: host.")
    if wanted == "nccl":
        raise CommError(
            f"engine.transport: nccl cannot be used: {why}. Start one process for each GPU, see that each sees a GPU of its own "
            "(CUDA_VISIBLE_DEVICES), or choose engine.transport: host."
        )
    if not all(fact["place"] for fact in facts):
        return "host", why
    if shared:  # which was said
        return _second_best(why, aware)
    return _without_nccl(why, aware)


def _without_nccl(why: str, aware: Callable[[], Found]) -> tuple[str, str]:
    way, why = _second_best(why, aware)
    log.warning("transport: %s, because NCCL cannot be used (%s)", way, why)
    return way, why


def _second_best(why: str, aware: Callable[[], Found]) -> tuple[str, str]:
    found = aware()
    return "mpi" if found.aware else "host", f"{why}; {found.why}"


def _facts() -> Facts:
    from lbpar.engine.cupy import library  # which loads CuPy

    try:
        place = library.place(library.load())
    except LbparError as error:
        return {"place": "", "missing": str(error)}
    try:
        load_nccl()
    except LbparError as error:
        return {"place": place, "missing": str(error).removesuffix(".")}
    return {"place": place, "missing": ""}
