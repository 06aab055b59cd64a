"""Sums over steps, from which an epoch's mean loss and hit rates come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.engine.host.label_losses import class_confusion, error_sums
from lbpar.runtime.scores import scores
from lbpar.runtime.worker import StepResult

Array = NDArray[Any]


@dataclass
class Totals:
    """Sums over steps: losses weighted by samples, hits among positions (samples, or voxels where each has a label)."""

    loss: float = 0.0
    samples: int = 0
    positions: int = 0
    hits: dict[str, float] = field(default_factory=dict)
    sums: dict[str, Any] = field(default_factory=dict)

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

    def add_whole(self, output: Array, target: Array, ignore: int | None, labels: bool) -> None:
        """Add a part of whole samples: scores of classes and labels, or real numbers."""
        if not labels:
            self.sums["errors"] = self.sums.get("errors", 0.0) + error_sums(output, target)
            return
        found = class_confusion(-output.argmax(-1), target, output.shape[-1], ignore)
        self.positions += int(found.sum())
        self.hits["accuracy"] = self.hits.get("accuracy", 0.0) + float(found.trace())
        counts = np.stack([found.diagonal(), found.sum(axis=0), found.sum(axis=1)])
        for name, sums in (("confusion", found), ("counts", counts)):
            self.sums[name] = self.sums.get(name, 0.0) + sums

    def record(self, prefix: str = "", metrics: tuple[str, ...] = (), elements: int = 1) -> dict[str, Any]:
        """Means, and metrics of outputs of so many elements per sample, under names that start with ``prefix``."""
        found: dict[str, Any] = {"loss": self.loss / max(1, self.samples)}
        found |= {name: hits / max(1, self.positions) for name, hits in self.hits.items()}
        found |= scores(self.sums, elements * self.samples, metrics)
        return {f"{prefix}{name}": value for name, value in found.items()}
