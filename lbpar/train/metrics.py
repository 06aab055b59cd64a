"""Metrics of a run: one record, written as a line of JSON, a row of CSV and TensorBoard events."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Self

from lbpar.errors import CheckpointError, ConfigError
from lbpar.json_text import dumps, unwritable, write_text
from lbpar.text import flatten

Record = dict[str, Any]


class MetricsWriter:
    """Writes records as they come; one process of the run has it.

    A record is a mapping with ``step`` (updates so far), usually ``epoch``, ``loss``, ``accuracy``, ``seconds``,
    ``images_per_s``, and ``steps``: per kind of step, its ``bytes`` and ``seconds``. Nested keys become columns and
    TensorBoard tags joined by ``/`` (``steps/allreduce/bytes``). NaN and infinity become null in JSON and an empty
    cell in CSV.

    Parameters
    ----------
    out_dir : path
        The run directory; made if missing.
    csv : bool
        Also write ``metrics.csv``. New keys in a later record add columns.
    tensorboard : bool
        Also write event files, in ``out_dir`` itself (``tensorboard --logdir out_dir``).
    resume_step, epochs : int, optional
        The run goes on from a checkpoint of this step, before which so many epochs were done: keep what was written, less the
        records of later steps, that of an epoch which goes on, and a last line that was cut off. Without them, files of an
        earlier run are replaced.

    Raises
    ------
    CheckpointError
        The directory cannot be written, or (resuming) ``metrics.jsonl`` is damaged.
    ConfigError
        TensorBoard is asked for but not installed.
    """

    def __init__(
        self,
        out_dir: str | os.PathLike[str],
        csv: bool = True,
        tensorboard: bool = True,
        resume_step: int | None = None,
        epochs: int | None = None,
    ) -> None:
        out = Path(out_dir)
        self._path, self._table = out / "metrics.jsonl", out / "metrics.csv" if csv else None
        if tensorboard:
            tensorboard_messages()  # a missing package must show before a file is touched
        kept = [] if resume_step is None else read_metrics(self._path, resume_step)
        if epochs is not None:
            kept = [record for record in kept if record.get("epoch", 0) <= epochs]
        self._rows = [flatten(record, "/") for record in kept]
        write_text(self._path, "".join(dumps(record) + "\n" for record in kept))
        self._write_table()
        last = None if resume_step is None else max((record.get("step", 0) for record in kept), default=0)
        self._events = _Events(out, last) if tensorboard else None
        with _writing(self._path):
            self._lines = open(self._path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record to every file and flush, so that a run that dies keeps it."""
        line = dumps(record)
        with _writing(self._path):
            self._lines.write(line + "\n")
            self._lines.flush()
        self._rows.append(flatten(json.loads(line), "/"))
        self._write_table()
        if self._events is not None:
            self._events.write(self._rows[-1])

    def _write_table(self) -> None:
        if self._table is None:
            return
        text = io.StringIO()
        if columns := list(dict.fromkeys(key for row in self._rows for key in row)):
            table = csv.DictWriter(text, columns, lineterminator="\n")
            table.writeheader()
            table.writerows(self._rows)
        write_text(self._table, text.getvalue())

    def close(self) -> None:
        """Close the files; further calls do nothing."""
        with _writing(self._path):
            try:
                self._lines.close()
            finally:
                if self._events is not None:
                    self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with suppress(CheckpointError) if error is not None else nullcontext():  # what could not be written fails again
            self.close()


def read_metrics(path: str | os.PathLike[str], last_step: int | None = None) -> list[Record]:
    """Records of a ``metrics.jsonl``, up to ``last_step``; empty if there is no file. A cut-off last line is dropped.

    Raises
    ------
    CheckpointError
        Another line is not a JSON object.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}. Check the run directory's rights.") from error
    records = []
    for number, line in enumerate(lines, start=1):
        record = None
        with suppress(ValueError):
            record = json.loads(line)
        if not isinstance(record, dict):
            if number == len(lines):
                break
            raise CheckpointError(
                f"{path}, line {number}: expected a JSON object, got {line[:60]!r}. Repair or remove the line."
            )
        if last_step is None or record.get("step", 0) <= last_step:
            records.append(record)
    return records


class _Events:
    """TensorBoard event files, by TensorBoard's record writer on a plain file: no thread, no TensorFlow, no PyTorch."""

    def __init__(self, out: Path, last: int | None) -> None:
        """``last``: step of the last record that stays, of a run that goes on."""
        self._event, self._summary, session, writer = tensorboard_messages()
        if last is None:
            for stale in out.glob("events.out.tfevents.*"):
                with suppress(OSError):
                    stale.unlink()
        self._path = out / f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{time.time_ns()}.{os.getpid()}"
        with _writing(self._path):
            self._writer = writer(open(self._path, "ab"))  # noqa: SIM115
        self._add(file_version="brain.Event:2")
        if last is not None:  # tells TensorBoard to forget what an earlier file has from this step on
            self._add(step=last + 1, session_log=session(status=session.START))

    def write(self, row: Record) -> None:
        numbers = {tag: float(v) for tag, v in row.items() if isinstance(v, int | float) and tag != "step"}
        values = [self._summary.Value(tag=tag, simple_value=number) for tag, number in numbers.items()]
        self._add(step=int(row.get("step") or 0), summary=self._summary(value=values))

    def close(self) -> None:
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        event = self._event(wall_time=time.time(), **fields)
        with _writing(self._path):
            self._writer.write(event.SerializeToString())
            self._writer.flush()


def tensorboard_messages() -> tuple[Any, Any, Any, Any]:
    """TensorBoard's messages for events, summaries and sessions, and its record writer; ConfigError without the package."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise ConfigError(
            "run.metrics.tensorboard: the package tensorboard is not installed "
            f"({error}). Install lbpar[tensorboard], or set it to false."
        ) from error
    return Event, Summary, SessionLog, RecordWriter


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error
