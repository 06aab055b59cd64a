"""What links were fitted to, beside the machine file: as numbers and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lbpar.calibrate.links import Timed

#: What a name says of a machine file that was written, and of one that was not.
FIT, REFUSED = ".fit", ".refused"


def write_fit(moves: Sequence[Timed], out: Path, refused: bool = False) -> Path | None:
    """Write ``STEM.fit.json``, and ``STEM.fit.svg`` and ``.png`` where matplotlib is installed; nothing if no links were measured.

    Of a machine file that is ``refused`` they are called ``STEM.refused.json``, ...: beside an older machine file that is still there lies
    what that was fitted to. A file that is written leaves none of these. Returns what people will look at.
    """
    name = REFUSED if refused else FIT
    for suffix in (".json", ".svg", ".png"):
        out.with_suffix(REFUSED + suffix).unlink(missing_ok=True)
    if not moves:
        return None
    rows = [{**asdict(t), "residual": t.fitted / t.seconds - 1} for t in moves]
    out.with_suffix(f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    try:
        import matplotlib
    except ImportError:
        return out.with_suffix(f"{name}.json")
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((t.level, t.kind) for t in moves))
    figure = Figure(figsize=(4 * min(3, len(panels)), 3 * -(-len(panels) // 3)), layout="constrained")
    for i, (level, kind) in enumerate(panels):
        axes = figure.add_subplot(-(-len(panels) // 3), min(3, len(panels)), i + 1)
        for ways in sorted({t.ways for t in moves if (t.level, t.kind) == (level, kind)}):
            line = sorted((t for t in moves if (t.level, t.kind, t.ways) == (level, kind, ways)), key=lambda t: t.bytes)
            sizes, micro = [t.bytes for t in line], [1e6 * t.seconds for t in line]
            bars = axes.errorbar(
                sizes, micro, [1e6 * t.seconds * t.spread for t in line], fmt="o", label=f"{ways} ranks"
            )
            axes.plot(sizes, [1e6 * t.fitted for t in line], color=bars[0].get_color())
        axes.set(title=f"{kind} ({level})", xscale="log", yscale="log", xlabel="bytes of the busiest rank", ylabel="µs")
        axes.legend()
    for suffix in (".png", ".svg"):
        figure.savefig(out.with_suffix(name + suffix))
    return out.with_suffix(f"{name}.svg")
