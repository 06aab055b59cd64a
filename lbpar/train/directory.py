"""The run directory: may this run write there?"""

from __future__ import annotations

import os
from errno import EACCES, EISDIR, ENOTDIR
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from lbpar.config.run import Metrics, OutputConfig
from lbpar.errors import CheckpointError, ConfigError
from lbpar.train.checkpoint import latest

Resume = bool | Literal["auto"]
"""Go on with what a run directory holds, start a new run, or whichever fits: ``"auto"`` goes on where there is a checkpoint."""


def check_directory(out: Path, resume: Resume) -> bool:
    """Whether to go on with the run that a directory holds. Makes nothing.

    Refuses a directory that holds a run, unless it may be resumed, and one to resume that holds none. With ``"auto"`` both are
    fine: a job that is started again goes on, and starts anew if it had not yet saved anything.

    Raises
    ------
    CheckpointError
        See above.
    """
    saved = latest(out / "checkpoints")
    if resume == "auto":
        return saved is not None
    if resume and saved is None:
        raise CheckpointError(
            f"--resume: {out / 'checkpoints'} holds no checkpoint; leave --resume out, or check run.out."
        )
    if not resume and (saved is not None or _has_records(out / "metrics.jsonl")):
        hint = "add --resume to go on with it, or " if saved is not None else ""
        raise CheckpointError(
            f"run.out: {out} holds an earlier run; {hint}choose another directory (--set run.out=...)."
        )
    return resume


def _has_records(metrics: Path) -> bool:
    """A run that failed before its first record has left nothing worth keeping."""
    try:
        return metrics.is_file() and metrics.stat().st_size > 0
    except OSError:
        return False


def check_metrics(metrics: Metrics) -> None:
    """Refuse TensorBoard events where the package is missing.

    Raises
    ------
    ConfigError
        See above.
    """
    if metrics.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError(
            "run.metrics.tensorboard: the package tensorboard is not installed. Install lbpar[tensorboard], or set it to false."
        )


def make_directory(config: OutputConfig) -> None:
    """Make the run directory and try all that a run will write there, so that nothing fails after hours.

    Raises
    ------
    CheckpointError
        It cannot be made or written, or something lies where a file or folder of the run should be.
    """
    out = Path(config.out)
    optional = {"metrics.csv": config.metrics.csv, "trace.json": config.trace}
    names = ["metrics.jsonl", "run.yaml", "plan.yaml", "report.json", *(name for name, on in optional.items() if on)]
    try:
        _try_folder(out)
        if config.checkpoint is not None:
            _try_folder(out / "checkpoints")
        for path in (out / name for name in names):
            if os.path.lexists(path) and not path.is_file():
                raise OSError(EISDIR, "it is not a file", str(path))
            if path.exists() and not os.access(path, os.W_OK):
                raise PermissionError(EACCES, os.strerror(EACCES), str(path))
    except OSError as error:
        raise CheckpointError(
            f"run.out: {error.filename or out} cannot be written: {error.strerror or error}; move it away, or choose another "
            "directory (--set run.out=...)."
        ) from error


def _try_folder(folder: Path) -> None:
    if os.path.lexists(folder) and not folder.is_dir():
        raise NotADirectoryError(ENOTDIR, "it is not a directory", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".writable-{os.getpid()}"
    try:
        probe.write_text("probe", encoding="utf-8")
    finally:
        probe.unlink(missing_ok=True)
