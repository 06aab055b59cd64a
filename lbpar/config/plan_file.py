"""Plan files: for each op, which grid axes split which loop.

procs: 8
grid: [2, 2, 2]
model: resnet18
batch: 64
ops:
  conv1: {N: [0, 1], H: [2]}
  fc: {F: 8}
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from lbpar.config.output import write_output
from lbpar.config.parallel import Loop, Schedule, Ways
from lbpar.config.paths import as_path
from lbpar.config.report import check
from lbpar.config.section import Count, Custom, Natural, Section
from lbpar.config.yaml_text import dump_yaml, read_yaml


def _model(value: Any) -> str | dict[str, Any] | None:
    if value is None or (isinstance(value, (str, dict)) and value):
        return value
    raise ValueError("expected the name of a network or a block that describes it")


ModelText = Annotated[str | dict[str, Any] | None, Custom(_model, "name, or the `model` of a run file")]


class PipelineBlock(Section):
    """Stages and micro-batches of a plan."""

    axes: tuple[Natural, ...] = Field(default=(), description="Grid axes along which the stages lie, slowest first.")
    stages: dict[str, Natural] = Field(default={}, description="Op → its stage, from 0 on.")
    schedule: Schedule = Field(default="1f1b", description="As in a run file.")
    micro_batches: Count = Field(default=1, description="Parts of each batch.")


class PlanFile(Section):
    """A plan as it is stored. Whether each op can take its grid is checked where the network is known."""

    procs: Count = Field(description="Number of processes.")
    grid: tuple[Count, ...] = Field(description="Size of each grid axis, fastest link first; the product is `procs`.")
    model: ModelText = Field(default=None, description="The network it was made for.")
    batch: Count | None = Field(default=None, description="The batch it was made for.")
    ops: dict[str, dict[Loop, Ways]] = Field(
        default={},
        description="Per op: loop → list of grid axes (or a number of ways). Axes that are not named are idle.",
    )
    pipeline: PipelineBlock | None = Field(default=None, description="Stages and micro-batches, if there are any.")
    recompute: tuple[str, ...] = Field(
        default=(), description="Ops whose outputs are dropped after the forward pass and computed again."
    )
    notes: Any = Field(default=None, description="Free: costs, who made it, why.")

    @model_validator(mode="after")
    def _check(self) -> PlanFile:
        if prod(self.grid) != self.procs:
            text = " x ".join(map(str, self.grid)) or "1"
            raise ValueError(f"grid: {text} = {prod(self.grid)}, expected the number of processes, {self.procs}")
        for op, loops in self.ops.items():
            used: dict[int, str] = {}
            for loop, ways in loops.items():
                if isinstance(ways, int):
                    if self.procs % ways:
                        raise ValueError(f"ops.{op}.{loop}: got {ways} ways, expected a divisor of {self.procs}")
                    continue
                for axis in ways:
                    if axis >= len(self.grid):
                        raise ValueError(f"ops.{op}.{loop}: got axis {axis}, expected less than {len(self.grid)} axes")
                    if axis in used:
                        raise ValueError(f"ops.{op}: axis {axis} splits both {used[axis]} and {loop}; give it to one")
                    used[axis] = loop
        return self


def load_plan_file(path: str | Path) -> PlanFile:
    """Read a plan file (YAML or JSON); raises ConfigError as `lbpar.config.run_file.load_run_file` does."""
    return check(PlanFile, read_yaml(path, "plan file"), str(path))


def save_plan_file(plan: PlanFile, path: str | Path) -> None:
    """Write a plan file: JSON where the name ends in ``.json``, else YAML; see `write_output`."""
    path = as_path(path)
    data = plan.model_dump(mode="json", exclude_none=True)
    text = json.dumps(data, indent=2) + "\n" if path.suffix == ".json" else dump_yaml(data)
    write_output(path, text, "the plan")
