"""Progress and tables for people: a bar and boxes on a terminal, plain lines in logs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from lbpar.transport.terminal import columns as terminal_columns
from lbpar.transport.terminal import is_terminal, screen


class Progress:
    """Progress of a known number of units; a context manager.

    Parameters
    ----------
    total : int
        Units of work, for example steps of an epoch.
    enabled : bool
        False shows nothing (all ranks but one, or ``run.progress: none``).
    stream : text stream, optional
        Default: standard error for a bar, standard output for lines.
    mode : "auto", "bar" or "lines"
        Auto: a bar if a person watches the stream (`lbpar.transport.terminal`), else lines.
    label : str
        Stands in front.
    clock : callable
        Seconds; for tests.
    """

    def __init__(
        self,
        total: int,
        enabled: bool = True,
        stream: TextIO | None = None,
        mode: str = "auto",
        label: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view: _View = _Silent()
        if not enabled or mode == "none":
            return
        watched, log = (screen(sys.stderr), sys.stdout) if stream is None else (stream, stream)
        bar = _bar(total, watched, label) if mode == "bar" or (mode == "auto" and is_terminal(watched)) else None
        self._view = bar or _Lines(total, log, label, clock)

    def update(self, units: int = 1, **fields: Any) -> None:
        """So many units are done; ``fields`` (loss, rate, ...) are shown beside, numbers with four digits."""
        self._view.update(units, "  ".join(f"{k} {short(v)}" for k, v in fields.items()))

    def message(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        self._view.message(text)

    def close(self) -> None:
        """Finish the bar; further calls do nothing."""
        self._view.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def print_table(
    rows: Sequence[Mapping[str, Any] | Sequence[Any]],
    columns: Sequence[str] | None = None,
    title: str | None = None,
    stream: TextIO | None = None,
) -> None:
    """Print a short table: boxes on a terminal that is wide enough for them (rich), aligned columns elsewhere.

    Parameters
    ----------
    rows : sequence of mappings or sequences
        Mappings name their columns; missing values stay empty. Numbers are right-aligned, floats have four digits.
    columns : sequence of str, optional
        Headings; default for mappings: all keys in order of appearance; for sequences: no headings.
    title : str, optional
        Line above.
    stream : text stream, optional
        Default: standard output.
    """
    out = screen(sys.stdout) if stream is None else stream
    if columns is None:
        columns = list(dict.fromkeys(key for row in rows if isinstance(row, Mapping) for key in row))
    cells = [[row.get(c, "") for c in columns] if isinstance(row, Mapping) else list(row) for row in rows]
    width = max([len(columns), *map(len, cells)], default=0)
    cells = [row + [""] * (width - len(row)) for row in cells]
    headings = [str(c) for c in columns] + [""] * (width - len(columns)) if columns else []
    right = [any(_is_number(row[i]) for row in cells) for i in range(width)]
    texts = [[short(value) for value in row] for row in cells]
    if not (is_terminal(out) and _print_rich(texts, headings, right, title, out)):
        _print_plain(texts, headings, right, title, out)


def short(value: Any) -> str:
    """Text of a value: floats with four significant digits or, if large, whole; None as nothing."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


class _View(Protocol):
    def update(self, units: int, text: str) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


class _Silent:
    def update(self, units: int, text: str) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Bar:
    """tqdm's bar."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def update(self, units: int, text: str) -> None:
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(units)

    def message(self, text: str) -> None:
        self._bar.write(text, file=self._bar.fp)

    def close(self) -> None:
        self._bar.close()


def _bar(total: int, stream: TextIO, label: str) -> _Bar | None:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    width = terminal_columns(stream) - 1  # the last column would wrap on some terminals
    return _Bar(tqdm(total=total, file=stream, desc=label or None, ncols=width, leave=False))


class _Lines:
    """A line at each tenth of the work, but not more than one in two seconds and not less than one in thirty."""

    PARTS = 10
    LEAST, MOST = 2.0, 30.0

    def __init__(self, total: int, stream: TextIO, label: str, clock: Callable[[], float]) -> None:
        self._total = total
        self._stream = stream
        self._label = f"{label}: " if label else ""
        self._clock = clock
        self._done = 0
        self._start = self._shown = clock()

    def update(self, units: int, text: str) -> None:
        before, self._done = self._done, self._done + units
        now = self._clock()
        tenths = [done * self.PARTS // self._total if self._total else 0 for done in (before, self._done)]
        waited = now - self._shown
        if waited >= self.MOST or (tenths[0] != tenths[1] and waited >= self.LEAST):
            self._shown = now
            line = f"{self._label}{self._done}/{self._total}  {now - self._start:.1f} s  {text}"
            self.message(line.rstrip())

    def message(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _print_rich(
    texts: list[list[str]], headings: list[str], right: list[bool], title: str | None, stream: TextIO
) -> bool:
    """Print with rich; False if it is not installed, or the terminal is too narrow."""
    lines = [headings, *texts] if headings else texts
    need = sum(max((len(row[i]) for row in lines), default=0) + 3 for i in range(len(right))) + 1
    width = terminal_columns(stream)
    if need > width:
        return False
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(title=title, show_header=bool(headings))
    for i, to_right in enumerate(right):
        table.add_column(headings[i] if headings else "", justify="right" if to_right else "left")
    for row in texts:
        table.add_row(*(Text(cell) for cell in row))  # Text: square brackets in names are not markup
    Console(file=stream, width=width, force_terminal=True).print(table)
    return True


def _print_plain(
    texts: list[list[str]], headings: list[str], right: list[bool], title: str | None, stream: TextIO
) -> None:
    lines = ([headings] if headings else []) + texts
    widths = [max(len(row[i]) for row in lines) for i in range(len(right))] if lines else []
    if title:
        print(title, file=stream)
    for row in lines:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        print("  ".join(cells).rstrip(), file=stream)
    stream.flush()
