"""Helpers for tests that run under mpirun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def collective_assert(comm: Any) -> Iterator[None]:
    """A failure inside this block on any rank is a failure on all, known before the next collective.

    Without it, the rank that fails leaves the test, and the others hang in the next collective.

    Parameters
    ----------
    comm : mpi4py communicator, or a transport
        All its ranks enter the block. No collective may stand inside the block after something that can fail.
    """
    error: BaseException | None = None
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # noqa: BLE001  pytest.fail raises a BaseException
        error = e
    share = comm.allgather_obj if hasattr(comm, "allgather_obj") else comm.allgather
    texts = share(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = [f"rank {r}: {t}" for r, t in enumerate(texts) if t is not None]
    if failed:
        raise AssertionError("failed on other ranks: " + "; ".join(failed))
