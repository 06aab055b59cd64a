"""Check what a caller gives to the graph builder: whole numbers (NumPy's too), sizes per dimension, pads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import index
from typing import Any

from lbpar.config.section import MOST
from lbpar.errors import GraphError
from lbpar.text import nearest, shorten

Ints = int | Sequence[int]
Pads = int | Sequence[int | Sequence[int]]


def whole(value: Any, what: str, least: int = 1) -> int:
    """An int of at least ``least``.

    Raises
    ------
    GraphError
        Otherwise; ``what`` names the place.
    """
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= MOST:
        raise GraphError(
            f"{what}: got {shorten(value)}, expected a whole number of at least {least} (and less than 2³¹)."
        )
    return number


def each(value: Any, rank: int, what: str, least: int = 1) -> tuple[int, ...]:
    """One int for all of ``rank`` dimensions, or one per dimension."""
    if not _is_list(value):
        return (whole(value, what, least),) * rank
    out = tuple(whole(v, what, least) for v in value)
    if len(out) != rank:
        raise GraphError(f"{what}: got {list(out)}, expected one whole number or {rank} of them.")
    return out


def pads(value: Any, rank: int, what: str) -> tuple[tuple[int, int], ...]:
    """(before, after) per dimension, from an int for all, an int per dimension, or pairs."""
    if not _is_list(value):
        return ((whole(value, what, 0),) * 2,) * rank
    if len(value) != rank:
        raise GraphError(f"{what}: got {list(value)}, expected one number, or {rank} numbers or [before, after] pairs.")
    out = []
    for v in value:
        pair = tuple(v) if _is_list(v) else (v, v)
        if len(pair) != 2:
            raise GraphError(f"{what}: got {list(pair)}, expected a number or [before, after].")
        out.append((whole(pair[0], what, 0), whole(pair[1], what, 0)))
    return tuple(out)


def number(value: Any, what: str, expected: str, ok: bool) -> float:
    """A finite real number for which ``ok`` holds."""
    if not ok:
        raise GraphError(f"{what}: got {value!r}, expected {expected}.")
    return float(value)


def choice(value: Any, what: str, allowed: Sequence[str]) -> Any:
    """One of some words."""
    if value not in allowed:
        hint = nearest(str(value), allowed)
        raise GraphError(f"{what}: got {value!r}; {hint}expected {', '.join(allowed)}.")
    return value


def known(name: Any, nodes: Collection[str], what: str) -> str:
    """The name of a node that exists."""
    if not isinstance(name, str) or name not in nodes:
        hint = nearest(str(name), nodes).strip()
        raise GraphError(f"{what}: {name!r} is not an earlier node. {hint or 'Pass what a builder method returned.'}")
    return name


def names(values: Any, what: str) -> list[str]:
    """A list of node names, not one name."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise GraphError(f"{what}: got {values!r}, expected a list of nodes.")
    return list(values)


def _is_list(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str)
