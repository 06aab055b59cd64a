"""Which stage works on which micro-batch, over time: as lines of text, and as bars of a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lbpar.cost.simulate import Span

COLOURS = {"F": "#4477aa", "B": "#66ccaa", "U": "#332288"}
WORDS = {"F": "forward", "B": "backward", "U": "update and sums of all"}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LEGEND = "forward a b c ..., backward A B C ... (a micro-batch each), = update and what is of all, . idle"


def pipeline_text(spans: Sequence[Span], width: int = 100) -> list[str]:
    """A line per place: what it does in each of ``width`` equal times.

    >>> pipeline_text([Span(0, "F", 0, 0, 1), Span(0, "B", 0, 3, 4), Span(1, "F", 0, 1, 2), Span(1, "B", 0, 2, 3)], 8)
    ['aa....AA', '..aaAA..']
    """
    if not spans:
        return []
    end = max(s.end for s in spans)
    lines = [["."] * width for _ in range(1 + max(s.place for s in spans))]
    for s in spans:
        letter = LETTERS[s.micro % len(LETTERS)]
        mark = {"F": letter, "B": letter.upper()}.get(s.kind, "=")
        for k in range(width):
            if s.start <= (k + 0.5) * end / width < s.end:
                lines[s.place][k] = mark
    return ["".join(line) for line in lines]


def draw_pipeline(axis: Any, spans: Sequence[Span], names: Sequence[str]) -> None:
    """Bars on a matplotlib axis: a row per place, the number of the micro-batch on every bar that has room for it."""
    end = max(s.end for s in spans)
    for s in spans:
        known = WORDS[s.kind] in axis.get_legend_handles_labels()[1]
        label = None if known else WORDS[s.kind]
        shade = {"alpha": 1.0 if s.micro % 2 else 0.75}  # neighbours are told apart
        lasts = 1e3 * (s.end - s.start)
        axis.barh(-s.place, lasts, 0.8, 1e3 * s.start, color=COLOURS[s.kind], label=label, linewidth=0, **shade)
        if s.micro >= 0 and s.end - s.start > end / 80:
            middle = 1e3 * (s.start + s.end) / 2
            axis.text(middle, -s.place, str(s.micro), ha="center", va="center", fontsize=6, color="white")
    axis.set_yticks([-i for i in range(len(names))], names, fontsize=7)
    axis.set_xlabel("ms")
    axis.legend(fontsize=7, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
