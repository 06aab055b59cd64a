"""Training with activations computed again is the same run, bit for bit, through evaluation and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar.errors import PlanError
from lbpar.train.trainer import Trainer
from tests.util.training import Ran, run_file, train

CASES: dict[str, tuple[int, list[str], str]] = {
    "samples": (2, ["parallel.strategy=data"], "parallel.recompute=3"),
    "space": (3, ["parallel.strategy=spatial"], "parallel.recompute=[norm1, relu1, pool]"),
    "one rank, a limit": (1, ["parallel.memory=70MB", "machine=laptop"], "parallel.recompute=auto"),
    "stages": (4, ["parallel.strategy=data", "parallel.stages=2", "parallel.micro_batches=3"], "parallel.recompute=4"),
    "accumulated": (2, ["parallel.strategy=spatial", "train.accumulate=2"], "parallel.recompute=3"),
}


def assert_equal(a: Ran, b: Ran) -> None:
    assert [{k: v for k, v in r.items() if k != "seconds"} for r in a.records] == [
        {k: v for k, v in r.items() if k != "seconds"} for r in b.records
    ]
    assert a.tensors.keys() == b.tensors.keys()
    assert all(np.array_equal(a.tensors[n], b.tensors[n]) for n in a.tensors)


@pytest.mark.parametrize(("procs", "changes", "again"), CASES.values(), ids=CASES.keys())
def test_the_same_run(procs: int, changes: list[str], again: str) -> None:
    lean: list[int] = []

    def job(trainer: Trainer) -> list[dict[str, Any]]:
        lean.append(len(trainer.plan.recompute))
        return list(trainer.train())

    assert_equal(train(run_file([*changes, again]), procs, job), train(run_file(changes), procs))
    assert "auto" in again or min(lean) > 0


def test_a_run_goes_on_with_and_without(tmp_path: Path) -> None:
    want = train(run_file(["parallel.strategy=data"]), 2)

    def first(trainer: Trainer) -> list[dict[str, Any]]:
        out = [trainer.train_epoch()]
        trainer.save(tmp_path)
        return out

    def then(trainer: Trainer) -> list[dict[str, Any]]:
        assert trainer.resume(tmp_path)
        return list(trainer.train())

    records = train(run_file(["parallel.strategy=data"]), 2, first).records
    rest = train(run_file(["parallel.strategy=data", "parallel.recompute=3"]), 2, then)
    assert_equal(Ran(records + rest.records, rest.tensors), want)


def test_what_cannot_be_computed_again_is_named() -> None:
    with pytest.raises(PlanError, match="recompute: 'norm3' is not a layer of .*did you mean 'norm"):
        train(run_file(["parallel.strategy=data", "parallel.recompute=[norm3]"]), 2)
