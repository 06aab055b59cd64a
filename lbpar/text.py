"""Quantities and names as people read them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: object, known: Iterable[str]) -> str:
    """``did you mean 'x'? `` for the closest known name, in whatever case it was typed, or an empty string."""
    lower = {k.lower(): k for k in reversed(list(known))}
    close = get_close_matches(str(name).lower(), list(lower), n=1, cutoff=0.6)
    return f"did you mean '{lower[close[0]]}'? " if close else ""


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
