"""Parts of a self-test, each in a process of its own: one that fails, crashes or hangs ends neither the others nor the device's context.

``python -m lbpar.selftest.parts SPEC FILE`` is such a process: it calls what SPEC (JSON) names, and writes what that returns to FILE. It ends
with all that it has started when its standard input ends: whoever started it is gone, however that came about, and nothing must be left on
the device.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from lbpar.errors import LbparError
from lbpar.selftest.room import crowded, left_out, no_room

PYTHON = (sys.executable, "-m")
"""Runs a module of lbpar in another process."""

PATIENCE = 6
"""A part is ended when it takes so many times as long as it should, and at least `LEAST` seconds."""

LEAST = 90.0


@dataclass(frozen=True)
class Part:
    """Something that can be found out by itself.

    Attributes
    ----------
    name : str
    call : str
        ``module:function``. It returns what it found: text, or a mapping whose ``found`` is that, ``failed`` whether it is bad, and the rest
        figures.
    arguments : mapping
        Of the function, by keyword.
    seconds : float
        What it should take at most; it is left out where less time is left.
    alone : bool
        Nothing else may run meanwhile: it measures, or others need what it makes.
    missing : str
        What it needs and is not there, in words, so that it is left out; or "".
    """

    name: str
    call: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 10.0
    alone: bool = False
    missing: str = ""


Row = dict[str, Any]


def run(parts: Iterable[Part], budget: float, workers: int, say: Callable[[Row], object]) -> list[Row]:
    """Run parts, several at once but for those that measure, and return a row for each: ``part``, ``found``, ``seconds``, ``failed``,
    and its figures.

    Parameters
    ----------
    parts : iterable of Part
        The most important first.
    budget : float
        Seconds for all of them.
    workers : int
        Parts that run at the same time.
    say : callable
        Called with each row when it is there.
    """
    deadline, rows, one_at_a_time = time.monotonic() + budget, list[Row](), threading.Lock()
    running: set[subprocess.Popen[bytes]] = set()
    interrupted = threading.Event()

    def one(part: Part) -> Row:
        row = _run(part, deadline, running, interrupted)
        with one_at_a_time:
            say(row)
        return row

    for alone, group in groupby(parts, key=lambda p: p.alone):
        with ThreadPoolExecutor(1 if alone else workers) as pool:
            try:
                rows += pool.map(one, group)
            except BaseException:  # somebody wants an end of it: leave nothing behind on the device
                interrupted.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for child in tuple(running):
                    _end(child)
                raise
    return rows


def _run(part: Part, deadline: float, running: set[subprocess.Popen[bytes]], interrupted: threading.Event) -> Row:
    row: Row = {"part": part.name, "found": "", "seconds": 0.0, "failed": False}
    if part.missing:
        return row | {"found": f"left out: {part.missing}", "left out": True}
    left = deadline - time.monotonic()
    if left < part.seconds:
        return row | {
            "found": f"left out: it may take {part.seconds:.0f} s, and {max(0.0, left):.0f} s are left",
            "left out": True,
        }
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lbpar-selftest-") as folder:
        out, log = Path(folder) / "found.json", Path(folder) / "log"
        with log.open("wb") as said:
            child = subprocess.Popen(
                [*PYTHON, "lbpar.selftest.parts", json.dumps(asdict(part)), str(out)],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            running.add(child)
            if interrupted.is_set():  # who ended those that ran has not seen this one
                _end(child)
            patience = max(LEAST, PATIENCE * part.seconds)
            try:
                child.wait(min(left, patience))
            except subprocess.TimeoutExpired:
                after = f"no end after {time.monotonic() - started:.0f} s"
                late = {"left out": True, "found": f"left out: {after}, when no time was left"}
                row |= late if left < patience else {"failed": True, "found": after}
            running.discard(child)
            _end(child)
        if out.exists():
            found = json.loads(out.read_text(encoding="utf-8"))
            row |= {"failed": False, **(found if isinstance(found, dict) else {"found": found})}
        elif not row["found"]:
            how = f"signal {-child.returncode}" if child.returncode < 0 else f"status {child.returncode}"
            row |= {"failed": True, "found": f"ended with {how}"}
        if interrupted.is_set() and row["failed"]:
            row |= {"failed": False, "found": "left out: interrupted", "left out": True}
        if row["failed"]:
            row["log"] = log.read_text(encoding="utf-8", errors="replace")[-4000:]
    return row | {"seconds": time.monotonic() - started}


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert child.stdin is not None
    child.stdin.close()


def _end_with_parent() -> None:
    """End this process and those that it has started when nobody holds the other end of its standard input any more."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _leave_to_parent(number: int, frame: FrameType | None) -> None:
    """Nothing: batch systems ask all processes of a job to end, and a part that did so by itself would look like one that failed."""


def main(argv: list[str]) -> int:
    """Run one part."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_to_parent)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    spec, out = json.loads(argv[0]), Path(argv[1])
    module, _, function = spec["call"].partition(":")
    try:
        found, failed = getattr(import_module(module), function)(**spec["arguments"]), False
    except Exception as error:  # noqa: BLE001  whatever it is, the parent says it
        if no_room(error) and (spec["alone"] or crowded()):
            found, failed = left_out(error), False
        else:
            said = str(error)
            if not isinstance(error, LbparError):
                traceback.print_exc()
                said = f"{type(error).__name__}: {error}"
            found, failed = {"found": said, "failed": True}, True
    part = out.with_suffix(".part")
    part.write_text(json.dumps(found, default=str), encoding="utf-8")
    part.replace(out)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
