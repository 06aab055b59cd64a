"""An explained plan as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lbpar.text import human_bytes, human_seconds


def print_report(report: dict[str, Any], *, layers: bool = True, terminal: bool = False) -> None:
    """Print what `explain` made: layers, comparison, where the time goes; in colours only on a terminal."""
    from rich.console import Console

    # No markup: names of layers may hold square brackets.
    console = Console(width=None if terminal else 200, highlight=False, markup=False, force_terminal=terminal)
    step, space = report["step"], report["space"]
    console.print(
        f"{report['network']}: {report['parameters']:,} parameters, batch {report['batch']}, {report['procs']} processes "
        f"({'·'.join(map(str, report['grid'])) or '1'}) on {report['machine']['name']}, {report['dtype']}, {report['optimizer']}",
        style="bold",
    )
    if layers:
        console.print(_layers(report))
    if len(report["comparison"]) > 1:
        console.print(_comparison(report))
    console.print(_purposes(step))
    memory = report["memory"]
    parts = ", ".join(f"{k} {human_bytes(memory[k])}" for k in _MEMORY)
    console.print(f"Memory per process: {human_bytes(memory['peak'])} at {memory['where']} ({parts})")
    proof = "exact" if space["exact"] else f"bounded, gap {100 * space['gap']:.2g} %"
    console.print(
        f"Space: {space['plans']} plans, at most {space['candidates_most']} grids for each of {space['nodes']} groups of layers; "
        f"{proof}; width {space['width']}, {space['states']:,} states, {space['search_seconds']:.2f} s"
    )
    console.print(f"Chosen: {report['strategy']}. {report['limits']}")
    console.print(
        f"{human_seconds(step['seconds'])} a step, {step['samples_per_second']:.4g} samples/s (computation "
        f"{human_seconds(step['compute'])}, communication {human_seconds(step['communication'])}, of which {human_seconds(step['exposed'])} exposed)",
        style="bold",
    )
    for note in report["notes"]:
        console.print(note)


_MEMORY = ("weights", "gradients", "optimizer", "activations", "ghosts", "buffers", "reading", "overhead")


def _table(title: str, columns: Sequence[tuple[str, bool]], rows: Sequence[Sequence[str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_lines=False)
    for name, right in columns:
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(c) for c in row))
    return table


def _layers(report: dict[str, Any]) -> Any:
    rows = []
    for r in report["layers"]:
        kinds: dict[str, int] = {}
        for c in r["collectives"]:
            key = f"{c['kind']}({c['group']})"
            kinds[key] = kinds.get(key, 0) + 1
        rival = r["runner_up"]
        rows.append(
            [
                r["layer"],
                r["op"],
                r["words"],
                ", ".join(f"{n}× {k}" if n > 1 else k for k, n in kinds.items()),
                human_bytes(r["bytes"]) if r["bytes"] else "",
                human_seconds(r["communication_seconds"]) if r["collectives"] else "",
                human_seconds(r["compute_seconds"]),
                human_bytes(r["memory_bytes"]),
                f"{rival['words']} (+{human_seconds(rival['extra_seconds'])})" if rival else "",
            ]
        )
    columns = [
        ("layer", False),
        ("op", False),
        ("grid", False),
        ("collectives (processes)", False),
        ("sent", True),
        ("moves", True),
        ("compute", True),
        ("memory", True),
        ("next best, neighbours unchanged", False),
    ]
    return _table("Layers, per step and process", columns, rows)


def _comparison(report: dict[str, Any]) -> Any:
    rows = [
        [
            c["strategy"],
            human_seconds(c["seconds"]),
            f"{c['ratio']:.2f}",
            human_seconds(c["compute"]),
            human_seconds(c["communication"]),
            human_seconds(c["exposed"]),
            human_bytes(c["bytes"]),
            human_bytes(c["memory"]) + ("" if c["fits"] else " (too much)"),
        ]
        for c in report["comparison"]
    ]
    names = ("step", "ratio", "compute", "communication", "exposed", "sent", "memory")
    return _table("Strategies, priced the same way", [("strategy", False), *((n, True) for n in names)], rows)


def _purposes(step: dict[str, Any]) -> Any:
    total = sum(step["by_purpose"].values()) or 1.0
    rows = [[k, human_seconds(v), f"{100 * v / total:.0f} %"] for k, v in step["by_purpose"].items()]
    return _table("Where the time goes (sum of all steps)", [("", False), ("", True), ("", True)], rows)
