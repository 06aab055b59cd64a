"""Folders that ship with lbpar: inside the package in a wheel, beside it in the repository."""

from __future__ import annotations

from pathlib import Path

from lbpar.errors import ConfigError


def shipped(file: str) -> Path | None:
    """A file such as ``kernels/rows.c`` or ``jobs/slurm/cpu.sbatch``; None if this installation lacks it."""
    package = Path(__file__).resolve().parent
    return next((place / file for place in (package, package.parent) if (place / file).is_file()), None)


def template(name: str) -> str:
    """The text of a script for Slurm."""
    path = shipped(f"jobs/slurm/{name}")
    if path is None:
        raise ConfigError(f"slurm: this installation lacks {name}; install lbpar again.")
    return path.read_text(encoding="utf-8")
