"""Sums over steps, from which an epoch's mean loss and hit rates come."""

from __future__ import annotations

from dataclasses import dataclass, field

from lbpar.runtime.worker import StepResult


@dataclass
class Totals:
    """Sums over steps: losses weighted by samples, hits among positions (samples, or voxels where each has a label)."""

    loss: float = 0.0
    samples: int = 0
    positions: int = 0
    hits: dict[str, float] = field(default_factory=dict)

    def add(self, r: StepResult) -> None:
        """Add one step."""
        self.loss += r.loss * r.samples
        self.samples += r.samples
        self.positions += r.positions
        for name, hits in (("accuracy", r.top1), ("top5", r.top5)):
            if hits is not None:
                self.hits[name] = self.hits.get(name, 0.0) + hits

    def record(self, prefix: str = "") -> dict[str, float]:
        """Means, under names that start with ``prefix``."""
        rates = {f"{prefix}{name}": hits / max(1, self.positions) for name, hits in self.hits.items()}
        return {f"{prefix}loss": self.loss / max(1, self.samples), **rates}
