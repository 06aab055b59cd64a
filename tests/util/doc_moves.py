"""The communication of the networks that documentation pages show, as text: derived from the program, never typed.

A page holds a run file in a ```yaml block and its collectives in a ```moves block. To write the latter anew:
``python -m tests.util.doc_moves docs/strategies/*.md``
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lbpar.config.run_file import parse_run
from lbpar.layout.exchange import volume
from lbpar.program.lowering import lower
from lbpar.program.steps import Program, Start
from lbpar.train.setup import build_graph, build_plan

YAML = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOVES = re.compile(r"^```moves\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def program(text: str) -> Program:
    """The program of a run file that says ``parallel.procs``."""
    run = parse_run(text)
    graph = build_graph(run)
    plan = build_plan(run, graph, run.parallel.procs or 1)
    return lower(graph, plan, run.train.batch, overlap=False)


def table(prog: Program) -> str:
    """One line per collective: pass, layer, collective, tensor, groups of ranks, elements that rank 0 sends."""
    rows = [("pass", "layer", "collective", "of", "groups of ranks", "sent")]
    for start in prog.moves:
        if start.move.kind != "slice" and start.node != "loss":
            rows.append(_row(start))
    widths = [max(len(r[i]) for r in rows) for i in range(5)]
    return "".join("  ".join([*(c.ljust(w) for c, w in zip(r[:5], widths, strict=True)), r[5]]) + "\n" for r in rows)


def _row(start: Start) -> tuple[str, ...]:
    grid = start.move.src.grid
    groups = sorted({grid.group(start.move.axes, r) for r in range(grid.size)})
    listed = " | ".join(" ".join(map(str, g)) for g in groups)
    whole, _, part = start.src.partition("#")
    value = whole.split("@")[0]
    tensor = f"{start.node} dy" if ":dx" in value else value.replace(":grad", " gradient").replace(":", " ")
    tensor += f", part {part}" if part and "gradient" not in tensor else ""
    return (start.phase, start.node, start.move.kind, tensor, listed, str(volume(start.move, 0).elements))


def expected(page: str) -> str:
    """The ```moves block that belongs to a page's run file."""
    found = YAML.search(page)
    assert found, "the page has no ```yaml block"
    return table(program(found[1]))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        page = path.read_text(encoding="utf-8")
        before, _, rest = page.partition("```moves\n")
        path.write_text(f"{before}```moves\n{expected(page)}{rest[rest.index('```') :]}", encoding="utf-8")
