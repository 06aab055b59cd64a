"""Metrics of a run: one record, written as a line of JSON, a line of CSV and TensorBoard events."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

from lbpar.errors import CheckpointError, ConfigError
from lbpar.train.json_text import dumps, plain, unwritable, write_text

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
    resume_step : int, optional
        The run goes on from a checkpoint of this step: keep what was written, less the records of later steps and a
        last line that was cut off. Without it, files of an earlier run are replaced.

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
    ) -> None:
        out = self._out = Path(out_dir)
        lines = out / "metrics.jsonl"
        if tensorboard:
            _tensorboard()  # a missing package must show before a file is touched
        kept = [] if resume_step is None else read_metrics(lines, resume_step)
        write_text(lines, "".join(dumps(record) + "\n" for record in kept))
        self._sinks: list[_Sink] = []
        try:
            self._sinks.append(_Lines(lines))
            if csv:
                self._sinks.append(_Table(out / "metrics.csv", kept))
            if tensorboard:
                self._sinks.append(_Events(out, resume_step))
        except BaseException:
            self.close()
            raise

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record to every file and flush, so that a run that dies keeps it."""
        clean = plain(record)
        for sink in self._sinks:
            sink.write(clean)

    def close(self) -> None:
        """Close the files; further calls do nothing."""
        failure: OSError | None = None
        while self._sinks:
            try:
                self._sinks.pop().close()
            except OSError as error:
                failure = error
        if failure is not None:
            raise unwritable(self._out, failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            if number == len(lines):
                break
            raise CheckpointError(
                f"{path}, line {number}: expected a JSON object, got {line[:60]!r}. Repair or remove the line."
            )
        if last_step is None or record.get("step", 0) <= last_step:
            records.append(record)
    return records


def flatten(record: Mapping[str, Any], prefix: str = "") -> Record:
    """Nested keys joined by ``/``."""
    flat: Record = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class _Sink(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class _Lines:
    """``metrics.jsonl``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _append(path)

    def write(self, record: Record) -> None:
        _put(self._file, self._path, dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()


class _Table:
    """``metrics.csv``."""

    def __init__(self, path: Path, kept: list[Record]) -> None:
        self._path = path
        self._rows = [flatten(record) for record in kept]  # needed again when a column is added
        self._columns: list[str] = []
        self._widen(key for row in self._rows for key in row)
        write_text(path, self._text(self._rows, header=bool(self._columns)))
        self._file = _append(path)

    def write(self, record: Record) -> None:
        row = flatten(record)
        self._rows.append(row)
        if self._widen(row):
            self._file.close()
            write_text(self._path, self._text(self._rows, header=True))
            self._file = _append(self._path)
        else:
            _put(self._file, self._path, self._text([row]))

    def close(self) -> None:
        self._file.close()

    def _widen(self, keys: Any) -> bool:
        new = [key for key in dict.fromkeys(keys) if key not in self._columns]
        self._columns += new
        return bool(new)

    def _text(self, rows: list[Record], header: bool = False) -> str:
        text = io.StringIO()
        table = csv.DictWriter(text, self._columns, lineterminator="\n")
        if header:
            table.writeheader()
        table.writerows(rows)
        return text.getvalue()


class _Events:
    """TensorBoard event files, by TensorBoard's record writer on a plain file: no thread, no TensorFlow, no PyTorch."""

    def __init__(self, out_dir: Path, resume_step: int | None) -> None:
        event_pb2, summary_pb2, writer = _tensorboard()
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        if resume_step is None:
            for stale in out_dir.glob("events.out.tfevents.*"):
                with suppress(OSError):
                    stale.unlink()
        self._path = out_dir / f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{time.time_ns()}.{os.getpid()}"
        self._writer = writer(_append(self._path, "ab"))
        self._add(file_version="brain.Event:2")
        if resume_step is not None:  # tells TensorBoard to forget what an earlier file has from this step on
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(step=resume_step + 1, session_log=start)

    def write(self, record: Record) -> None:
        numbers = {tag: float(v) for tag, v in flatten(record).items() if isinstance(v, int | float) and tag != "step"}
        values = [self._summary.Value(tag=tag, simple_value=number) for tag, number in numbers.items()]
        self._add(step=int(record.get("step") or 0), summary=self._summary(value=values))

    def close(self) -> None:
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        event = self._event(wall_time=time.time(), **fields)
        try:
            self._writer.write(event.SerializeToString())
            self._writer.flush()
        except OSError as error:
            raise unwritable(self._path, error) from error


def _tensorboard() -> tuple[Any, Any, Any]:
    """TensorBoard's event and summary messages and its record writer; ConfigError without the package."""
    try:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise ConfigError(
            "run.metrics.tensorboard: the package tensorboard is not installed "
            f"({error}). Install lbpar[tensorboard], or set it to false."
        ) from error
    return event_pb2, summary_pb2, RecordWriter


def _append(path: Path, mode: str = "a") -> IO[Any]:
    try:
        return open(path, mode, encoding=None if "b" in mode else "utf-8")
    except OSError as error:
        raise unwritable(path, error) from error


def _put(file: IO[str], path: Path, text: str) -> None:
    try:
        file.write(text)
        file.flush()
    except OSError as error:
        raise unwritable(path, error) from error
