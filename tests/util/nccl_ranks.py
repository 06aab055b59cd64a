"""Virtual ranks whose arrays move by NCCL, on the stand-in for CuPy, and training runs of theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lbpar.runtime.recorded import Recorded
from lbpar.train.trainer import Trainer
from lbpar.transport.nccl import NcclTransport
from lbpar.transport.virtual import VirtualWorld
from tests.util import fake_cupy
from tests.util.training import PLANS, Ran, run_file, train

GRAPHS = "engine.graphs=true"

# Batches of 8, 8 and 6, behind each epoch an evaluation; the rate changes each step.
CHANGES = ["engine.name=cupy", "engine.dtype=float32", "train.schedule={name: cosine}"]


def by_nccl(world: VirtualWorld) -> list[NcclTransport]:
    """Transports of all ranks of a world, which they connect when they first attach a device."""
    fake_cupy.between(world)
    return [NcclTransport(t) for t in world.transports]


class World:
    """Ranks that are connected, each with its engine."""

    def __init__(self, virtual: VirtualWorld, engines: list[Any]) -> None:
        self.virtual, self.transports = virtual, by_nccl(virtual)
        virtual.run(lambda t: self.transports[t.rank].attach(engines[t.rank]))


def trained(
    patch: pytest.MonkeyPatch,
    plan: str,
    changes: Sequence[str],
    job: Callable[[Trainer], Any] = lambda trainer: list(trainer.train()),
    seed: int = 1,
) -> Ran:
    """A training run under one of `PLANS`."""
    procs, plan_changes = PLANS[plan]
    fake_cupy.install(patch).scheduler.seed(seed)
    fake_cupy.few_kernels(patch, 2 if "16" in str(changes) else 4)
    return train(run_file([*CHANGES, *plan_changes, *changes]), procs, job, over=by_nccl)


def noted_programs(patch: pytest.MonkeyPatch) -> list[Recorded]:
    """Programs that are recorded when they have run often enough, of all ranks, once they are made."""
    found, begin = list[Recorded](), Recorded.__init__

    def noted(self: Recorded, *args: Any) -> None:
        begin(self, *args)
        found.append(self)

    patch.setattr(Recorded, "__init__", noted)
    return found
