"""Pages that open without a network: text, tables and figures in one HTML file."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}img,svg{max-width:100%;height:auto}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #ccc;padding:.15rem .5rem;font-size:13px}"
    ".no{background:#fdd}pre{white-space:pre-wrap;background:#f4f4f4;padding:.5rem;font-size:12px}"
)


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page."""
    head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return "\n".join([head, f"<h1>{html.escape(title)}</h1>", *parts]) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], marked: Sequence[bool] = ()) -> str:
    """A table of texts; ``marked`` rows are coloured."""
    lines = [f"<table><tr>{''.join(f'<th>{html.escape(h)}</th>' for h in heads)}</tr>"]
    for i, row in enumerate(rows):
        mark = " class='no'" if i < len(marked) and marked[i] else ""
        lines.append(f"<tr{mark}>{''.join(f'<td>{html.escape(c)}</td>' for c in row)}</tr>")
    return "\n".join([*lines, "</table>"])


def figures(drawn: Mapping[str, str]) -> Iterable[str]:
    """SVG texts under their titles, drawn into the page."""
    for title, svg in drawn.items():
        yield f"<h2>{html.escape(title)}</h2>\n{svg[svg.index('<svg') :]}"
