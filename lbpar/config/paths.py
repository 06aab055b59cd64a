"""Paths as people write them: ``~``, ``$NAME`` and ``${NAME}`` stand for what a shell would put there."""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError
from pathlib import Path

from lbpar.errors import ConfigError

_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})")


def expand(text: str) -> str:
    """The text with home directories and variables filled in; ValueError for a variable or home directory that there is not."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2] or ""
        if name not in os.environ:
            raise ValueError(
                f"expected a defined environment variable, but {name or '${}'} is not; define it, or write the path out"
            )
        return os.environ[name]

    whole = os.path.expanduser(_VARIABLE.sub(value, text))
    if whole.startswith("~"):
        raise ValueError(f"expected a user's home directory, but there is no user {whole.partition('/')[0][1:]!r}")
    return whole


def as_path(path: str | os.PathLike[str]) -> Path:
    """The path that is meant: every path that a caller, a command line or a run file gives comes through here.

    Raises
    ------
    ConfigError
        An environment variable is not defined, or there is no such user; named.
    """
    text = os.fspath(path)
    try:
        return Path(expand(text))
    except ValueError as error:
        raise ConfigError(f"path: got '{text}', {error}.") from None


def path_option(text: str) -> str:
    """``type`` of a command-line option that is a path."""
    try:
        return expand(text)
    except ValueError as error:
        raise ArgumentTypeError(f"got '{text}', {error}.") from None
