"""The points of a scaling study: how many processes, which plan, and what of the run file grows with them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lbpar.config.model import InlineModel, NamedModel
from lbpar.config.parallel import STRATEGIES
from lbpar.config.run_file import RunConfig, make_run
from lbpar.errors import ConfigError
from lbpar.text import nearest, shorten

STRONG, WEAK = "strong", "weak"
#: What a weak study may grow: the batch, or one dimension of each sample; the dimension's place from the end of its shape.
DIMENSIONS = {"D": -4, "H": -3, "W": -2}
GROW = ("batch", *DIMENSIONS)
#: Batches of noise that an epoch has, so that few steps of a study are the first of an epoch.
NOISE_BATCHES = 64
#: What ``data.samples`` may be; predictions for batches beyond it read no samples.
MOST_SAMPLES = 10**7


@dataclass(frozen=True)
class Point:
    """One measurement of a study.

    Parameters
    ----------
    procs : int
    plan : str
        A strategy or a plan file, as ``parallel.strategy`` takes it.
    batch : int
        Samples of a step, over all processes.
    input : tuple of int, optional
        Shape of one sample where it is not the run file's.
    """

    procs: int
    plan: str
    batch: int
    input: tuple[int, ...] | None = None

    @property
    def folder(self) -> str:
        """Its folder in the study's."""
        return f"{Path(self.plan).stem}-p{self.procs}"

    def run_file(self, config: RunConfig) -> RunConfig:
        """The study's run file at this point. A point neither evaluates nor saves."""
        changes: dict[str, Any] = {
            "parallel.strategy": self.plan,
            "parallel.procs": self.procs,
            "train.batch": self.batch,
            "train.epochs": 10**6,
            "train.max_steps": None,
            "train.early_stop": None,
            "data.test": None,
            "data.drop_last": True,
            "run.checkpoint": None,
            "run.trace": False,
            "run.report": False,
            "run.progress": "none",
        }
        if self.plan != config.parallel.strategy:
            changes["parallel.layers"] = {}
        if self.input is not None:
            changes["model.input"] = list(self.input)
        if config.data.train == "synthetic":
            changes["data.samples"] = min(NOISE_BATCHES * self.batch, MOST_SAMPLES)
        content = config.model_dump(mode="json", by_alias=True)
        for path, value in changes.items():
            section, _, name = path.rpartition(".")
            (content[section] if section else content)[name] = value
        return make_run(content, source=f"study, {self.folder}", allow_code=True)


def make_points(config: RunConfig, kind: str, procs: Sequence[int], plans: Sequence[str], grow: str) -> list[Point]:
    """All points of a study, plan by plan, in increasing numbers of processes.

    Parameters
    ----------
    config : RunConfig
        At the smallest number of processes.
    kind : {"strong", "weak"}
        Strong: the same work on more processes. Weak: as much per process; ``grow`` grows with their number.
    procs, plans
        Numbers of processes; strategies and plan files.
    grow : {"batch", "D", "H", "W"}
        Only looked at in a weak study.

    Raises
    ------
    ConfigError
        What is to grow cannot.
    """
    least, points = min(procs), []
    for plan in plans:
        for p in sorted(set(procs)):
            batch, shape = config.train.batch, None
            if kind == WEAK and p % least:
                raise ConfigError(
                    f"--procs: a weak study grows {grow} with the processes, but {p} is no multiple of {least}; give multiples."
                )
            if kind == WEAK and grow == "batch":
                batch = batch * p // least
            elif kind == WEAK:
                shape = _grown(config, grow, p // least)
            points.append(Point(p, plan, batch, shape))
    names = [p.folder for p in points]
    if len(set(names)) < len(names):
        raise ConfigError(f"--plans: got {', '.join(plans)}; each needs a name of its own.")
    return points


def _grown(config: RunConfig, dimension: str, times: int) -> tuple[int, ...]:
    model = config.model
    shape = model.input if isinstance(model, NamedModel | InlineModel) else None
    if shape is None or isinstance(shape, dict) or config.data.train != "synthetic":
        raise ConfigError(
            f"--grow {dimension}: the samples' shape grows with the processes, so the run file must say model.input and "
            "take data.train: synthetic. With samples of a file use --grow batch."
        )
    place = len(shape) + DIMENSIONS[dimension]
    if place < 0:
        raise ConfigError(f"--grow {dimension}: samples of shape {list(shape)} have no dimension {dimension}.")
    return (*shape[:place], shape[place] * times, *shape[place + 1 :])


def parse_procs(text: str) -> list[int]:
    """``1,2,4`` as numbers.

    Raises
    ------
    ConfigError
        It is something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[1-9][0-9]{0,6}", part) for part in parts):
        raise ConfigError(
            f"--procs: got {shorten(text)}, expected numbers of processes separated by commas, as in 1,2,4."
        )
    return sorted(set(map(int, parts)))


def parse_plans(text: str) -> list[str]:
    """``auto,data,plan.yaml`` as a list of strategies and plan files that are there.

    Raises
    ------
    ConfigError
        A name is neither.
    """
    plans = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for i, plan in enumerate(plans):
        if plan in STRATEGIES:
            continue
        path = Path(plan).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"--plans: {shorten(plan)} is neither a strategy nor a plan file that is there; "
                f"{nearest(plan, STRATEGIES)}strategies are {', '.join(STRATEGIES)}."
            )
        plans[i] = str(path.resolve())
    return plans
