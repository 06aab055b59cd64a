"""Fail together: what only one rank can see (a file that its node lacks, a full disk) is told to all; and start alike."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lbpar.errors import ConfigError, LbparError
from lbpar.transport.base import Control

SHOWN = 60
"""Longest text of a value that a message shows; a digest is longer."""


@contextmanager
def together(control: Control) -> Iterator[None]:
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
    told = control.allgather_obj(None if error is None else (type(error), str(error)))
    failed = [(rank, what) for rank, what in enumerate(told) if what is not None]
    if not failed:
        return
    rank, (kind, text) = failed[0]
    alike = len(failed) == len(told) and len(set(told)) == 1
    raise kind(text if alike else f"rank {rank}: {text}") from None


def check_alike(control: Control, facts: Mapping[str, object]) -> None:
    """Refuse ranks that are about to do different things. Collective over all ranks.

    Parameters
    ----------
    control : Control
    facts : mapping of str to object
        What must be the same on all ranks, by name; compared by ``repr``, memory addresses aside.

    Raises
    ------
    ConfigError
        Names the first fact that differs and the ranks that differ from most; the same on all ranks.
    """
    if control.size == 1:
        return
    mine = {name: re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)) for name, value in facts.items()}
    if len(set(control.allgather_obj(_digest(repr(mine))))) == 1:
        return
    everyone = control.allgather_obj({n: t if len(t) <= SHOWN else _digest(t) for n, t in mine.items()})
    for name in dict.fromkeys(n for theirs in everyone for n in theirs):
        values = [theirs.get(name, "nothing") for theirs in everyone]
        usual, _ = Counter(values).most_common(1)[0]
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            other = f"rank {values.index(usual)}"
            short = max(len(usual), len(values[odd[0]])) <= SHOWN
            what = f"{values[odd[0]]}, but {other} has {usual}" if short else f"another one than {other}"
            more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
            raise ConfigError(
                f"{name}: rank {odd[0]}{more} has {what}. All ranks must be given the same options, read "
                "the same files and run the same functions; look for copies that differ, for random numbers without a seed, or for "
                "something that depends on the rank, time or node."
            )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
