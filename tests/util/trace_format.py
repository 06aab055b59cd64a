"""Checks a file against the Trace Event Format (JSON object form), as far as lbpar uses it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any


def read_trace(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Checked events and other data of a trace file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    assert set(content) <= {"traceEvents", "displayTimeUnit", "otherData", "metadata"}
    assert content["displayTimeUnit"] in ("ms", "ns")
    for event in content["traceEvents"]:
        check_event(event)
    check_nesting(content["traceEvents"])
    return content["traceEvents"], content["otherData"]


def check_nesting(events: Iterable[Mapping[str, Any]]) -> None:
    """Complete events of one row lie inside or beside each other: viewers stack them, and cut off what reaches out of another one."""
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            rows.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for row, spans in rows.items():
        ends: list[float] = []
        for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-3, (
                f"row {row}: {start} to {end} reaches out of what ends at {ends[-1]}"
            )
            ends.append(end)


def check_event(event: Mapping[str, Any]) -> None:
    """One event: complete (X), instant (i) or metadata (M)."""
    assert isinstance(event["name"], str)
    assert type(event["pid"]) is int
    assert isinstance(event.get("args", {}), dict)
    match event["ph"]:
        case "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            assert event["name"] == "process_name" or type(event["tid"]) is int
            return
        case "X":
            assert _number(event["dur"])
            assert event["dur"] >= 0
        case "i":
            assert event["s"] in ("g", "p", "t")
        case other:
            raise AssertionError(f"phase {other}")
    assert _number(event["ts"])
    assert type(event["tid"]) is int
    assert isinstance(event["cat"], str)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value)
