"""Tables for people: boxes on a terminal that is wide enough for them, aligned columns elsewhere."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from lbpar.terminal import columns as terminal_columns
from lbpar.terminal import is_terminal, screen

QUANTITY = re.compile(r"[-+~]?[\d,.]+(e[-+]?\d+)?( ?%| [kMG]?B| [mµ]?s)?")
"""A number in a text, alone or with a unit as in `lbpar.text`."""


def print_table(
    rows: Sequence[Mapping[str, Any] | Sequence[Any]],
    columns: Sequence[str] = (),
    title: str | None = None,
    stream: TextIO | None = None,
) -> None:
    """Print a short table: boxes on a terminal that is wide enough for them, aligned columns elsewhere.

    Parameters
    ----------
    rows : sequence of mappings or sequences
        Mappings name their columns; missing values stay empty. Numbers are right-aligned, with or without a unit; floats have four
        digits.
    columns : sequence of str, optional
        Headings; default for mappings: all keys in order of appearance; for sequences: no headings.
    title : str, optional
        Line above.
    stream : text stream, optional
        Default: standard output.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = screen(sys.stdout) if stream is None else stream
    columns = columns or list(dict.fromkeys(key for row in rows if isinstance(row, Mapping) for key in row))
    cells = [[row.get(c, "") for c in columns] if isinstance(row, Mapping) else list(row) for row in rows]
    table = Table(title=title, title_justify="left", show_header=bool(columns))
    for i in range(max([len(columns), *map(len, cells)], default=0)):
        right = any(_is_number(row[i]) for row in cells if i < len(row))
        heading = Text(columns[i]) if i < len(columns) else ""
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for row in cells:
        table.add_row(*(Text(short(cell)) for cell in row))  # Text: square brackets in names are not markup
    console, text = Console(file=out, width=terminal_columns(out), force_terminal=True), io.StringIO()
    unlimited = Console(file=text, width=10**6)
    if is_terminal(out) and unlimited.measure(table).maximum <= console.width:
        console.print(table)
        return
    table.title, table.box, table.pad_edge = None, None, False
    unlimited.print(table)
    lines = [title] if title else []
    for line in lines + [line.rstrip() for line in text.getvalue().splitlines() if table.columns]:
        print(line, file=out)
    out.flush()


def short(value: Any) -> str:
    """Text of a value: floats with four significant digits or, if large, whole; None as nothing."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return QUANTITY.fullmatch(value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)
