"""Whole training runs on virtual ranks, and what they leave behind in a form that does not depend on the grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lbpar.config.run_file import RunConfig, parse_run
from lbpar.layout.runs import indices
from lbpar.program.plan import Plan
from lbpar.train.setup import build_graph, build_plan
from lbpar.train.trainer import Trainer
from lbpar.transport.base import Transport
from lbpar.transport.virtual import VirtualWorld

MEASURED = (
    "epoch", "step", "loss", "accuracy", "top5", "test_loss", "test_accuracy", "test_top5", "lr", "loss_scale", "skipped",
)  # fmt: skip

SMALL = """
model:
  input: [6, 5, 2]
  layers:
    - {op: conv, filters: 6, kernel: 3, pad: 1, bias: false, name: conv1}
    - {op: norm, name: norm1}
    - {op: relu}
    - {op: max_pool, kernel: 2, name: pool}
    - {op: conv, filters: 8, kernel: 3, pad: 1, bias: false, name: conv2}
    - {op: norm}
    - {op: relu}
    - {op: dropout, rate: 0.2}
    - {op: flatten}
    - {op: linear, features: 7, name: fc}
data: {train: synthetic, test: synthetic, samples: 22}
train: {batch: 8, epochs: 3, seed: 3, optimizer: {name: sgd, lr: 0.05, momentum: 0.9, weight_decay: 0.01}}
engine: {name: numpy, dtype: float64, threads: 1}
"""
"""Batches of 8, 8 and 6 samples; odd extents; batch norm and dropout."""

PLANS: dict[str, tuple[int, list[str]]] = {
    "data 2": (2, ["parallel.strategy=data"]),
    "data 3": (3, ["parallel.strategy=data"]),
    "spatial 4": (4, ["parallel.strategy=spatial"]),
    "filter 3": (3, ["parallel.strategy=filter"]),
    "stationary-w 4": (4, ["parallel.strategy=stationary-w"]),
    "mixed 4": (
        4,
        ["parallel.strategy=data", "parallel.layers={conv1: {N: 2, H: 2}, conv2: {F: 2, C: 2}, fc: {F: 4}}"],
    ),
    "mixed 6": (
        6,
        [
            "parallel.strategy=data",
            "parallel.layers={conv1: {F: 3, W: 2}, pool: {C: 6}, conv2: {H: 3, C: 2}, fc: {N: 3}}",
        ],
    ),
}


@dataclass
class Ran:
    """A run: records of its epochs, and whole tensors of its weights, statistics and optimizer state."""

    records: list[dict[str, Any]]
    tensors: dict[str, np.ndarray]


def run_file(overrides: Sequence[str] = (), text: str = SMALL) -> RunConfig:
    """A run file with some fields changed."""
    return parse_run(text, overrides)


def train(
    config: RunConfig,
    procs: int = 1,
    job: Callable[[Trainer], list[dict[str, Any]]] = lambda trainer: list(trainer.train()),
    dataset: Any = None,
    over: Callable[[VirtualWorld], Sequence[Transport]] = lambda world: world.transports,
    plan: Plan | None = None,
) -> Ran:
    """Run ``job`` on every one of ``procs`` virtual ranks, whose arrays move ``over`` transports; their records must agree."""
    graph = build_graph(config)
    plan = plan or build_plan(config, graph, procs)
    world = VirtualWorld(plan.grid)
    transports = over(world)

    def one(transport: Transport) -> tuple[Trainer, list[dict[str, Any]]]:
        trainer = Trainer(config, graph, plan, transports[transport.rank])
        if dataset is not None:
            trainer.dataset = trainer.test = dataset
        return trainer, [measured(r) for r in job(trainer)]

    ran = world.run(one)
    world.check_idle()
    trainers, records = [t for t, _ in ran], [r for _, r in ran]
    for r in records[1:]:
        assert r == records[0], "ranks do not agree on what they measured"
    return Ran(records[0], whole(trainers))


def measured(record: Mapping[str, Any]) -> dict[str, Any]:
    """What does not depend on the clock."""
    return {k: v for k, v in record.items() if k in MEASURED}


def whole(trainers: Sequence[Trainer]) -> dict[str, np.ndarray]:
    """Whole tensors from the blocks of all ranks; every element must be held, replicas must agree to the last bit."""
    out: dict[str, np.ndarray] = {}
    for trainer in trainers:
        blocks = {**trainer.worker.state, **trainer.optimizer.state_dict()}
        for name, held in blocks.items():
            block = trainer.engine.to_host(held)
            layout = trainer.worker.layouts[name.rpartition("/")[0] if "/" in name else name]
            here = np.ix_(*(indices(runs) for runs in layout.box(trainer.transport.rank)))
            array = out.setdefault(name, np.full(layout.shape, np.nan))
            known = ~np.isnan(array[here])
            np.testing.assert_array_equal(block[known], array[here][known], err_msg=f"{name}: replicas differ")
            array[here] = block
    for name, array in out.items():
        assert not np.isnan(array).any(), f"{name}: some elements are held by no rank"
    return out


def assert_same(got: Ran, want: Ran, rtol: float = 1e-9) -> None:
    """Two runs measured the same and ended with the same tensors."""
    assert len(got.records) == len(want.records)
    for a, b in zip(got.records, want.records, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_allclose(a[key], b[key], rtol=rtol, err_msg=f"epoch {b['epoch']}: {key}")
    assert got.tensors.keys() == want.tensors.keys()
    for name, array in want.tensors.items():
        scale = np.abs(array).max() or 1.0
        np.testing.assert_allclose(got.tensors[name], array, rtol=0, atol=rtol * scale, err_msg=name)


def loaded_again(folder: Path) -> Callable[[Trainer], list[dict[str, Any]]]:
    """What trains three epochs, and the third once more from where it was saved before it."""

    def job(trainer: Trainer) -> list[dict[str, Any]]:
        records = [trainer.train_epoch(), trainer.train_epoch()]
        trainer.save(folder)
        records.append(trainer.train_epoch())
        trainer.load(folder)
        return [*records, trainer.train_epoch()]

    return job
