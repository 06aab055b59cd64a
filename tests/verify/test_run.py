"""The parity tool finds what is wrong, names it, and passes what is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar.config.engine import EngineConfig
from lbpar.config.run_file import parse_run
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.registry import get_engine
from lbpar.errors import ConfigError, EngineError, PlanError
from lbpar.layout.grid import Grid
from lbpar.plan.resolve import save_plan
from lbpar.program.plan import Pipeline, Plan
from lbpar.runtime import binding as kernels
from lbpar.runtime.binding import Bound
from lbpar.runtime.delayed import Pipe
from lbpar.runtime.optim.rules import SGD
from lbpar.train.setup import build_graph, build_plan
from lbpar.transport.single import SingleTransport
from lbpar.verify.command import main
from lbpar.verify.compare import Reference, Update
from lbpar.verify.run import TOLERANCES, Verification, _engine, named_plans, verify_plans

RUN = """
model:
  input: [7, 6, 2]
  layers:
    - {op: conv, filters: 4, kernel: 3, pad: 1, name: c}
    - {op: norm, name: n}
    - {op: leaky_relu, name: r}
    - {op: dropout, rate: 0.3}
    - {op: global_avg_pool}
    - {op: linear, features: 3, name: fc}
data: {train: synthetic}
train: {batch: 5, optimizer: {name: sgd, lr: 0.1, momentum: 0.9}}
parallel: {strategy: data, layers: {c: {H: 2, F: 2}, r: {H: 2, C: 2}}}
"""


STAGES = "{strategy: data, stages: 2, micro_batches: 2, stage: {r: 1}}"


def check(count: int = 0, run: str = RUN) -> Verification:
    config = parse_run(run)
    graph = build_graph(config)
    plans = named_plans("data", build_plan(config, graph, 4), graph, 5, count, seed=1)
    return verify_plans(config, graph, plans, 5, "numpy", 1, SingleTransport())[0]


def spoil(monkeypatch: pytest.MonkeyPatch, kernel: str, on: Callable[[Bound], bool]) -> None:
    """Let a kernel give a slightly wrong result where ``on`` says so."""
    right = kernels.BINDERS[kernel]

    def bind(b: Bound) -> Any:
        call = right(b)
        return (lambda *a: tuple(y * (1 + 1e-6) for y in call(*a))) if on(b) else call

    monkeypatch.setitem(kernels.BINDERS, kernel, bind)


def test_everything_is_compared() -> None:
    result = check(count=2)
    assert result.equal() and len(result.plans) == 3 and result.procs == 4 and result.simulated
    expected = {"c:y", "c:dy", "r:y", "fc:y", "input:dy", "c.weight:grad", "fc.bias:grad", "c.weight", "n.running_var"}
    assert expected <= set(result.tensors)
    assert all(sum(p.sent.values()) > 0 for p in result.plans.values())


def test_random_plans_compute_random_layers_again() -> None:
    run = RUN.replace("parallel: {", "parallel: {recompute: [c, n, r, dropout1], ")
    result = check(6, run)
    assert result.equal()
    config = parse_run(run)
    graph = build_graph(config)
    plans = [p for _, p in named_plans("data", build_plan(config, graph, 4), graph, 5, 6, seed=1)]
    assert len({p.recompute for p in plans}) > 3 and plans[0].recompute == ("c", "n", "r", "dropout1")


@pytest.mark.parametrize(
    ("kernel", "tensor"),
    [
        ("conv_forward", "c:y"),
        ("leaky_relu_backward", "n:dy"),
        ("conv_backward_weights_bias", "c.weight:grad"),
        ("linear_backward_weights", "fc.weight"),
    ],
)
def test_a_kernel_that_is_wrong_on_one_rank_is_found(kernel: str, tensor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, kernel, lambda b: b.rank == 3)
    result = check()
    assert not result.equal() and result.tensors[tensor] > 1e-9
    assert result.tensors["c:y"] < 1e-12 or kernel == "conv_forward"


@pytest.mark.parametrize("wrong", [None, ("c:y#1", 0, "conv_forward"), ("fc:y#1", 2, "linear_forward")])
def test_stages_are_compared_with_the_same_micro_batches(
    wrong: tuple[str, int, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every micro-batch, the given stages with random grids too; a fault of one rank in its stage is seen."""
    if wrong is not None:
        spoil(monkeypatch, wrong[2], lambda b: b.rank == wrong[1])
    config = parse_run(RUN.replace("{strategy: data, layers: {c: {H: 2, F: 2}, r: {H: 2, C: 2}}}", STAGES))
    graph = build_graph(config)
    plans = named_plans("data", build_plan(config, graph, 4), graph, 5, 2, seed=1)
    assert [p.micro_batches for _, p in plans] == [2, 2, 2] and {len(p.places) for _, p in plans} == {2}
    result = verify_plans(config, graph, plans, 5, "numpy", 1, SingleTransport())[0]
    assert {"c:y#0", "c:y#1", "fc:dy#1", "c.weight:grad", "c.weight", "n.running_var"} <= set(result.tensors)
    assert result.equal() == (wrong is None) and (wrong is None or result.tensors[wrong[0]] > 1e-9)


DELAYED = "{strategy: data, stages: 2, schedule: delayed, stage: {r: 1}}"


@pytest.mark.parametrize("wrong", [None, "weights are not kept", "a kernel"])
@pytest.mark.parametrize("rule", ["{name: sgd, lr: 0.1, momentum: 0.9}", "{name: lamb, lr: 0.1}"])
def test_delayed_gradients_are_compared_with_those_of_older_weights_on_one_rank(
    wrong: str | None, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four updates, in a loop that knows nothing of stages; what backward passes see must be what forward passes saw."""
    if wrong == "a kernel":
        spoil(monkeypatch, "conv_forward", lambda b: b.rank == 0)
    elif wrong is not None:
        monkeypatch.setattr(Pipe, "_keep", lambda self, done, params: None)
    config = parse_run(RUN.replace("{strategy: data, layers: {c: {H: 2, F: 2}, r: {H: 2, C: 2}}}", DELAYED))
    config = config.model_copy(update={"train": parse_run(RUN, [f"train.optimizer={rule}"]).train})
    graph = build_graph(config)
    plans = named_plans("data", build_plan(config, graph, 4), graph, 5, 1, seed=1)
    result = verify_plans(config, graph, plans, 5, "numpy", 1, SingleTransport())[0]
    assert {"c:y", "fc:dy", "c.weight:grad", "c.weight", "fc.weight", "n.running_var", "input:dy"} <= set(
        result.tensors
    )
    assert result.equal() == (wrong is None) and (wrong is None or result.worst > 1e-9)


def test_delays_that_differ_are_not_compared_together() -> None:
    config = parse_run(RUN)
    graph = build_graph(config)
    plain = build_plan(config, graph, 4)
    names = [n.name for n in graph.ops]
    other = Plan(Grid((2,)), {}).staged(2, Pipeline(stages={n: int(n == names[-1]) for n in names}, schedule="delayed"))
    with pytest.raises(ConfigError, match="delay gradients differently"):
        verify_plans(config, graph, [("a", plain), ("b", other)], 5, "numpy", 1, SingleTransport())


def test_plans_with_other_micro_batches_are_not_compared_together() -> None:
    config = parse_run(RUN)
    graph = build_graph(config)
    plain = build_plan(config, graph, 4)
    parts = plain.staged(1, Pipeline(micro_batches=2))
    with pytest.raises(ConfigError, match="different numbers of micro-batches"):
        verify_plans(config, graph, [("a", plain), ("b", parts)], 5, "numpy", 1, SingleTransport())


def test_a_value_that_is_not_a_number_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.BINDERS["linear_forward"]
    monkeypatch.setitem(
        kernels.BINDERS,
        "linear_forward",
        lambda b: (lambda e, c, *a: tuple(y * float("nan") for y in right(b)(e, c, *a))) if b.rank == 1 else right(b),
    )
    result = check()
    assert result.worst == float("inf") and not result.equal()


def test_a_value_that_is_not_a_number_on_a_later_rank_only_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 alone holds its half of the weight, so that no sum carries the NaN to rank 0."""
    right = kernels.BINDERS["linear_backward_weights"]

    def bind(b: Bound) -> Any:
        call = right(b)
        return (lambda *a: tuple(y * float("nan") for y in call(*a))) if b.rank == 1 else call

    monkeypatch.setitem(kernels.BINDERS, "linear_backward_weights", bind)
    config = parse_run(RUN.replace("r: {H: 2, C: 2}", "fc: {F: 2}"))
    graph = build_graph(config)
    plans = [("filters", build_plan(config, graph, 4))]
    result = verify_plans(config, graph, plans, 5, "numpy", 1, SingleTransport())[0]
    assert result.tensors["fc.weight"] == result.tensors["fc.weight:grad"] == float("inf")
    assert result.worst == float("inf") and not result.equal()


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    config = parse_run(RUN)
    save_plan(build_plan(config, build_graph(config), 4), "plan.yaml", batch=5)
    assert main(["--config", "run.yaml", "--plan", "plan.yaml", "--json", "out.json"]) == 0
    told = json.loads(Path("out.json").read_text())
    assert set(told) == {"worst", "tensors", "bytes", "plans", "merged_norms"} and not told["merged_norms"]
    assert told["plans"][0]["name"] == "plan.yaml"
    assert told["worst"] == max(told["tensors"].values()) and told["bytes"]["allreduce"] > 0
    assert "equal: worst" in capsys.readouterr().out
    spoil(monkeypatch, "conv_forward", lambda b: b.rank == 2)
    assert main(["--config", "run.yaml", "--procs", "4"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out
    with pytest.raises(PlanError, match="made for 4 processes"):
        main(["--config", "run.yaml", "--procs", "6", "--plan", "plan.yaml"])
    for wrong in (["--procs", "0"], ["--batch", "0"], ["--batch", "-2"], ["--random-plans", "-1"], ["--procs", "4097"]):
        with pytest.raises(ConfigError, match="got .*, expected [01] to "):
            main(["--config", "run.yaml", *wrong])
    with pytest.raises(ConfigError, match="cannot write the report"):
        main(["--config", "run.yaml", "--json", str(tmp_path / "no" / "out.json")])


def command(capsys: pytest.CaptureFixture[str], *changes: str, status: int = 0) -> str:
    sets = [word for c in changes for word in ("--set", c)]
    assert main(["--config", "run.yaml", "--procs", "4", *sets]) == status
    return capsys.readouterr().out


def test_norms_that_differ_by_design_are_compared_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    assert "note:" not in command(capsys, "parallel.norm=sample")  # n has the grid of c, which does not split samples
    for changes in (["parallel.norm=local"], ["parallel.norm=sample", "parallel.layers.n={N: 4}"]):
        out = command(capsys, *changes)
        assert "equal: worst" in out and "note: the statistics of n differ from those of one rank by design" in out
    Path("run.yaml").write_text(RUN.replace("{op: norm, name: n}", "{op: norm, name: n, stats: local}"))
    assert "note: the statistics of n " in command(capsys)
    assert main(["--config", "run.yaml", "--procs", "4", "--json", "out.json"]) == 0
    assert json.loads(Path("out.json").read_text())["merged_norms"] == ["n"]
    assert "note:" in capsys.readouterr().out
    for same in ("parallel.norm=global", "parallel.layers={n: {C: 4}}"):  # nothing is kept apart
        assert "note:" not in command(capsys, same)
    spoil(monkeypatch, "conv_forward", lambda b: b.rank == 2)
    assert "DIFFERENT" in command(capsys, status=1)  # other errors are still found


def test_what_is_not_a_number_is_null_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    right = kernels.BINDERS["linear_forward"]
    nan = float("nan")

    def bind(b: Bound) -> Any:
        call = right(b)
        return (lambda *a: tuple(y * nan for y in call(*a))) if b.rank == 1 else call

    monkeypatch.setitem(kernels.BINDERS, "linear_forward", bind)
    assert main(["--config", "run.yaml", "--procs", "4", "--json", "out.json"]) == 1
    assert "DIFFERENT: worst inf" in capsys.readouterr().out

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    told = json.loads(Path("out.json").read_text(), parse_constant=refuse)
    assert told["worst"] is told["tensors"]["fc:y"] is told["plans"][0]["worst"] is None
    assert told["tensors"]["c:y"] < 1e-12


def test_rounding_is_judged_by_another_order_of_summation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN.replace("features: 3, name: fc}", "features: 3, name: fc}\n    - {op: norm}"))
    assert "note:" not in command(capsys)  # within the tolerance: nothing else is measured
    monkeypatch.setitem(TOLERANCES, "float64", 1e-17)
    out = command(capsys)
    assert "equal: worst" in out and "another order of summation on one rank changes it by" in out
    assert (
        main(["--config", "run.yaml", "--procs", "4", "--tolerance", "1e-17"]) == 1
    )  # asked for, so nothing is explained
    assert "note:" not in capsys.readouterr().out
    spoil(monkeypatch, "conv_forward", lambda b: b.rank == 2)
    assert "DIFFERENT" in command(capsys, status=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_is_compared_with_the_reference_in_float64(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        get_engine("onednn", dtype)
    except EngineError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    run = ["--config", "run.yaml", "--procs", "4", "--engine", "onednn"]
    assert main([*run, "--dtype", dtype]) == 0
    out = capsys.readouterr().out
    other = "bfloat16" if dtype == "bfloat16" else "float64"  # which rounds activations as well
    assert f"4 simulated ranks (onednn {dtype}) against one (numpy {other})" in out
    from lbpar.engine.onednn.engine import OneDnnEngine

    right = OneDnnEngine.conv_forward

    def wrong(self: OneDnnEngine, *a: Any) -> Any:
        y = right(self, *a)
        return (y * 1.1).astype(y.dtype)

    monkeypatch.setattr(OneDnnEngine, "conv_forward", wrong)
    assert main([*run, "--dtype", dtype]) == 1  # wrong on one rank as on four
    with pytest.raises(ConfigError, match=r"no float64.*--dtype float32"):
        main(run)


def test_what_a_run_file_asks_of_gpus_is_for_gpus_only() -> None:
    gpu = EngineConfig(name="cupy", threads=2, tf32=True, graphs=True, workspace=1, transport="nccl")
    assert _engine(gpu, None, "float64") == EngineConfig(name="numpy", dtype="float64", threads=2)
    assert _engine(gpu, "cupy", "float32") == gpu
    assert not _engine(gpu, "cupy", "float64").tf32
    tuned = gpu.model_copy(update={"cudnn": True, "autotune": True, "tf32": False})
    assert (_engine(tuned, "cupy", "float64").cudnn, _engine(tuned, "cupy", "float64").autotune) == ("auto", False)
    assert (_engine(tuned, "cupy", "float32").cudnn, _engine(tuned, "cupy", "float32").autotune) == (True, True)
    assert _engine(tuned.model_copy(update={"cudnn": False, "autotune": False}), "cupy", "float64").cudnn is False
    asked = EngineConfig(transport="nccl")  # on the command line --engine cupy, and in the run file nothing
    assert _engine(asked, "cupy", "float32") == EngineConfig(name="cupy", transport="nccl")


def test_rules_of_the_run_file_are_what_is_compared() -> None:
    kinds, values = ("plain", "clipped", "added"), {}
    for kind, extra in zip(kinds, ("", "clip_norm: 0.01, ", "accumulate: 3, clip_norm: 0.01, "), strict=True):
        config = parse_run(RUN.replace("train: {", "train: {" + extra))
        graph = build_graph(config)
        plans = named_plans("data", build_plan(config, graph, 4), graph, 5, 1, seed=1)
        result = verify_plans(config, graph, plans, 5, None, 1, SingleTransport())[0]
        assert result.equal()
        t = config.train
        update = Update(graph, 5, 1, lambda e: SGD(0.1), 0.1, t.clip_norm, t.accumulate)
        values[kind] = Reference(update, NumpyEngine("float64")).values
    norms = [np.sqrt(sum((a**2).sum() for n, a in values[k].items() if n.endswith(":grad"))) for k in kinds]
    assert norms[0] > 0.1 and norms[1:] == pytest.approx([0.01, 0.01], rel=1e-3)
    moved = {k: np.abs(values[k]["n.running_mean"] - values["plain"]["n.running_mean"]).max() for k in kinds}
    assert moved["clipped"] == 0 < moved["added"]  # three batches, not one


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--procs", "4", "--set", "parallel={stages: 3}"],
            "parallel.stages: got 3, which does not divide 4 processes",
        ),
        (["--procs", "4", "--set", "parallel={layers: {gone: {N: 2}}}"], "parallel.layers: .* has no layer 'gone'"),
        (["--procs", "4", "--set", "parallel={strategy: data, memory: 1GB, stages: 3}"], "parallel.stages: got 3"),
    ],
)
def test_what_no_plan_can_be_is_refused_before_a_machine_is_measured(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lbpar.calibrate.machine.machine_of", lambda *_: pytest.fail("measured"))
    (tmp_path / "run.yaml").write_text(RUN)
    with pytest.raises(PlanError, match=words):
        main(["--config", str(tmp_path / "run.yaml"), *options])


SHARED = """
model:
  input: [7, 6, 3]
  layers:
    - {op: conv, filters: 4, kernel: 3, pad: 1, name: a}
    - {op: conv, filters: 4, kernel: 3, pad: 1, name: b}
    - {op: conv, filters: 4, kernel: 3, pad: 1, name: c, share: b}
    - {op: global_avg_pool}
    - {op: linear, features: 3, name: fc}
data: {train: synthetic}
train: {batch: 8}
"""


@pytest.mark.parametrize(
    "parallel",
    [
        "{strategy: data, stages: 2, schedule: 1f1b, stage: {b: 0, c: 1}}",
        "{strategy: data, stages: 2, schedule: zero-bubble, stage: {b: 1}}",
        "{strategy: data, stages: 2, schedule: gpipe, micro_batches: 3}",
        "{strategy: spatial, micro_batches: 2}",
    ],
)
def test_parameters_keep_their_type_beside_half_activations(parallel: str, tmp_path: Path) -> None:
    """Their gradients too, where another stage has them, and of every micro-batch."""
    (tmp_path / "run.yaml").write_text(SHARED + f"parallel: {parallel}\n")
    options = ["--procs", "4", "--engine", "numpy", "--dtype", "bfloat16"]
    assert main(["--config", str(tmp_path / "run.yaml"), *options]) == 0


@pytest.mark.parametrize("grids", ["{b: {C: 2}, c: {F: 2}}", "{b: {N: 2}, c: {F: 2}}", "{b: {H: 2}, c: {C: 2}}"])
def test_shared_parameters_on_grids_of_their_own_with_delayed_gradients(grids: str, tmp_path: Path) -> None:
    fields = (
        f"parallel: {{strategy: data, stages: 2, schedule: delayed, stage: {{a: 0, fc: 1, b: 1}}, layers: {grids}}}\n"
    )
    (tmp_path / "run.yaml").write_text(SHARED + fields)
    assert main(["--config", str(tmp_path / "run.yaml"), "--procs", "4"]) == 0
