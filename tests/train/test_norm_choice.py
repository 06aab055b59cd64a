"""`parallel.norm` against PyTorch: what DistributedDataParallel computes on halves of the batch, and what lies between.

The whole path from the run file is taken; the trained network has two norms, so that what the first does to its own part
reaches the second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar.config.layers import NormStats
from lbpar.config.run_file import RunConfig, parse_run
from lbpar.cost.machine import find_machine
from lbpar.cost.price import price
from lbpar.engine.registry import get_engine
from lbpar.errors import ConfigError, LbparError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.ops.norm import Norm
from lbpar.plan.command import run as plan_command
from lbpar.program.steps import Start, StartMany
from lbpar.program.words import program_rows
from lbpar.train.setup import build_graph, build_plan
from lbpar.train.trainer import Trainer
from lbpar.transport.base import Sent
from tests.util.counting import assert_counted
from tests.util.run import Run, random_state, run, samples
from tests.util.training import assert_same, run_file, train

torch_graph = pytest.importorskip("tests.util.torch_graph", reason="needs torch")

NET = """
model:
  input: [6, 4, 3]
  layers:
    - {op: conv, filters: 5, kernel: 3, pad: 1, bias: false, name: c1}
    - {op: norm, name: n1}
    - {op: relu}
    - {op: conv, filters: 4, kernel: 3, pad: 1, name: c2}
    - {op: norm, name: n2, momentum: 0.3}
    - {op: relu}
    - {op: global_avg_pool, name: pool}
    - {op: linear, features: 3, name: fc}
data: {train: synthetic}
train: {batch: 7}
machine: laptop
"""
BATCH = 7


def net(*changes: str) -> RunConfig:
    return parse_run(NET, changes)


def ran(procs: int, *changes: str, **options: Any) -> tuple[Run, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """One step on virtual ranks, the samples, and the initial weights."""
    config = net(*changes)
    graph, rng = build_graph(config), np.random.default_rng(0)
    feeds, state = samples(graph, BATCH, rng), random_state(graph, rng)
    feeds["input"] += 3 * rng.standard_normal((BATCH, 6, 1, 1))  # samples and rows differ much
    return run(graph, build_plan(config, graph, procs), BATCH, feeds, state=state, **options), feeds, state


def close(got: np.ndarray, want: np.ndarray, what: str, rtol: float = 1e-10) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=rtol * max(1e-3, np.abs(want).max()), err_msg=what)


@pytest.mark.parametrize("choice", ["local", "sample"])
def test_samples_on_two_ranks_are_distributed_data_parallel(choice: str) -> None:
    """A PyTorch step per part of the batch, each with its own mean loss, the gradients averaged by samples."""
    got, feeds, state = ran(2, "parallel.strategy=data", f"parallel.norm={choice}")
    graph = got.program.graph
    parts = [slice(0, 4), slice(4, 7)]
    steps = [torch_graph.step(graph, {k: v[p] for k, v in feeds.items()}, state) for p in parts]
    for node in ("c1", "c2", "pool", "fc"):
        close(got.value(f"{node}:y"), np.concatenate([s.y[node] for s in steps]), node)
    for name in steps[0].grad:
        close(got.value(f"{name}:grad"), (4 * steps[0].grad[name] + 3 * steps[1].grad[name]) / 7, name)
    assert_counted(got)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("choice", "strategy", "layers", "procs", "parts"),
    [
        ("global", "data", {}, 2, (1,)),
        ("local", "data", {}, 2, (2,)),
        ("sample", "data", {}, 3, (3,)),
        ("local", "spatial", {}, 2, (1, 2)),
        ("sample", "spatial", {}, 2, (1,)),
        ("local", "data", {"c1": {"N": 2, "H": 2}, "n1": {"N": 2, "H": 2}, "c2": {"N": 2, "H": 2}, "n2": {"N": 2, "H": 2}}, 4, (2, 2)),
        ("sample", "data", {"c1": {"N": 2, "H": 2}, "n1": {"N": 2, "H": 2}, "c2": {"N": 2, "H": 2}, "n2": {"N": 2, "H": 2}}, 4, (2,)),
        ("local", "filter", {}, 2, (1,)),
        ("local", "data", {"n1": {"C": 2}, "n2": {}}, 2, (1,)),
    ],
)  # fmt: skip
def test_blocks_of_samples_and_of_space(
    choice: str, strategy: str, layers: dict[str, Any], procs: int, parts: tuple[int, ...], fused: bool
) -> None:
    changes = (f"parallel.norm={choice}", f"parallel.strategy={strategy}", f"parallel.layers={json.dumps(layers)}")
    got, feeds, state = ran(procs, *changes, fused=fused)
    want = torch_graph.step(got.program.graph, feeds, state, parts=parts)
    names = [n for n in ("c1", "n1", "c2", "n2", "pool", "fc") if f"{n}:y" in got.comparable()]
    assert {"c1", "c2", "fc"} <= set(names) and (fused or {"n1", "n2"} <= set(names))
    for node in names:
        close(got.value(f"{node}:y"), want.y[node], node)
    for name, grad in want.grad.items():
        close(got.value(f"{name}:grad"), grad, name)
    for norm, source, momentum in (("n1", "c1", 0.1), ("n2", "c2", 0.3)):  # always those of the whole batch
        rows = want.y[source].reshape(-1, want.y[source].shape[-1])
        for kind, new in (("running_mean", rows.mean(0)), ("running_var", rows.var(0, ddof=1))):
            close(got.state(f"{norm}.{kind}"), (1 - momentum) * state[f"{norm}.{kind}"] + momentum * new, kind)
    assert_counted(got)


def test_local_statistics_with_the_other_engine() -> None:
    try:
        engine = get_engine("onednn", "float32", 1)
    except LbparError as error:
        pytest.skip(str(error))
    got, feeds, state = ran(
        2, "parallel.strategy=data", "parallel.norm=local", engine=engine, dtype=np.float32, keep=True
    )
    want = torch_graph.step(got.program.graph, feeds, state, parts=(2,))
    close(got.value("fc:y"), want.y["fc"], "fc", 1e-4)
    for name, grad in want.grad.items():
        close(got.value(f"{name}:grad"), grad, name, 1e-3)


def test_what_is_priced_is_what_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The planner's figures of a run file, the price of its program and the transport's books; fewer bytes with local norms."""
    path, bytes_of = tmp_path / "run.yaml", {}
    path.write_text(NET)
    for choice in ("global", "sample", "local"):
        changes = ["parallel.strategy=data", f"parallel.norm={choice}", "parallel.procs=2", "engine.dtype=float64"]
        sets = [word for c in changes for word in ("--set", c)]
        assert plan_command(["--config", str(path), *sets, "--json", "-"]) == 0
        told = json.loads(capsys.readouterr().out)["step"]["bytes"]
        got = ran(2, *changes, input_grad=False, keep=False)[0]
        priced = price(got.program, find_machine("laptop"), "float64")
        sent = [e.transport.counter.total() for e in got.executors]
        assert told == priced.bytes and priced.bytes == max(s.bytes for s in sent)
        assert sum(r["bytes/step"] for r in program_rows(got.program, 0, np.dtype("float64"))) == sent[0].bytes
        forward = {s.dst for s in got.program.moves if s.phase == "forward" and s.node in ("n1", "n2")}
        books = got.executors[0].transport.counter.by_tag()
        bytes_of[choice] = sum(books.get(d, Sent()).bytes for d in forward)
    assert bytes_of["global"] == 4 * 8 * (5 + 4) and bytes_of["local"] == bytes_of["sample"] == 0


def test_a_checkpoint_fits_whatever_the_choice_and_evaluation_does_not_depend_on_it(tmp_path: Path) -> None:
    def job(t: Trainer) -> list[dict[str, Any]]:
        record = t.train_epoch()
        t.save(tmp_path)
        return [record]

    first = train(run_file(["parallel.strategy=data", "parallel.norm=local"]), 2, job)

    def resumed(choice: str, procs: int) -> list[dict[str, Any]]:
        def job(t: Trainer) -> list[dict[str, Any]]:
            assert t.resume(tmp_path)
            return [{**t.evaluate(), "step": t.step}]

        return train(run_file(["parallel.strategy=data", f"parallel.norm={choice}"]), procs, job).records

    evaluated = {k: v for k, v in first.records[0].items() if k.startswith("test_")}
    for choice, procs in (("global", 1), ("global", 2), ("sample", 3), ("local", 3)):
        [record] = resumed(choice, procs)
        assert record.pop("step") == first.records[0]["step"]
        assert record == pytest.approx(evaluated, rel=1e-12)


def test_only_a_split_of_samples_or_space_makes_a_difference() -> None:
    one = train(run_file())
    assert_same(train(run_file(["parallel.norm=local"])), one)
    assert_same(train(run_file(["parallel.norm=local", "parallel.strategy=filter"]), 2), one)
    space = "parallel.layers={norm1: {H: 2}, norm2: {H: 2}}"
    assert_same(train(run_file(["parallel.norm=sample", "parallel.strategy=spatial", space]), 2), one)
    with pytest.raises(AssertionError):
        assert_same(train(run_file(["parallel.norm=local", "parallel.strategy=spatial", space]), 2), one)
    with pytest.raises(AssertionError):
        assert_same(train(run_file(["parallel.norm=local", "parallel.strategy=data"]), 2), one)


def test_a_network_that_is_given_to_the_api_obeys() -> None:
    from lbpar import api

    config = net("parallel.norm=local", "train.epochs=1", "data.samples=7", "run.progress=none")
    assert {n.op.stats for n in api.build_graph(config).ops if n.op.kind == "norm"} == {"local"}  # type: ignore[attr-defined]
    given = build_graph(net())
    with api.train(config, given) as trained:
        assert trained.trainer.graph == build_graph(config) != given
    g = GraphBuilder((3,))
    with pytest.raises(ConfigError, match="has no norm"):
        api.make_plan(config, g.build(g.linear(g.input, 2)))


@pytest.mark.parametrize("procs", [2, 3])
def test_local_norms_wait_for_nobody_and_send_two_messages_a_step(procs: int) -> None:
    """In training, beside the loss: one message for all gradients, one for all running statistics."""
    changes = ("parallel.strategy=data", "parallel.norm=local")
    got, _, state = ran(procs, *changes, bucket_bytes=1 << 22, keep=False, input_grad=False, steps=2, rate=0.1)
    starts = [s for s in got.program.steps if isinstance(s, (Start, StartMany))]
    messages = [s for s in starts if not isinstance(s, Start) or s.node != "loss"]
    assert [(type(s), s.phase, len(s.starts)) for s in messages if isinstance(s, StartMany)] == [
        (StartMany, "backward", 9),
        (StartMany, "update", 2),
    ]
    assert len(messages) == 2
    assert_counted(got, steps=2)
    plain, *_ = ran(procs, *changes, keep=False, input_grad=False, steps=2, rate=0.1)
    for name in state:
        close(got.state(name), plain.state(name), name, 1e-12)
    priced = price(got.program, find_machine("laptop"), "float64")
    assert sum(s.messages for s in priced.steps if s.phase == "update") == 2 * (procs - 1)


VECTORS = """
model: {input: [6], layers: [{op: linear, features: 5, name: fc}, {op: norm, name: n}, {op: linear, features: 3}]}
data: {train: synthetic, test: synthetic, samples: 9}
train: {batch: 4}
engine: {name: numpy, dtype: float64}
"""


@pytest.mark.parametrize(
    ("procs", "changes", "text"),
    [
        (1, ["train.batch=1"], "n: a batch of 1 sample gives it one value per channel.*Train with larger batches"),
        (1, ["train.batch=1", "train.accumulate=4"], "n: a batch of 1 sample gives it one value"),
        (1, ["data.samples=1"], "n: a batch of 1 sample gives it one value"),
        (1, [], "n: the last batch of an epoch of 1 sample gives it one value.*Set data.drop_last: true"),
        (4, [], "n: the last batch of an epoch of 1 sample gives it one value.*Set data.drop_last: true"),
        (4, ["parallel.norm=local"], "n: a batch of 4 samples gives some process one value.*parallel.norm: global, or split n over"),
        (2, ["data.samples=11", "parallel.norm=sample"], "n: the last batch of an epoch of 3 samples gives some process one value"),
    ],
)  # fmt: skip
def test_statistics_of_one_value_are_refused_before_the_first_step(procs: int, changes: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        train(run_file(["parallel.strategy=data", *changes], VECTORS), procs)


@pytest.mark.parametrize(
    ("procs", "changes"),
    [
        (1, ["data.drop_last=true"]),
        (1, ["train.max_steps=2"]),  # ends before the last batch
        (1, ["data.samples=10"]),
        (4, ["data.samples=8"]),
        (2, ["data.samples=8", "parallel.norm=local"]),
        (8, ["data.samples=8", "parallel.layers={n: {N: 2}}", "parallel.norm=local"]),
    ],
)
def test_two_values_are_enough(procs: int, changes: list[str]) -> None:
    assert train(run_file(["parallel.strategy=data", *changes], VECTORS), procs).records


def test_evaluation_takes_samples_one_by_one() -> None:
    config = run_file(["train.batch=1"], VECTORS)
    [record] = train(config, 1, lambda trainer: [trainer.evaluate()]).records
    assert np.isfinite(record["test_loss"])


def norm(stats: NormStats) -> Norm:
    return Norm(eps=1e-5, momentum=0.1, affine=True, stats=stats)


def test_space_counts_and_idle_or_empty_processes_do_not() -> None:
    op, xs = norm("local"), ((3, 4, 5, 2),)
    assert norm("global").fewest(xs, {"N": 3, "H": 4}) == 60
    assert op.fewest(xs, {}) == 60 and op.fewest(xs, {"C": 2}) == 60
    assert op.fewest(xs, {"N": 3}) == 20 and op.fewest(xs, {"N": 7, "W": 4}) == 4
    assert norm("sample").fewest(xs, {"N": 3, "W": 5}) == 20
