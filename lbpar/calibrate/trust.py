"""Whether what was measured can be trusted: what else the machine did meanwhile, and how far repetitions lie apart."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter, process_time
from typing import Any

#: Part of the time that something else may have the core of a rank that computes.
TAKEN = 0.1
#: Mean part by which half of the repetitions of a kernel or of a move may lie around their median.
KERNEL_SPREAD, MOVE_SPREAD = 0.1, 0.3
#: Mean part by which the times of a move may differ from a line through all sizes.
RESIDUAL = 0.5


@dataclass(frozen=True)
class Load:
    """What one rank saw of other work while it measured.

    Parameters
    ----------
    average : float
        Load average of its node over the last minute, at the end.
    taken : float
        Part of the time in which it wanted to compute and had no core.
    switches : int
        How often it lost its core.
    """

    average: float
    taken: float
    switches: int


class Watcher:
    """Looks at other work from its making to `load`, while this rank does nothing but compute."""

    def __init__(self) -> None:
        self._began = perf_counter(), process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw

    def load(self, host: bool = True) -> Load:
        """What was seen; of a rank that only waits for a device (not ``host``), its time on a core says nothing."""
        wall, cpu, switches = self._began
        wall, cpu = perf_counter() - wall, process_time() - cpu
        lost = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches
        average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return Load(average, max(0.0, 1 - cpu / wall) if wall and host else 0.0, lost)


@dataclass(frozen=True)
class Trust:
    """How far a measurement can be trusted.

    Parameters
    ----------
    loads : sequence of Load
        Of the ranks that measured kernels.
    kernels : float
        Mean spread of kernels.
    moves : dict of str to (float, float)
        Spread and residual of every move, by level, kind and processes.
    """

    loads: Sequence[Load]
    kernels: float
    moves: dict[str, tuple[float, float]]

    def doubts(self) -> list[str]:
        """Why it cannot be trusted; nothing if it can."""
        out = []
        taken = max((load.taken for load in self.loads), default=0.0)
        if taken > TAKEN:
            out.append(
                f"other work had the cores {100 * taken:.0f} % of the time (load {max(x.average for x in self.loads):.1f}, "
                f"{sum(x.switches for x in self.loads)} involuntary switches; at most {100 * TAKEN:.0f} %)"
            )
        if self.kernels > KERNEL_SPREAD:
            out.append(
                f"repetitions of kernels lie {100 * self.kernels:.0f} % apart (at most {100 * KERNEL_SPREAD:.0f} %)"
            )
        for name, (apart, off) in self.moves.items():
            if apart > MOVE_SPREAD:
                out.append(f"repetitions of {name} lie {100 * apart:.0f} % apart (at most {100 * MOVE_SPREAD:.0f} %)")
            if off > RESIDUAL:
                out.append(
                    f"{name} is {100 * off:.0f} % off any latency and bandwidth (at most {100 * RESIDUAL:.0f} %)"
                )
        return out

    def summary(self) -> list[str]:
        """What was seen of other work, and every doubt, a line each."""
        average, taken = (
            max(values, default=0.0) for values in zip(*((x.average, x.taken) for x in self.loads), strict=True)
        )
        switches = sum(x.switches for x in self.loads)
        seen = f"load {average:.1f}, cores taken {100 * taken:.0f} % of the time, {switches} involuntary switches"
        lines = [f"  other work       {seen}; repetitions of kernels apart by {100 * self.kernels:.0f} %"]
        return lines + [f"  in doubt         {doubt}" for doubt in self.doubts()]

    def facts(self) -> dict[str, Any]:
        """All of it as plain data, for a machine file."""
        loads = [asdict(load) for load in self.loads]
        return {"load": loads, "spread of kernels": round(self.kernels, 4), "doubts": self.doubts()}
