"""Fail together: what only one rank can see (a file that its node lacks, a full disk) is told to all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lbpar.errors import LbparError
from lbpar.transport.base import Transport


@contextmanager
def together(transport: Transport) -> Iterator[None]:
    """Inside this block an error of one rank is an error of all, with the same message. Collective over all ranks.

    Nothing inside may communicate: a rank that failed would not take part.

    Raises
    ------
    LbparError
        The error of the lowest rank that failed; names the rank unless all failed alike.
    """
    error: LbparError | None = None
    try:
        yield
    except LbparError as e:
        error = e
    told = transport.allgather_obj(None if error is None else (type(error), str(error)))
    failed = [(rank, what) for rank, what in enumerate(told) if what is not None]
    if not failed:
        return
    rank, (kind, text) = failed[0]
    alike = len(failed) == len(told) and len(set(told)) == 1
    raise kind(text if alike else f"rank {rank}: {text}") from None
