"""`python -m lbpar.study papers --out DIR`: the papers' figures and tables beside ours, in one command."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from lbpar.config.output import make_directory
from lbpar.papers.figures import draw_all
from lbpar.papers.rows import SECTIONS, Row
from lbpar.study.page import page, table

TAGS = {
    "R": "read in the paper",
    "C": "read in the authors' public code",
    "F": "measured in a figure, about 1 % of the axis",
    "D": "derived: algebra, or a run of the authors' prototype",
}


def write_papers(out: Path) -> dict[str, Any]:
    """Write papers.json, index.md, index.html and the figures into ``out``; return counts.

    Raises
    ------
    ConfigError
        ``out`` cannot be made or written.
    Unsupported
        matplotlib is not installed.
    """
    make_directory(out, "study papers")
    figures = draw_all(out)
    sections = {title: list(rows()) for title, rows in SECTIONS.items()}
    every = [row for rows in sections.values() for row in rows]
    (out / "papers.json").write_text(json.dumps([row.record() for row in every], indent=1) + "\n")
    (out / "index.md").write_text(markdown(sections, figures))
    (out / "index.html").write_text(html_page(sections, figures))
    return {
        **_counts(every),
        "differ": [row.id for row in every if not row.agrees and not row.timing],
        "slow": [row.id for row in every if not row.agrees and row.timing],
        "figures": sum(map(len, figures.values())),
    }


def show(value: Any) -> str:
    """A value as a table prints it."""
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list):
        return "(" + ", ".join(map(str, value)) + ")"
    return str(value)


def cells(row: Row) -> list[str]:
    """A row's cells."""
    error = row.relative_error
    wanted = "at most" if row.better else ("equal" if row.tolerance is None else f"{100 * row.tolerance:.3g} %")
    difference = "" if error is None else f"{100 * error:+.2f} %"
    agrees = ("fitted" if row.fitted else "yes") if row.agrees else "NO"
    return [row.id, show(row.paper), show(row.ours), difference, wanted, row.tag, agrees]


HEADS = ["id", "paper", "ours", "difference", "wanted", "tag", "agrees"]


def _counts(rows: list[Row]) -> dict[str, int]:
    """How many values there are and how many agree, those that constants were fitted to apart."""
    free, fitted = ([row for row in rows if row.fitted is f] for f in (False, True))
    agree, agree_fitted = (sum(row.agrees for row in part) for part in (free, fitted))
    return {"rows": len(free), "agree": agree, "fitted": len(fitted), "fitted_agree": agree_fitted}


def summary(counts: dict[str, Any]) -> str:
    """The counts as a sentence."""
    text = "{agree} of {rows} published values agree; {fitted_agree} of {fitted} more agree because constants were fitted to them"
    return text.format(**counts)


def _summary(sections: dict[str, list[Row]]) -> str:
    return summary(_counts([row for rows in sections.values() for row in rows])) + "."


def markdown(sections: dict[str, list[Row]], figures: dict[str, list[str]]) -> str:
    """The index as Markdown."""
    lines = ["# The papers, reproduced", "", _summary(sections), ""]
    lines += [f"- {tag}: {meaning}" for tag, meaning in TAGS.items()] + [""]
    for paper, names in figures.items():
        lines += [f"## {paper}", ""] + [f"![{n}]({n})" for n in names] + [""]
    for title, rows in sections.items():
        lines += [f"## {title}", "", "| " + " | ".join(HEADS) + " |", "|" + " --- |" * len(HEADS)]
        lines += ["| " + " | ".join(cells(r)) + " |" for r in rows] + [""]
    return "\n".join(lines)


def html_page(sections: dict[str, list[Row]], figures: dict[str, list[str]]) -> str:
    """The index as one HTML page."""
    parts = [
        f"<p>{_summary(sections)}</p><ul>",
        *(f"<li>{tag}: {html.escape(text)}</li>" for tag, text in TAGS.items()),
        "</ul>",
    ]
    for paper, names in figures.items():
        parts.append(f"<h2>{html.escape(paper)}</h2>")
        parts += [f"<p><img src='{n}' alt='{n}'></p>" for n in names]
    for title, rows in sections.items():
        parts.append(f"<h2>{html.escape(title)}</h2>")
        parts.append(table(HEADS, map(cells, rows), [not row.agrees for row in rows]))
    return page("The papers, reproduced", parts)
