"""The rows of a study: its points in plain numbers, with what follows from comparing them."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from lbpar.study.points import STRONG, Point

#: Columns of ``study.csv``; parts of a step follow as ``part: kind``, predicted ones as ``predicted: kind``.
COLUMNS = (
    "plan", "procs", "batch", "input", "seconds", "spread", "samples_per_second", "speedup", "efficiency", "predicted_seconds",
    "predicted_speedup", "predicted / measured", "memory", "predicted_memory", "bytes", "predicted_bytes", "imbalance", "hosts",
    "oversubscribed", "idle_ranks", "used_ranks", "error",
)  # fmt: skip


def make_rows(kind: str, points: Sequence[Point], found: Sequence[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
    """A row per point, plan by plan.

    Speed-up is over the first point of the same plan that ran, times its number of processes: in a strong study its time over
    this one's, in a weak study the same of times per unit of work. Efficiency is speed-up over processes.

    Parameters
    ----------
    kind : {"strong", "weak"}
    points : sequence of Point
    found : sequence
        For each point what its folder or the planner says (`lbpar.study.measure`, `lbpar.study.predict`); None if not yet run.
    """
    rows: list[dict[str, Any]] = []
    for point, f in zip(points, found, strict=True):
        f = f or {"error": "not run yet"}
        predicted = f.get("predicted", {})
        row = {
            "plan": point.plan,
            "procs": point.procs,
            "batch": point.batch,
            "input": "x".join(map(str, point.input)) if point.input else None,
            **{
                k: f.get(k)
                for k in (
                    "seconds",
                    "spread",
                    "memory",
                    "bytes",
                    "imbalance",
                    "hosts",
                    "oversubscribed",
                    "doubts",
                    "error",
                )
            },
            "predicted_seconds": predicted.get("seconds"),
            "predicted_memory": predicted.get("memory"),
            "predicted_bytes": predicted.get("bytes"),
            "idle_ranks": f.get("idle_ranks"),
            "used_ranks": f.get("used_ranks"),
            "parts": f.get("parts", {}),
            "predicted_parts": predicted_parts(predicted),
            "repeats": f.get("repeats", []),
        }
        rows.append(row)
        time = row["seconds"] or row["predicted_seconds"]
        row["samples_per_second"] = point.batch / time if time else None
        for seconds, speedup in (("seconds", "speedup"), ("predicted_seconds", "predicted_speedup")):
            first = next((r for r in rows if r["plan"] == point.plan and r[seconds]), None)
            work = 1 if kind == STRONG or first is None else point.procs / first["procs"]
            row[speedup] = first["procs"] * work * first[seconds] / row[seconds] if first and row[seconds] else None
        gained = row["speedup"] or row["predicted_speedup"]
        row["efficiency"] = gained / point.procs if gained else None
        both = row["seconds"] and row["predicted_seconds"]
        row["predicted / measured"] = row["predicted_seconds"] / row["seconds"] if both else None
    return rows


def predicted_parts(predicted: Mapping[str, Any]) -> dict[str, float]:
    """A predicted step in parts: computation and update, and each kind of move as far as computation does not hide it."""
    if not predicted:
        return {}
    kinds = {k: s for k, s in predicted["by_kind"].items() if s}
    moves = {k: s for k, s in kinds.items() if k not in ("compute", "update", "slice", "sum")}
    shown = predicted["exposed"] / (sum(moves.values()) or 1.0)
    own = sum(s for k, s in kinds.items() if k not in moves and k != "update")
    return {"compute": own, "update": kinds.get("update", 0.0), **{k: s * shown for k, s in moves.items()}}


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """``study.csv``: seconds, bytes and plain numbers; a column for each part of a step that some point has."""
    parts = dict.fromkeys(k for row in rows for k in row["parts"])
    predicted = dict.fromkeys(k for row in rows for k in row["predicted_parts"])
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow([*COLUMNS, *(f"part: {k}" for k in parts), *(f"predicted: {k}" for k in predicted)])
    for row in rows:
        cells = [row.get(c) for c in COLUMNS]
        cells += [row["parts"].get(k) for k in parts] + [row["predicted_parts"].get(k) for k in predicted]
        out.writerow(["" if c is None else c for c in cells])
    return text.getvalue()
