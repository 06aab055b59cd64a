"""JSON that every parser reads, and files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from lbpar.errors import CheckpointError


def plain(value: Any) -> Any:
    """A value in JSON's own types: NumPy scalars and arrays unpacked, NaN and infinity as None, the rest as text."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Sequence | set | frozenset):
        return [plain(v) for v in value]
    return str(value)


def dumps(value: Any, indent: int | None = None) -> str:
    """Valid JSON text of any value (see `plain`)."""
    return json.dumps(plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def write_text(path: Path, text: str) -> None:
    """Replace a file's text in one instant: a reader sees the old text or the new one.

    Raises
    ------
    CheckpointError
        The directory cannot be written.
    """
    part = path.with_name(f".part-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise unwritable(path, error) from error


def unwritable(path: Path, error: Exception) -> CheckpointError:
    """The error for a file of the run directory that cannot be written."""
    reason = getattr(error, "strerror", None) or error
    return CheckpointError(f"{path}: cannot be written: {reason}. Free space there, or choose another run.out.")


def write_report(out_dir: str | os.PathLike[str], report: Mapping[str, Any]) -> Path:
    """Write ``report.json``, the final figures of a run, in one instant; its path. One process only."""
    path = Path(out_dir) / "report.json"
    write_text(path, dumps(report, indent=2) + "\n")
    return path
