"""The best weights of a run: by which metric, and which checkpoint has them.

Every checkpoint's metadata say which step was the best so far; there is no second record that could disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from lbpar.config.training import TrainConfig
from lbpar.errors import CheckpointError
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.train.checkpoint import check_checkpoint, checkpoint_path, latest, list_checkpoints, open_checkpoint
from lbpar.train.early_stop import gain


@dataclass
class Best:
    """The best value of a metric so far, and when it was reached. Ranks that see the same records agree."""

    metric: str
    value: float | None = None
    epoch: int | None = None
    step: int | None = None

    def update(self, record: Mapping[str, Any]) -> None:
        """Take the record of an epoch; NaN, infinity and metrics that were not measured are never the best."""
        value = record.get(self.metric)
        if value is not None and isfinite(value) and (self.value is None or gain(self.metric, value, self.value) > 0):
            self.value, self.epoch, self.step = float(value), record["epoch"], record["step"]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep; JSON values."""
        return asdict(self)


def watched(train: TrainConfig, test: bool) -> str | None:
    """The metric that says which weights are the best: that of early stop, else of the test data; None without either."""
    if train.early_stop is not None:
        return train.early_stop.metric
    if not test:
        return None
    return "test_accuracy" if train.loss == CrossEntropy.kind else "test_loss"


def find_checkpoint(directory: Path, which: str | int = "last") -> Path:
    """The checkpoint that is meant.

    Parameters
    ----------
    directory : Path
        Holds the checkpoints of a run.
    which : {"last", "best"} or int
        The newest, the best by the watched metric, or that of a step.

    Raises
    ------
    CheckpointError
        There is none, or not that one, or the newest, which says which is the best, is damaged.
    """
    last = latest(directory)
    if last is None:
        raise CheckpointError(f"{directory}: holds no checkpoint; train first, or name another directory.")
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
