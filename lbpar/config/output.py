"""Writing a file that a command line asked for, without destroying another one."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from lbpar.config.paths import as_path
from lbpar.config.yaml_text import parse_yaml
from lbpar.errors import ConfigError
from lbpar.whole_file import beside


def check_output(path: str | Path, option: str, text: str | None = None, what: str = "") -> None:
    """Refuse a path that `write_output` will not be able to write, before what is to be written has been made.

    Parameters
    ----------
    path : str or Path
    option : str
        That gave it.
    text, what : str, optional
        As for `write_output`; of the text only the names of its fields matter.

    Raises
    ------
    ConfigError
        Names the option, and the reason; or there is a file of another kind, where a text is given.
    """
    target = as_path(path).resolve()
    reason = None
    if target.is_dir():
        reason = "it is a folder"
    elif not target.parent.is_dir():
        reason = f"there is no folder {as_path(path).parent}"
    elif not os.access(target if target.exists() else target.parent, os.W_OK):
        reason = "permission denied"
    if reason:
        raise ConfigError(f"{option}: {path} cannot be written: {reason}.")
    if text is not None:
        _check_kind(as_path(path), text, what)


def write_output(path: str | Path, text: str, what: str) -> None:
    """Write a YAML or JSON file whole or not at all; an earlier file of the same kind is replaced.

    Parameters
    ----------
    path : str or Path
    text : str
        A mapping.
    what : str
        What it holds, for messages: ``the plan``.

    Raises
    ------
    ConfigError
        There is a file of another kind (half of the new file's fields are not in it), or it cannot be written.
    """
    path = as_path(path)
    _check_kind(path, text, what)
    target = path.resolve()
    if path.exists() and not path.is_file():  # a device or a pipe is written as it is
        target.write_text(text, encoding="utf-8")
        return
    with beside(target, lambda reason: ConfigError(f"{path}: cannot write {what}: {reason}.")) as part:
        part.write_text(text, encoding="utf-8")


def make_directory(path: Path, command: str) -> None:
    """Make a directory, and those above it, for what a command with ``--out`` writes.

    Raises
    ------
    ConfigError
        It cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{command}: cannot make the directory {path}: {error.strerror}; give another --out"
        ) from error


def _check_kind(path: Path, text: str, what: str) -> None:
    """Refuse to replace a file that holds something else."""
    if path.is_file() and path.stat().st_size:
        new, old = _fields(text, path), _fields(path.read_text(encoding="utf-8", errors="replace"), path)
        if 2 * len(new & old) < len(new):
            raise ConfigError(
                f"{path}: is there already and holds something else than {what}; it is left as it is. Choose another name, or delete it."
            )


def _fields(text: str, path: Path) -> set[str]:
    """Names at the top of a JSON or YAML text; none for anything else."""
    found: Any = None
    with suppress(ValueError, ConfigError):
        found = json.loads(text) if text.lstrip().startswith("{") else parse_yaml(text, str(path))
    return set(map(str, found)) if isinstance(found, dict) else set()
