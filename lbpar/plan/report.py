"""An explained plan as tables."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lbpar.plan.pipeline_picture import LEGEND
from lbpar.program.words import tally
from lbpar.tables import print_table
from lbpar.terminal import is_terminal, screen
from lbpar.text import count, human_bytes, human_seconds

_MEMORY = ("weights", "gradients", "optimizer", "activations", "ghosts", "buffers", "reading", "overhead")


def print_report(report: dict[str, Any], *, layers: bool = True) -> None:
    """Print what `explain` made: layers, comparison, where the time goes; in colours only on a terminal."""
    say, step, space = _printer(), report["step"], report["space"]
    say(
        f"{report['network']}: {report['parameters']:,} parameters, batch {report['batch']}, {count(report['procs'], 'process')} "
        f"({'·'.join(map(str, report['grid'])) or '1'}) on {report['machine']['name']}, {report['dtype']}, {report['optimizer']}",
        style="bold",
    )
    if layers:
        print_table([_layer(r) for r in report["layers"]], title="Layers, per step and process")
    if len(report["comparison"]) > 1:
        print_table([_compared(c) for c in report["comparison"]], title="Strategies, priced the same way")
    if "stages" in report:
        print_table([_stages(r) for r in report["stages"]], title="Stages, priced the same way")
        found = [r for r in report["stages"] if r["plans"] is not None]
        for stages in sorted({r["stages"] for r in found}):
            rows = [r for r in found if r["stages"] == stages and r["schedule"] != "interleaved"]
            gap = max(r["gap"] for r in found if r["stages"] == stages)
            proven = "exact" if gap == 0 else f"bounded, gap at most {100 * gap:.2g} %"
            say(f"Space with {count(stages, 'stage')}: {rows[0]['plans']} plans, cuts and grids together; {proven}")
        for line in (*report["unpriced"], *report["whether_stages_pay"]):
            say(line)
        if report["pipeline"]["spans"]:
            say(f"Pipeline of {report['pipeline']['name']} ({LEGEND}):")
            for i, line in enumerate(report["pipeline"]["lines"]):
                say(f"  stage {i}: {line}")
    total = sum(step["by_purpose"].values()) or 1.0
    purposes = [(k, human_seconds(v), f"{100 * v / total:.0f} %") for k, v in step["by_purpose"].items()]
    print_table(purposes, title="Where the time goes (sum of all steps)")
    memory = report["memory"]
    parts = ", ".join(f"{k} {human_bytes(memory[k])}" for k in _MEMORY)
    say(f"Memory per process: {human_bytes(memory['peak'])} at {memory['where']} ({parts})")
    if report["recompute"]:
        say(_recomputed(report["recompute"]))
    searched = f"width {space['width']}, {space['states']:,} states"
    if "stretches" in space:
        searched = f"cuts and grids together, {space['stretches']} stretches searched"
    proof = "exact" if space["exact"] else f"bounded, gap {100 * space['gap']:.2g} %"
    say(
        f"Space: {space['plans']} plans, at most {space['candidates_most']} grids for each of {space['nodes']} groups of layers; "
        f"{proof}; {searched}, {space['search_seconds']:.2f} s"
    )
    say(f"Chosen: {report['strategy']}. {report['limits']}")
    exposed = human_seconds(step["exposed"])
    waits = f"of which {exposed} exposed" if step["stages"] == 1 else f"waiting {exposed} at the busiest stage"
    say(
        f"{human_seconds(step['seconds'])} a step, {step['samples_per_second']:.4g} samples/s (computation "
        f"{human_seconds(step['compute'])}, communication {human_seconds(step['communication'])}, {waits})",
        style="bold",
    )
    for note in report["notes"]:
        say(note)


def _printer() -> Callable[..., None]:
    from rich.console import Console

    out = screen(sys.stdout)
    watched = is_terminal(out)
    # No markup: names of layers may hold square brackets. A log gets whole lines.
    return Console(file=out, highlight=False, markup=False, force_terminal=watched, soft_wrap=not watched).print


def _recomputed(r: dict[str, Any]) -> str:
    more = 100 * (r["seconds"] / r["seconds_kept"] - 1)
    return (
        f"Computed again in the backward pass: {len(r['layers'])} layers; memory {human_bytes(r['memory_kept'])} -> {human_bytes(r['memory'])}, "
        f"step {human_seconds(r['seconds_kept'])} -> {human_seconds(r['seconds'])} ({more:+.1f} %)"
    )


def _layer(r: dict[str, Any]) -> dict[str, Any]:
    rival = r["runner_up"]
    return {
        "layer": r["layer"],
        "op": r["op"],
        "grid": r["words"],
        "collectives (processes)": tally(f"{c['kind']}({c['group']})" for c in r["collectives"]),
        "sent": human_bytes(r["bytes"]) if r["bytes"] else "",
        "moves": human_seconds(r["communication_seconds"]) if r["collectives"] else "",
        "compute": human_seconds(r["compute_seconds"]),
        "memory": human_bytes(r["memory_bytes"]) + (" (again)" if r["recompute"] else ""),
        "next best, neighbours unchanged": f"{rival['words']} (+{human_seconds(rival['extra_seconds'])})"
        if rival
        else "",
    }


def _stages(r: dict[str, Any]) -> dict[str, Any]:
    return {
        "plan": r["plan"],
        "stages": r["stages"],
        "schedule": "delayed, changes the arithmetic" if r["schedule"] == "delayed" else r["schedule"] or "",
        "micro-batches": r["micro_batches"],
        "step": human_seconds(r["seconds"]),
        "samples/s": f"{r['samples_per_second']:.4g}",
        "not computing": f"{100 * r['bubble']:.0f} %" if r["schedule"] else "",
        "idle by formula": f"{100 * r['bubble_of_formula']:.0f} %" if r["schedule"] else "",
        "across borders": human_bytes(r["border_bytes"]) if r["border_bytes"] else "",
        "memory of each stage": " ".join(map(human_bytes, r["memory_bytes"])) + ("" if r["fits"] else " (too much)"),
    }


def _compared(c: dict[str, Any]) -> dict[str, str]:
    return {
        "strategy": c["strategy"],
        "step": human_seconds(c["seconds"]),
        "ratio": f"{c['ratio']:.2f}",
        **{name: human_seconds(c[name]) for name in ("compute", "communication", "exposed")},
        "sent": human_bytes(c["bytes"]),
        "memory": human_bytes(c["memory"]) + ("" if c["fits"] else " (too much)"),
    }
