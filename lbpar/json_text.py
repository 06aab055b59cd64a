"""JSON that every parser reads, and the text files of a run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from lbpar.errors import CheckpointError
from lbpar.whole_file import beside


def dumps(value: Any, indent: int | None = None) -> str:
    """Valid JSON text of any value: NumPy scalars and arrays unpacked, NaN and infinity as null, unknown types as text."""
    plain = to_jsonable_python(value, inf_nan_mode="null", fallback=_unpacked)
    return json.dumps(plain, indent=indent, ensure_ascii=False, allow_nan=False)


def _unpacked(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def write_text(path: Path, text: str, option: str = "run.out") -> None:
    """Replace a file's text in one instant: a reader sees the old text or the new one. ``option`` says where files go.

    Raises
    ------
    CheckpointError
        The directory cannot be written.
    """
    with beside(path, lambda reason: unwritable(path, reason, option)) as part:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")


def unwritable(path: Path, reason: object, option: str = "run.out") -> CheckpointError:
    """The error for a file that cannot be written in the directory that ``option`` names."""
    reason = getattr(reason, "strerror", None) or reason
    return CheckpointError(f"{path}: cannot be written: {reason}. Free space there, or choose another {option}.")
