"""How arrays of devices travel between the ranks of a job: chosen by all ranks together, and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from lbpar.config.engine import EngineConfig
from lbpar.errors import CommError, ConfigError, LbparError
from lbpar.transport.base import Transport
from lbpar.transport.checked import CheckedTransport
from lbpar.transport.cuda_mpi import CudaMpiTransport
from lbpar.transport.launch import CHECKED
from lbpar.transport.nccl import NcclTransport, load_nccl
from lbpar.transport.probe import Found, cuda_aware

log = logging.getLogger(__name__)

Facts = Mapping[str, str]
"""Of a rank: ``place`` of its device, empty without one, and ``missing``, why it cannot use NCCL."""


def over_devices(transport: Transport, config: EngineConfig) -> Transport:
    """The transport for arrays of the engine of a run file. Collective over all ranks.

    Raises
    ------
    CommError
        NCCL is asked for and cannot be used; on all ranks alike.
    ConfigError
        Steps of several ranks are to be recorded, or moves of devices compared.
    """
    if config.graphs and transport.size > 1:
        raise ConfigError(
            f"engine.graphs: true on {transport.size} processes: steps are recorded on one process only; start one, or leave it out."
        )
    if config.name != "cupy" or transport.size == 1 or transport.direct:
        return transport
    if isinstance(transport, CheckedTransport):  # which compares what it carries itself
        if config.transport in ("nccl", "mpi"):
            raise ConfigError(
                f"engine.transport: {config.transport} with {CHECKED}=1: only what goes by way of the host can be compared; leave out one of them."
            )
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
    log.info("transport: %s (%s)", way, why)
    return CudaMpiTransport(transport, found.nonblocking) if way == "mpi" and found else transport


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
