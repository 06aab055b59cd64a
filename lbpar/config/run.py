"""Section ``run``: what a run leaves behind."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lbpar.config.section import Count, FilePath, Flag, Positive, Section


class Checkpoint(Section):
    """When to save."""

    every_epochs: Count = Field(
        default=1,
        description="After every so many epochs, after the last, and where the weights are the best so far (by the metric of `early_stop`, else of the test data).",
    )
    every_steps: Count | None = Field(
        default=None,
        description="Also after every so many updates, in the middle of an epoch; a run that goes on there is the same to the last bit.",
    )
    every_minutes: Positive | None = Field(
        default=None, description="Also when so many minutes have passed since the last checkpoint."
    )
    background: Flag = Field(
        default=False,
        description="Train on while a copy of the state is written; rank 0 holds that copy of all ranks' weights and optimizer state. Pays where writing takes long and a core is free.",
    )
    keep: Count = Field(default=3, description="How many of the latest to keep; the best is kept besides.")


class Metrics(Section):
    """Further forms of the metrics; `metrics.jsonl` is always written."""

    csv: Flag = Field(default=False, description="Also `metrics.csv`.")
    tensorboard: Flag = Field(default=False, description="Also TensorBoard event files.")


class OutputConfig(Section):
    """What a run leaves behind."""

    out: FilePath = Field(default="runs/default", description="Directory of the run.")
    checkpoint: Checkpoint | None = Field(default=Checkpoint(), description="When to save; `null` saves nothing.")
    trace: Flag = Field(
        default=False, description="Write what each rank did when, as a timeline for trace viewers: `trace.json`."
    )
    report: Flag = Field(
        default=True,
        description="Trace one step (`step.json`), and draw `report.html` at the end of `lbpar train` where matplotlib is installed.",
    )
    progress: Literal["auto", "bar", "lines", "none"] = Field(
        default="auto", description="Auto: a bar on a terminal, else lines."
    )
    metrics: Metrics = Field(default=Metrics(), description="Forms of the metrics.")
