"""``python -m tests.cuda.resources [FILE ...]`` compiles the kernels and writes the table of what they take into the docs."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from threading import Lock

from lbpar.engine.cupy.names import GROUPS
from lbpar.engine.cupy.tiles import Card
from lbpar.selftest.gpu import FAST, TYPES
from lbpar.selftest.wanted import launched
from tests.cuda.nvrtc import ARCHITECTURES, Resources, compile_kernels

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu_kernels.md"
TILED = ("gemm.cu", "convolution.cu", "grouped.cu", "rims.cu")
"""Files of products, whose kernels are one for each way to cut them."""

START, END = "<!-- table -->", "<!-- end -->"


_once = Lock()


@cache
def _usual() -> dict[str, dict[str, dict[str, int]]]:
    cards = [Card(int(a.removeprefix("sm_")), processors) for a, processors in ARCHITECTURES.items()]
    found = launched(cards, [*TYPES.values(), *FAST.values()], plans=3)
    return dict(zip(ARCHITECTURES, found, strict=True))


def usual(architecture: str) -> dict[str, dict[str, int]]:
    """Per file, the tiled kernels that the self-test launches, with the shared memory that they ask for."""
    with _once:
        return _usual()[architecture]


def groups_of(file: str, architecture: str) -> tuple[tuple[str, ...], ...]:
    """What is compiled ahead, or what the self-test launches: a group for each kernel and element type."""
    if file in GROUPS:
        return GROUPS[file]
    names = usual(architecture)[file]
    kinds = dict.fromkeys(name.split(",")[0].rstrip(">") for name in names)
    return tuple(tuple(n for n in names if n.split(",")[0].rstrip(">") == kind) for kind in kinds)


def rows_of(file: str) -> list[str]:
    """A line per kernel: the most that any of its instantiations takes."""
    found: dict[str, list[Resources]] = {}
    for architecture in ARCHITECTURES:
        for names in filter(None, groups_of(file, architecture)):
            for r in compile_kernels(file, names, architecture):
                found.setdefault(r.name.split("<")[0], []).append(r)
    lines = []
    for name, rows in found.items():
        registers = [str(max(r.registers for r in rows if r.architecture == a)) for a in ARCHITECTURES]
        kinds = len({(r.name, r.architecture) for r in rows}) // len(ARCHITECTURES)
        dynamic = max(usual(r.architecture).get(file, {}).get(r.name, 0) for r in rows)
        shared, spilled = dynamic + max(r.shared for r in rows), max(r.spilled + r.stack for r in rows)
        lines.append(f"| {file} | `{name}` | {kinds} | {' | '.join(registers)} | {shared:,} | {spilled} |")
    return lines


def main(files: list[str]) -> None:
    text, known = PAGE.read_text(encoding="utf-8"), (*GROUPS, *TILED)
    before, rest = text.split(START)
    old, after = rest.split(END)
    kept = [line for line in old.splitlines() if line.startswith("| ") and line.split(" ")[1] in known]
    table = {file: [line for line in kept if line.startswith(f"| {file} ")] for file in known}
    for file in files or known:
        table[file] = rows_of(file)
        print(*table[file], sep="\n", flush=True)
    head = f"| file | kernel | variants | {' | '.join(ARCHITECTURES)} | shared bytes | spilled |"
    lines = [
        head,
        "|---|---|" + "---:|" * (3 + len(ARCHITECTURES)),
        *(line for file in sorted(table) for line in table[file]),
    ]
    PAGE.write_text(f"{before}{START}\n\n" + "\n".join(lines) + f"\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
