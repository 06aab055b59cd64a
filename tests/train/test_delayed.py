"""Training with delayed gradients: the run of one rank that goes back to older weights by itself, through drains, checkpoints and resumption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar.errors import ConfigError, LbparError, TrainingError
from lbpar.study.report import layer_seconds
from lbpar.train.predict import predict
from lbpar.train.trainer import Trainer
from tests.util.training import Ran, assert_same, run_file, train

BASE = ["parallel.strategy=data", "data.samples=38", "train.epochs=2"]  # batches of 8, 8, 8, 8 and 6
DELAYED = [*BASE, "parallel.schedule=delayed"]
Job = Callable[[Trainer], list[dict[str, Any]]]


def changes(stages: int, *more: str) -> list[str]:
    return [*DELAYED, f"parallel.stages={stages}", *more]


def stages_of(config: list[str], procs: int) -> dict[str, int]:
    """Stage of each layer in a run."""
    found: dict[str, int] = {}

    def job(trainer: Trainer) -> list[dict[str, Any]]:
        assert trainer.plan.pipeline is not None
        found.update(trainer.plan.pipeline.stages)
        return []

    train(run_file(config), procs, job)
    return found


def serially(stages: dict[str, int], drains: int = 0, reschedule: int = 0) -> Job:
    """Train on one rank, each batch with the weights that its stage had so many updates ago, and update the newest."""
    count = 1 + max(stages.values())

    def job(trainer: Trainer) -> list[dict[str, Any]]:
        state, optimizer = trainer.worker.state, trainer.optimizer
        age = {
            n: count - 1 - stages[n.rpartition(".")[0]]
            for n, p in trainer.worker.params.items()
            if p.kind != "statistic"
        }
        history: dict[str, list[np.ndarray]] = {}
        step, rule = trainer._step, optimizer.step

        def old(*args: Any) -> Any:
            if trainer.batches == 0 or (drains and trainer.step % drains == 0):
                history.update({n: [state[n].copy()] for n in age})
            for n, k in age.items():
                state[n][...] = history[n][max(0, len(history[n]) - 1 - k)]
            return step(*args)

        def newest(params: Any, grads: Any, lr: float, norms: Any) -> None:
            for n in params:
                params[n][...] = history[n][-1]
            done = optimizer.steps
            for k in set(age.values()):  # a stage after the other
                optimizer.steps = done
                slower = (1 + k) ** -max(0.0, 1 - done / reschedule) if reschedule else 1.0
                mine = [n for n in params if age[n] == k]
                rule({n: params[n] for n in mine}, {n: grads[n] for n in mine}, lr * slower, norms)
            for n in params:
                history[n].append(params[n].copy())

        trainer._step, optimizer.step = old, newest  # type: ignore[method-assign]
        return list(trainer.train())

    return job


ADAM = "train.optimizer={name: adam, lr: 0.01}"
LARS = "train.optimizer={name: lars, lr: 0.05, momentum: 0.9}"
CASES: dict[str, tuple[int, int, list[str]]] = {
    "two stages": (2, 2, ["train.schedule={name: cosine, warmup_epochs: 0.5}"]),
    "four stages": (4, 4, []),
    "two stages of two": (2, 4, [ADAM]),
    "three stages of two": (3, 6, ["parallel.strategy=spatial", LARS]),
    "given layers": (2, 2, ["parallel.stage={conv2: 0, fc: 1}"]),
    "chosen grids": (2, 4, ["parallel.strategy=auto", "machine=laptop"]),
    "ended early": (3, 3, ["train.max_steps=7"]),
    "more stages than batches": (4, 4, ["data.samples=16", "train.epochs=3"]),
    "a stage without parameters": (3, 3, ["parallel.stage={loss: 2, fc: 1}", ADAM]),
}


@pytest.mark.parametrize(("stages", "procs", "more"), CASES.values(), ids=CASES.keys())
def test_a_run_is_that_of_one_rank_with_older_weights(stages: int, procs: int, more: list[str]) -> None:
    config = changes(stages, *more)
    same = [c for c in more if not c.startswith(("parallel", "machine"))]
    want = train(run_file([*BASE, *same]), 1, serially(stages_of(config, procs)))
    assert_same(train(run_file(config), procs), want)


def test_the_delay_changes_the_run() -> None:
    exact, delayed = train(run_file(BASE)), train(run_file(changes(2)), 2)
    assert abs(exact.records[0]["loss"] - delayed.records[0]["loss"]) > 1e-3


def test_one_stage_is_the_plain_run_to_the_last_bit() -> None:
    plain, one = train(run_file(BASE), 2), train(run_file(changes(1)), 2)
    assert plain.records == one.records
    for name, array in plain.tensors.items():
        np.testing.assert_array_equal(one.tensors[name], array)


def test_activations_that_are_computed_again_are_those_of_the_weights_kept() -> None:
    kept, again = train(run_file(changes(2)), 2), train(run_file(changes(2, "parallel.recompute=3")), 2)
    assert kept.records == again.records
    for name, array in kept.tensors.items():
        np.testing.assert_array_equal(again.tensors[name], array)


def test_rates_of_old_gradients_grow_to_the_schedules() -> None:
    config = changes(3, "parallel.reschedule=6")
    want = train(run_file(BASE), 1, serially(stages_of(config, 3), reschedule=6))
    assert_same(train(run_file(config), 3), want)
    assert abs(want.records[0]["loss"] - train(run_file(changes(3)), 3).records[0]["loss"]) > 1e-4


EVERY = "run.checkpoint={every_steps: 3}"


def test_the_pipe_is_empty_at_every_checkpoint() -> None:
    config = changes(2, EVERY)
    want = train(run_file(BASE), 1, serially(stages_of(config, 2), drains=3))
    seen: list[tuple[int, int]] = []

    def job(trainer: Trainer) -> list[dict[str, Any]]:
        out = []
        while not trainer.done:
            out.append(trainer.train_epoch(lambda result, lr: seen.append((trainer.step, trainer.under_way))))
        return out

    assert_same(train(run_file(config), 2, job), want)
    assert set(seen) == {(s, int(s % 3 != 0 and s % 5 != 0)) for s in range(1, 11)}


@pytest.mark.parametrize("after", [3, 5], ids=["in an epoch", "after an epoch"])
def test_a_run_goes_on_as_if_it_had_not_ended(after: int, tmp_path: Path) -> None:
    config = changes(2, EVERY, "parallel.strategy=data")
    want = train(run_file(config), 4)

    class Enough(Exception):
        pass

    def first(trainer: Trainer) -> list[dict[str, Any]]:
        def leave(result: Any, lr: float) -> None:
            if trainer.step == after and trainer.between_updates:
                trainer.save(tmp_path)
                raise Enough

        with pytest.raises(Enough):
            trainer.train_epoch(leave)
        return []

    def then(trainer: Trainer) -> list[dict[str, Any]]:
        assert trainer.resume(tmp_path)
        return list(trainer.train())

    train(run_file(config), 4, first)
    rest = train(run_file(config), 2, then)  # on other processes, with as many stages
    assert_same(Ran(rest.records, rest.tensors), Ran(want.records[-len(rest.records) :], want.tensors))


def test_a_run_that_is_left_between_two_batches_goes_on_with_those_under_way() -> None:
    want = train(run_file(changes(2)), 2)

    def job(trainer: Trainer) -> list[dict[str, Any]]:
        def leave(result: Any, lr: float) -> None:
            if trainer.step in (2, 4, 5):  # the last one while the pipe drains
                raise ZeroDivisionError

        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                trainer.train_epoch(leave)
        return list(trainer.train())

    assert_same(train(run_file(changes(2)), 2, job), want)


def test_predictions_are_those_of_one_rank() -> None:
    found: list[np.ndarray] = []

    def job(trainer: Trainer) -> list[dict[str, Any]]:
        trainer.train_epoch()
        found.append(predict(trainer.worker, trainer.dataset, 8)[trainer.graph.output])
        return []

    for procs in (2, 4):
        train(run_file(changes(2)), procs, job)
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-9, atol=1e-12)


def test_a_loss_that_is_not_finite_ends_the_run_on_all_ranks() -> None:
    with pytest.raises(TrainingError, match=r"step \d+: the loss is .*lower the learning rate|Lower the learning rate"):
        train(run_file(changes(2, "train.optimizer.lr=1e30")), 2)


WRONG = {
    "accumulated": (["train.accumulate=2"], "train.accumulate: got 2 with parallel.schedule: delayed"),
    "clipped": (["train.clip_norm=1.0"], "train.clip_norm: got 1 with parallel.schedule: delayed"),
    "scaled": (["train.loss_scale={start: 2.0}"], "train.loss_scale: given with parallel.schedule: delayed"),
    "parts": (["parallel.micro_batches=2"], "whole batches follow each other"),
    "two stages at a place": (["parallel.interleave=2"], "only interleaved"),
}


@pytest.mark.parametrize(("more", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_does_not_go_together_is_refused(more: list[str], message: str) -> None:
    with pytest.raises(LbparError, match=message):
        train(run_file(changes(2, *more)), 2)


@pytest.mark.parametrize("more", [["parallel.stages=2"], ["parallel.schedule=delayed"]], ids=["exact", "one stage"])
def test_rates_are_only_rescheduled_where_gradients_are_old(more: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.reschedule: got 5, but no gradients are delayed"):
        train(run_file([*BASE, *more, "parallel.reschedule=5"]), 2)


def test_a_traced_step_tells_batches_apart_and_counts_the_bytes_of_the_program(tmp_path: Path) -> None:
    """Layers are found in its names, and moves that end in a later round than they start in belong to one batch."""

    def job(trainer: Trainer) -> list[dict[str, Any]]:
        records = list(trainer.train())
        trainer.tracer.write(tmp_path, trainer.transport)
        return records

    train(run_file(changes(3, "run.trace=true", "run.report=true")), 3, job)
    step, whole = (json.loads((tmp_path / name).read_text()) for name in ("step.json", "trace.json"))
    assert step["otherData"]["step"] == 8  # behind the fill
    for sizes in step["otherData"]["bytes"]:
        assert sizes["counted"] == {k: n for k, n in sizes["model"].items() if n}
    assert {"conv1", "conv2", "fc"} <= set(layer_seconds(step["traceEvents"]))
    kernels = [e["name"] for e in whole["traceEvents"] if e.get("cat") == "forward" and e["name"].startswith("fc ")]
    assert kernels == [f"fc linear_forward#{i}" for i in range(10)]
