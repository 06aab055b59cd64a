"""Check what a caller gives to the graph builder; options of ops are checked by their declaration."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from lbpar.errors import GraphError
from lbpar.text import nearest

Ints = int | Sequence[int]
Pads = int | Sequence[int | Sequence[int]]


def plain(value: Any) -> Any:
    """The same in Python's own numbers and lists, where NumPy's may have been given."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value.tolist() if hasattr(value, "tolist") else value


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
