"""Sums over steps, from which an epoch's mean loss and hit rates come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lbpar.runtime.worker import StepResult
from lbpar.train.scores import scores


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

    def record(self, prefix: str = "", metrics: tuple[str, ...] = (), elements: int = 1) -> dict[str, Any]:
        """Means, and metrics of outputs of so many elements per sample, under names that start with ``prefix``."""
        found: dict[str, Any] = {"loss": self.loss / max(1, self.samples)}
        found |= {name: hits / max(1, self.positions) for name, hits in self.hits.items()}
        found |= scores(self.sums, elements * self.samples, metrics)
        return {f"{prefix}{name}": value for name, value in found.items()}
