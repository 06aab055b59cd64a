"""Whether what was measured can be trusted: what else the machine did meanwhile, and how far repetitions lie apart."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter, process_time
from typing import Any

from lbpar.config.machine_file import LinkConfig

#: Part of the time that something else may have the core of a rank that computes.
TAKEN = 0.1
#: Mean part by which half of the repetitions of a kernel may lie around their median.
KERNEL_SPREAD = 0.1
#: Mean standard error of the medians of a move's times, as a part of them; a line goes through six sizes.
MOVE_UNSURE = 0.15
#: Mean part by which the times of a move may differ from a line through all sizes.
RESIDUAL = 0.5
#: The same for whole steps of plans.
STEPS_OFF = 0.3


@dataclass(frozen=True)
class WholeSteps:
    """Measured steps beside predicted ones.

    Parameters
    ----------
    factor : float
        Times as long: the median over plans.
    between : float
        The same of moves of activations.
    plans : int
        Timed; none where the device's memory holds no plan, or no network was asked for.
    off : float
        Mean part by which predictions with both differ from measured steps.
    """

    factor: float = 1.0
    between: float = 1.0
    plans: int = 0
    off: float = 0.0


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


def doubt(link: LinkConfig, least: tuple[float, float]) -> str | None:
    """Why a measured link cannot be trusted, if so; ``least`` is the alpha, and the seconds of a byte, that were not seen in its times."""
    out = []
    if link.unsure >= 1:
        out.append("too slow to be timed three times")
    elif link.unsure > MOVE_UNSURE:
        out.append(
            f"medians are sure to {100 * link.unsure:.0f} % only (at most {100 * MOVE_UNSURE:.0f} %; repetitions lie {100 * link.spread:.0f} % apart)"
        )
    if link.residual > RESIDUAL:
        out.append(f"{100 * link.residual:.0f} % off any latency and bandwidth (at most {100 * RESIDUAL:.0f} %)")
    if link.alpha <= least[0]:
        out.append("messages seem to take no time to start")
    if link.bandwidth >= 0.99 / least[1] and not link.beyond:
        out.append("bytes seem to take no time")
    return "; ".join(out) or None


@dataclass(frozen=True)
class Trust:
    """How far a measurement can be trusted.

    Parameters
    ----------
    loads : sequence of Load
        Of the ranks that measured kernels.
    kernels : float
        Mean spread of kernels.
    moves : sequence of str
        What is in doubt of links.
    whole : WholeSteps
    """

    loads: Sequence[Load]
    kernels: float
    moves: Sequence[str] = ()
    whole: WholeSteps = WholeSteps()

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
        out.extend(self.moves)
        if self.whole.off > STEPS_OFF:
            out.append(
                f"steps of {self.whole.plans} plans lie {100 * self.whole.off:.0f} % from what is predicted (at most {100 * STEPS_OFF:.0f} %)"
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
        if self.whole.plans:
            lines.append(
                f"  whole steps      {self.whole.factor:.2f} times as long as their kernels and moves by themselves, moves of activations "
                f"{self.whole.between:.2f} times, and so are all times of the file; then predictions are off by {100 * self.whole.off:.0f} % ({self.whole.plans} plans)"
            )
        return lines + [f"  in doubt         {doubt}" for doubt in self.doubts()]

    def facts(self) -> dict[str, Any]:
        """All of it as plain data, for a machine file."""
        loads = [asdict(load) for load in self.loads]
        out = {"load": loads, "spread of kernels": round(self.kernels, 4), "doubts": self.doubts()}
        whole = {name: round(value, 4) for name, value in asdict(self.whole).items()}
        return out | ({"whole steps": whole} if self.whole.plans else {})
