"""The checkpoint that a user means: the newest, the best, or that of a step."""

from __future__ import annotations

from pathlib import Path

from lbpar.checkpoint.files import check_checkpoint, checkpoint_path, latest, list_checkpoints, open_checkpoint
from lbpar.errors import CheckpointError


def newest(directory: Path) -> Path | None:
    """The newest checkpoint of a folder of them, or of a run directory."""
    return latest(directory) or latest(directory / "checkpoints")


def find_checkpoint(directory: Path, which: str | int = "last") -> Path:
    """The checkpoint that is meant.

    Parameters
    ----------
    directory : Path
        Holds the checkpoints of a run, or is the run's.
    which : {"last", "best"} or int
        The newest, the best by the watched metric, or that of a step.

    Raises
    ------
    CheckpointError
        There is none, or not that one, or the newest, which says which is the best, is damaged.
    """
    last = newest(directory)
    if last is None:
        raise CheckpointError(f"{directory}: holds no checkpoint; train first, or name another directory.")
    directory = last.parent
    if which == "last":
        return last
    if which == "best":
        check_checkpoint(last)
        with open_checkpoint(last) as saved:
            step = (saved.meta.get("best") or {}).get("step")
        if step is None:
            raise CheckpointError(
                f"{directory}: the run watched no metric, so that no checkpoint is the best. Give it test data or early_stop, or "
                "take --checkpoint last."
            )
    elif str(which).isdecimal():
        step = int(which)
    else:
        raise CheckpointError(f"--checkpoint: got {which!r}, expected best, last or a step.")
    path = checkpoint_path(directory, step)
    if not path.is_dir():
        steps = ", ".join(str(int(p.name.partition("-")[2])) for p in list_checkpoints(directory))
        raise CheckpointError(f"{directory}: holds no checkpoint of step {step}, expected one of {steps}.")
    return path
