"""Quantities and names as people read them."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any


def nearest(name: object, known: Iterable[str]) -> str:
    """``did you mean 'x'? `` for the closest known name, in whatever case it was typed, or an empty string."""
    if len(str(name)) > 100:
        return ""  # comparing takes the square of the length
    lower = {k.lower(): k for k in reversed(list(known)[:2000])}
    close = get_close_matches(str(name).lower(), list(lower), n=1, cutoff=0.6)
    return f"did you mean '{lower[close[0]]}'? " if close else ""


def listed(names: Iterable[str]) -> str:
    """The names in a row, the middle left out where there are very many."""
    names = list(names)
    return ", ".join(names if len(names) <= 60 else [*names[:30], f"... ({len(names) - 60} more)", *names[-30:]])


def flatten(fields: Mapping[str, Any], separator: str, prefix: str = "") -> dict[str, Any]:
    """The fields of nested blocks, under names that are joined by a separator."""
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, separator, name + separator) if value and isinstance(value, Mapping) else {name: value}
    return flat


class _Short(reprlib.Repr):
    """Looks at the beginning of a value only, however large and deep that is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 30
        self.maxstring = self.maxlong = self.maxother = 60

    def repr_tuple(self, x: tuple[Any, ...], level: int) -> str:
        return self.repr_list(list(x[: self.maxlist + 1]), level)

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) < 10**60 else f"a number of {x.bit_length()} bits"


_SHORT = _Short()


def shorten(value: Any) -> str:
    """Show a value in at most about 60 characters."""
    if isinstance(value, dict):
        if not value:
            return "{}"
        return f"fields ({', '.join(str(k)[:40] for k in value)})" if len(value) < 6 else f"{len(value)} fields"
    text = _SHORT.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def count(n: int, noun: str) -> str:
    """``1 stage``, ``2 micro-batches``, ``1,024 processes``."""
    return f"{n:,} {noun}" + ("" if n == 1 else "es" if noun.endswith(("s", "ch")) else "s")


def human_seconds(s: float) -> str:
    """``1.23 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(s) >= scale or unit == "µs":
            return f"{s / scale:.3g} {unit}"
    raise AssertionError


def human_bytes(n: float) -> str:
    """``1.5 GB``."""
    for unit in ("B", "kB", "MB"):
        if abs(n) < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB" if abs(n) < 1000 else f"{n:,.0f} GB"


def plan_count(plans: object) -> int | str:
    """Number of plans in a space; as text where JSON readers would round it."""
    assert isinstance(plans, int)
    return plans if plans < 2**53 else f"10^{len(str(plans)) - 1}"
