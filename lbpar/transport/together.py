"""Fail together: what only one rank can see (a file that its node lacks, a full disk) is told to all; and start alike."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lbpar.errors import ConfigError, LbparError
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


def check_alike(transport: Transport, facts: Mapping[str, object]) -> None:
    """Refuse ranks that are about to do different things. Collective over all ranks.

    Parameters
    ----------
    transport : Transport
    facts : mapping of str to object
        What must be the same on all ranks, by name; compared by ``repr``, memory addresses aside.

    Raises
    ------
    ConfigError
        Names the first fact and the first rank that differs from rank 0; the same on all ranks.
    """
    if transport.size == 1:
        return
    mine = {name: hashlib.sha256(_text(value).encode()).hexdigest() for name, value in facts.items()}
    everyone = transport.allgather_obj(mine)
    for name in facts:
        for rank, theirs in enumerate(everyone):
            if theirs[name] != everyone[0][name]:
                raise ConfigError(
                    f"{name}: rank {rank} has made another one than rank 0. All ranks must read the same files and run the same "
                    "functions; look for random numbers without a seed, or for something that depends on the rank, time or node."
                )


def _text(value: object) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
