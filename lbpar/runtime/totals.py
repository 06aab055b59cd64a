"""Sums over steps, from which an epoch's mean loss and hit rates come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.engine.host.label_losses import class_confusion, dice_of_samples, error_sums, sample_counts
from lbpar.runtime.scores import scores
from lbpar.runtime.worker import StepResult

Array = NDArray[Any]


@dataclass
class Totals:
    """Sums over steps: losses weighted by samples, hits among positions (samples, or voxels where each has a label).

    ``parts`` are the same of each of several outputs.
    """

    loss: float = 0.0
    samples: int = 0
    positions: int = 0
    hits: dict[str, float] = field(default_factory=dict)
    sums: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Totals] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Totals:
        """From its fields, as a checkpoint keeps them."""
        parts = {name: cls.of(part) for name, part in state.get("parts", {}).items()}
        return cls(**{**state, "parts": parts})

    def add(self, r: StepResult) -> None:
        """Add one step."""
        self.loss += r.loss * r.samples
        self.samples += r.samples
        self.positions += r.positions
        for name, hits in (("accuracy", r.top1), ("top5", r.top5)):
            if hits is not None:
                self.hits[name] = self.hits.get(name, 0.0) + hits
        for name, sums in r.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + sums
        for output, part in r.parts.items():
            self.parts.setdefault(output, Totals()).add(part)

    def add_whole(self, output: Array, target: Array, ignore: int | None, labels: bool, end: bool) -> None:
        """Add a part of whole samples, their last if they ``end`` with it: scores of classes and labels, or real numbers."""
        if not labels:
            self.sums["errors"] = self.sums.get("errors", 0.0) + error_sums(output, target)
            return
        first, classes = -output.argmax(-1), output.shape[-1]
        found = class_confusion(first, target, classes, ignore)
        self.positions += int(found.sum())
        self.hits["accuracy"] = self.hits.get("accuracy", 0.0) + float(found.trace())
        counts = np.stack([found.diagonal(), found.sum(axis=0), found.sum(axis=1)])
        begun = sample_counts(first, target, classes, ignore)
        for name, sums in (("confusion", found), ("counts", counts), ("begun", begun)):
            self.sums[name] = self.sums.get(name, 0.0) + sums
        if end:
            self.sums["volumes"] = self.sums.get("volumes", 0.0) + dice_of_samples(self.sums.pop("begun"))

    def record(
        self,
        prefix: str = "",
        metrics: tuple[str, ...] = (),
        elements: float = 1,
        of: Mapping[str, tuple[tuple[str, ...], float]] | None = None,
    ) -> dict[str, Any]:
        """Means, and metrics of outputs of so many elements per sample, under names that start with ``prefix``.

        ``of``: metrics and elements of each of several outputs, whose numbers have its name before theirs.
        """
        found: dict[str, Any] = {"loss": self.loss / max(1, self.samples)}
        found |= {name: hits / max(1, self.positions) for name, hits in self.hits.items()}
        if not self.parts:
            found |= scores(self.sums, elements * self.samples, metrics)
        for output, part in self.parts.items():
            found |= part.record(f"{output}_", *(of or {}).get(output, ()))
        return {f"{prefix}{name}": value for name, value in found.items()}
