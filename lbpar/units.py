"""Quantities as people read them."""

from __future__ import annotations


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
