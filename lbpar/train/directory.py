"""The run directory: may this run write there?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from errno import EACCES, EISDIR, ENOTDIR
from pathlib import Path
from typing import Literal

from lbpar.checkpoint.files import latest
from lbpar.config.parallel import STRATEGIES
from lbpar.config.plan_file import load_plan_file
from lbpar.config.run import OutputConfig
from lbpar.config.run_file import RunConfig, make_run
from lbpar.config.yaml_text import read_yaml
from lbpar.errors import CheckpointError

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
    saved, records = latest(out / "checkpoints"), out / "metrics.jsonl"
    if resume == "auto":
        return saved is not None
    if resume and saved is None:
        raise CheckpointError(
            f"--resume: {out / 'checkpoints'} holds no checkpoint; leave --resume out, or check run.out."
        )
    if not resume and (saved is not None or (os.path.isfile(records) and os.path.getsize(records))):
        # A run that failed before its first record has left nothing worth keeping.
        hint = "add --resume to go on with it, or " if saved is not None else ""
        raise CheckpointError(
            f"run.out: {out} holds an earlier run; {hint}choose another directory (--set run.out=...)."
        )
    return resume


def run_config(out: Path, procs: int, overrides: Sequence[str] = (), allow_code: bool = False) -> RunConfig:
    """The run file that a run directory holds, to use its network on ``procs`` processes.

    Where these are as many as trained it, the plan is theirs; otherwise that of its strategy, if it names one, or the planner's.

    Raises
    ------
    ConfigError
        There is none, or it is damaged.
    """
    fields, plan = read_yaml(out / "run.yaml", "run directory's run file"), out / "plan.yaml"
    if isinstance(fields, dict) and isinstance(parallel := fields.get("parallel"), dict):
        theirs = plan.is_file() and load_plan_file(plan).procs == procs
        kept = {name: parallel.get(name) for name in ("memory", "norm")}
        named = parallel.get("strategy") if parallel.get("strategy") in STRATEGIES else "auto"
        fields["parallel"] = kept | {"strategy": str(plan) if theirs else named}
        fields["run"] = {**(fields.get("run") or {}), "out": str(out)}
    return make_run(fields, overrides, str(out / "run.yaml"), out, allow_code)


def make_directory(config: OutputConfig) -> None:
    """Make the run directory and try all that a run will write there, so that nothing fails after hours.

    Raises
    ------
    CheckpointError
        It cannot be made or written, or something lies where a file or folder of the run should be.
    """
    out = Path(config.out)
    optional = {
        "metrics.csv": config.metrics.csv,
        "trace.json": config.trace,
        "step.json": config.report,
        "report.html": config.report,
    }
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
