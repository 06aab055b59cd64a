"""Start and end a job: do the ranks reach each other, does one rank's failure end all.

A command line is ``sys.exit(run_main(main))``, and ``main`` gets its ranks from ``connect()``. Environment:

    LBPAR_ALONE=1          this process is a job of its own, whatever launcher variables it inherited
    LBPAR_CHECKED=1        compare every operation over its ranks first (lbpar.transport.checked)
    LBPAR_HANG_SECONDS=s   after s seconds without progress show all stacks, after twice that end the job (.watch); default 600,
                           while ranks start 120; 0 never
    LBPAR_STACKS=folder    stacks go to a file per rank
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

import numpy as np

from lbpar import __version__
from lbpar.errors import CommError, LbparError
from lbpar.launcher import ALONE, RANKS_ONLY, launched_ranks, truth
from lbpar.layout.grid import Grid
from lbpar.streams import standard_streams
from lbpar.threads import ranks_found
from lbpar.transport.base import Transport
from lbpar.transport.checked import CheckedTransport
from lbpar.transport.ending import SECONDS as ABORT_SECONDS
from lbpar.transport.ending import abort_all
from lbpar.transport.mpi import MpiTransport, load_mpi
from lbpar.transport.request import Request
from lbpar.transport.single import SingleTransport
from lbpar.transport.stop import STOPPED
from lbpar.transport.watch import START, Watch, hang_seconds, stacks_on_signal

CHECKED = "LBPAR_CHECKED"

AGREE_SECONDS = 2.0
"""How long a failing rank waits to learn whether all ranks failed, before it ends the job by itself."""

LEAVE_SECONDS = 60.0
"""How long a rank that calls ``sys.exit(0)`` waits for the others to do the same, before it says that they do not; or, asked to end, ends the job."""


def check_world(size: int, env: Mapping[str, str] | None = None) -> None:
    """Refuse n jobs of one rank where one job of n ranks was meant; they would all write the same files.

    Parameters
    ----------
    size : int
        Ranks that MPI knows.

    Raises
    ------
    CommError
        The launcher started more ranks than one, but MPI knows only one.
    """
    found = launched_ranks(env)
    if size > 1 or found is None or found[0] <= 1:
        return
    n, _, variable = found
    at_least = "at least " if variable in RANKS_ONLY else ""
    raise CommError(
        f"launch: {variable} says that {at_least}{n} ranks were started, but each of them is a job of one rank: the "
        f"launcher and the MPI library of {sys.executable} do not know each other. "
        "Under Slurm: `srun --mpi=list` shows what srun offers; try `srun --mpi=pmix` (Open MPI) or `srun --mpi=pmi2` "
        "(MPICH), or start with `mpirun` inside the allocation. Elsewhere: use the mpirun that belongs to the MPI "
        f"library, often {os.path.join(os.path.dirname(sys.executable), 'mpirun')}. "
        f"If this process is meant to be alone, set {ALONE}=1."
    )


def connect(
    grid: Grid | None = None,
    kind: Literal["auto", "mpi", "single"] = "auto",
    checked: bool | None = None,
    seconds: float = 60.0,
) -> Transport:
    """The transport of this process, tested. Collective over all ranks of the job.

    Parameters
    ----------
    grid : Grid, optional
        Default ``Grid.of(number of ranks)``.
    kind : {"auto", "mpi", "single"}
        ``auto`` takes MPI if a launcher started this process or MPI already runs with several ranks; otherwise a single
        rank, for which no MPI needs to be installed.
    checked : bool, optional
        Wrap it in ``CheckedTransport``; default: the environment's ``LBPAR_CHECKED``.
    seconds : float
        Limit of the self-test.

    Raises
    ------
    CommError
        A launcher started single ranks, MPI is missing or broken, the ranks do not run the same lbpar, or their number
        is not the grid's.
    """
    if kind == "auto":
        kind = "mpi" if launched_ranks() is not None or _mpi_runs() else "single"
    if kind == "single":
        return SingleTransport(grid)
    mpi = _start_mpi()
    check_world(mpi.COMM_WORLD.Get_size())
    transport: Transport = MpiTransport(mpi.COMM_WORLD, grid, watch=_watch())
    checked = truth(os.environ, CHECKED) if checked is None else checked
    self_test(transport, seconds, checked)
    if checked:
        transport = CheckedTransport(transport)
    return transport


def self_test(transport: Transport, seconds: float = 60.0, checked: bool = False) -> None:
    """Do all ranks answer, does a sum come out right, does a message reach the neighbour, do all run the same lbpar?

    Collective over all ranks; not counted.

    Raises
    ------
    CommError
        One of these is not so.
    """
    if transport.size == 1:
        return
    p, rank, axes = transport.size, transport.rank, transport.grid.axes
    host = platform.node()
    with transport.counter.paused():
        total = _finish(transport.allreduce(np.array([rank + 1.0]), axes, tag="self-test"), rank, seconds, "a sum")
        if total[0] != p * (p + 1) / 2:
            raise CommError(f"self-test: rank {rank} on {host}: the sum of 1 ... {p} came out as {total[0]:g}.")
        left, right = (rank - 1) % p, (rank + 1) % p
        sends = {right: np.full(1000, rank, np.int64)}
        ring = transport.exchange(sends, {left: 1000}, np.int64, axes, tag="self-test")
        got = _finish(ring, rank, seconds, f"a message of rank {left}")
        if not (got[left] == left).all():
            raise CommError(f"self-test: rank {rank} on {host}: the message of rank {left} arrived damaged.")
    facts = transport.allgather_obj((f"lbpar {__version__}, byte order {sys.byteorder}, {CHECKED}={checked:d}", host))
    ranks_found([h for _, h in facts], rank)
    odd = [f"rank {r} on {h} has {f}" for r, (f, h) in enumerate(facts) if f != facts[0][0]]
    if odd:
        raise CommError(f"self-test: rank 0 on {facts[0][1]} has {facts[0][0]}, but {'; '.join(odd[:4])}.")


def run_main(main: Callable[[], int | None], alone: bool = False) -> int:
    """Run a command line's ``main``; a failure of one rank ends the whole job within seconds, with its message.

    A LbparError is printed as ``lbpar: error: ...``, another exception with its traceback and rank. If all ranks fail
    alike, only rank 0 speaks. Otherwise every rank that failed does, and ends the job with ``MPI_Abort``.

    Parameters
    ----------
    main : callable
        Without arguments; None or 0 is success. The same on all ranks.
    alone : bool
        This process is no rank of a job, even if MPI runs in it with several: the others have nothing to do with ``main``.

    Returns
    -------
    int
        Exit status of this process, for ``sys.exit``.
    """
    job = _Job()
    try:
        with standard_streams():
            job.open(alone)
            code = main()
            if code:
                raise SystemExit(code)
    except BaseException as e:  # noqa: BLE001  that is the purpose
        return job.fail(e.with_traceback(e.__traceback__.tb_next) if e.__traceback__ else e)  # without this frame
    return 0


class _Job:
    """What ``run_main`` knows of the other ranks."""

    def __init__(self) -> None:
        found = launched_ranks()
        self.size, self.rank = 1, found[1] if found else 0
        self._mpi: Any = None
        self._comm: Any = None
        self._alike = False

    def open(self, alone: bool) -> None:
        stacks_on_signal(self.rank)
        if alone or (launched_ranks() is None and not _mpi_runs()):
            return
        mpi = _start_mpi()
        world = mpi.COMM_WORLD
        self._alike = True  # if the next line fails
        check_world(world.Get_size())
        self.rank, self.size = world.Get_rank(), world.Get_size()
        if self.size > 1:
            # A communicator of its own: whatever was left unfinished on others cannot be taken for the agreement.
            with _starting():
                self._mpi, self._comm = mpi, world.Dup()
            self._comm.Set_errhandler(mpi.ERRORS_RETURN)

    def fail(self, error: BaseException) -> int:
        code = _exit_code(error)
        sys.stdout.flush()
        if self._comm is None:
            return code and self._fail_alone(error, code)
        others = self._agree(error, LEAVE_SECONDS if code in (0, STOPPED) else AGREE_SECONDS)
        if not code:
            if others is None:
                print(
                    f"lbpar: rank {self.rank} called sys.exit(0) {LEAVE_SECONDS:g} s ago, but not all ranks did; those that wait for it "
                    "wait for ever. Return from main on all ranks instead.",
                    file=sys.stderr,
                    flush=True,
                )
            return 0
        text = _describe(error, self.rank, self.size)
        if others is None:
            _die(self._mpi, text or f"lbpar: rank {self.rank} ended with status {code}; the job is ended.")
        kinds = list(dict.fromkeys(others))
        mine = kinds.index(others[self.rank])
        # One rank speaks for all that failed alike; of many different failures the first few tell enough.
        if others.index(others[self.rank]) == self.rank and mine < 4:
            text = _describe(error, self.rank, self.size if len(kinds) > 1 else 1)
            if text:
                print(text, file=sys.stderr, flush=True)
        # Ending MPI can hang if the failure left messages under way.
        guard = threading.Timer(5.0 + ABORT_SECONDS, os._exit, (code,))
        guard.daemon = True
        guard.start()
        abort_all()
        return code

    def _fail_alone(self, error: BaseException, code: int) -> int:
        if self.rank:
            time.sleep(1.0)  # if rank 0 fails too, it says it, and launchers end a job as soon as one rank fails
        if not self.rank or not self._alike:
            text = _describe(error, self.rank, self.rank + 1)
            if text:
                print(text, file=sys.stderr, flush=True)
        return code

    def _agree(self, error: BaseException, seconds: float) -> list[bytes] | None:
        """What all ranks ended with, or None if not all of them did within the time."""
        digest = hashlib.sha256(f"{type(error).__name__}: {error}".encode()).digest()
        mine, everyone = np.frombuffer(digest, np.uint8), np.empty((self.size, len(digest)), np.uint8)
        try:
            request = self._comm.Iallgather(mine, everyone)
            deadline = time.monotonic() + seconds
            while not request.Test():
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.002)
        except self._mpi.Exception:
            return None
        return [row.tobytes() for row in everyone]


_watches: list[Watch] = []


def _watch() -> Watch | None:
    """The watch of this process, made when first asked for."""
    limit = hang_seconds()
    if limit and not _watches:
        found = launched_ranks()
        _watches.append(
            Watch(found[1] if found else 0, limit, lambda message: _die(sys.modules.get("mpi4py.MPI"), message))
        )
    return _watches[0] if limit else None


@contextmanager
def _starting() -> Iterator[None]:
    """In this block this rank waits until all others have started."""
    watch = _watch()
    if watch is not None:
        watch.enter("all ranks of the job to start MPI", hang_seconds(START))
    try:
        yield
    finally:
        if watch is not None:
            watch.leave()


def _start_mpi() -> Any:
    with _starting():
        return load_mpi()


def _die(mpi: Any, message: str) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    abort_all()
    started = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    if started and (mpi.Query_thread() == mpi.THREAD_MULTIPLE or mpi.Is_thread_main()):
        mpi.COMM_WORLD.Abort(1)
    os._exit(1)


def _describe(error: BaseException, rank: int, size: int) -> str:
    """Text for standard error; of a rank if there are several. Empty where nothing needs to be said."""
    who = f"rank {rank}: " if size > 1 else ""
    if isinstance(error, LbparError):
        return f"lbpar: error: {who}{error}"
    if isinstance(error, MemoryError):
        return f"lbpar: error: {who}out of memory: {error or 'no more could be allocated'}; use more processes or a smaller batch."
    if isinstance(error, KeyboardInterrupt):
        return "lbpar: interrupted" if rank == 0 else ""
    if isinstance(error, SystemExit):
        return f"lbpar: error: {who}{error.code}" if isinstance(error.code, str) else ""
    if isinstance(error, UnicodeEncodeError):  # of a path; streams write what they can
        return (
            f"lbpar: error: {who}{error.object!a} cannot be written in the encoding {error.encoding} of this system; set a locale of UTF-8, "
            "for example LC_ALL=C.UTF-8."
        )
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"{trace}\nlbpar: error: {who}{type(error).__name__}, which lbpar did not expect; see the traceback above."


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


def _finish(request: Request, rank: int, seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while not request.test():
        if time.monotonic() > deadline:
            raise CommError(
                f"self-test: rank {rank} on {platform.node()} waited {seconds:g} s for {what}. The ranks were started, "
                "but do not all answer: look for a rank that died, a firewall between nodes, a wrong network interface."
            )
        time.sleep(0)
    return request.wait()


def _mpi_runs() -> bool:
    """Someone else has started MPI in this process, with several ranks."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return False
    return bool(mpi.COMM_WORLD.Get_size() > 1) and not truth(os.environ, ALONE)
