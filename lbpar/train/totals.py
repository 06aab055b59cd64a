"""Sums over steps, from which an epoch's mean loss and hit rates come."""

from __future__ import annotations

from dataclasses import dataclass

from lbpar.runtime.worker import StepResult


@dataclass
class Totals:
    """Sums over steps: losses weighted by samples, hits among positions (samples, or voxels where each has a label)."""

    loss: float = 0.0
    samples: int = 0
    positions: int = 0
    top1: float = 0.0
    top5: float = 0.0
    counted: bool = False

    def add(self, r: StepResult) -> None:
        """Add one step."""
        self.loss += r.loss * r.samples
        self.samples += r.samples
        self.positions += r.positions
        if r.top1 is not None and r.top5 is not None:
            self.top1 += r.top1
            self.top5 += r.top5
            self.counted = True

    def record(self, prefix: str = "") -> dict[str, float]:
        """Means, under names that start with ``prefix``."""
        out = {f"{prefix}loss": self.loss / max(1, self.samples)}
        if self.counted:
            out[f"{prefix}accuracy"] = self.top1 / max(1, self.positions)
            out[f"{prefix}top5"] = self.top5 / max(1, self.positions)
        return out
