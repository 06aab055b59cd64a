"""Progress for people: a bar on a terminal, lines in logs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Self, TextIO

from lbpar.tables import short
from lbpar.terminal import columns as terminal_columns
from lbpar.terminal import is_terminal, screen

PARTS = 10
LEAST, MOST = 2.0, 30.0
"""A log gets a line at each tenth of the work, but not more than one in two seconds and not less than one in thirty."""


class Progress:
    """Progress of a known number of units; a context manager.

    Parameters
    ----------
    total : int
        Units of work, for example steps of an epoch.
    enabled : bool
        False shows nothing (all ranks but one).
    stream : text stream, optional
        Default: standard error for a bar, standard output for lines.
    mode : "auto", "bar", "lines" or "none"
        Auto: a bar if a person watches the stream (`lbpar.terminal`), else lines.
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
        self._total, self._label, self._clock, self._done = total, label, clock, 0
        self._bar: Any = None
        self._log: TextIO | None = None
        if not enabled or mode == "none":
            return
        watched = screen(sys.stderr) if stream is None else stream
        if mode == "bar" or (mode == "auto" and is_terminal(watched)):
            from tqdm import tqdm

            width = terminal_columns(watched) - 1  # the last column would wrap on some terminals
            self._bar = tqdm(total=total, file=watched, desc=label or None, ncols=width, leave=False)
        else:
            self._log = stream or sys.stdout
            self._start = self._shown = clock()

    def update(self, units: int = 1, **fields: Any) -> None:
        """So many units are done; ``fields`` (loss, rate, ...) are shown beside, numbers with four digits."""
        text = "  ".join(f"{k} {short(v)}" for k, v in fields.items())
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(units)
        elif self._log is not None:
            self._line(units, text)

    def _line(self, units: int, text: str) -> None:
        before, self._done, now = self._done, self._done + units, self._clock()
        tenths = [done * PARTS // self._total if self._total else 0 for done in (before, self._done)]
        waited = now - self._shown
        if waited >= MOST or (tenths[0] != tenths[1] and waited >= LEAST):
            self._shown = now
            label = f"{self._label}: " if self._label else ""
            line = f"{label}{self._done}/{self._total}  {now - self._start:.1f} s  {text}"
            print(line.rstrip(), file=self._log, flush=True)

    def close(self) -> None:
        """Finish the bar; further calls do nothing."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()
