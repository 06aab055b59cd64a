"""Plans from run files and plan files, and what is said of those that cannot be."""

from __future__ import annotations

import pytest

from lbpar.config.parallel import ParallelConfig
from lbpar.config.plan_file import PlanFile
from lbpar.config.report import check
from lbpar.errors import LbparError, PlanError
from lbpar.graph.builder import GraphBuilder
from lbpar.plan.resolve import plan_from_file, resolve_plan, save_plan


@pytest.fixture(scope="module")
def graph():
    g = GraphBuilder(input=(8, 8, 4))
    x = g.relu(g.conv(g.input, 8, 3, pad=1, name="conv1"), name="relu1")
    return g.build(g.linear(g.global_avg_pool(x, name="mean"), 6, name="fc"))


def parallel(**fields):
    return check(ParallelConfig, fields, "test")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": {"conv2": {"N": 2}}}, "parallel.layers: network has no layer 'conv2'; did you mean 'conv1'?"),
        ({"layers": {"zzz": {"N": 2}}}, "its layers are conv1, relu1, mean, fc"),
        ({"layers": {"fc": {"H": 2}}}, "fc: a linear has no loop 'H'; its loops are N, F, C"),
        ({"layers": {"conv1": {"N": 3}}}, "parallel.layers.conv1: N 3 is 3 ways"),
    ],
)
def test_exceptions_per_layer_that_cannot_be(graph, fields, message):
    with pytest.raises(LbparError) as e:
        resolve_plan(parallel(strategy="data", **fields), graph, 8, 4)
    assert message in str(e.value)


def test_a_saved_plan_comes_back(graph, tmp_path):
    plan = resolve_plan(parallel(strategy="data", layers={"conv1": {"H": 2, "F": 2}, "fc": {"C": 4}}), graph, 8, 4)
    for name in ("plan.yaml", "plan.json"):
        save_plan(plan, tmp_path / name, model="network", batch=8)
        again = resolve_plan(parallel(strategy=str(tmp_path / name)), graph, 8, 4)
        assert again == plan
    changed = resolve_plan(parallel(strategy=str(tmp_path / "plan.yaml"), layers={"fc": {"F": 2}}), graph, 8, 4)
    assert changed.ways("fc") == {"F": 2}
    assert changed.ways("conv1") == plan.ways("conv1")


def test_a_saved_plan_that_splits_nothing_comes_back(graph, tmp_path):
    plan = resolve_plan(parallel(strategy="data", layers={n.name: {} for n in graph.ops}), graph, 8, 4)
    assert plan.ops and not any(plan.ops.values())
    save_plan(plan, tmp_path / "plan.yaml", model="network", batch=8)
    assert resolve_plan(parallel(strategy=str(tmp_path / "plan.yaml")), graph, 8, 4) == plan
    mixed = resolve_plan(parallel(strategy="data", layers={"conv1": {}}), graph, 8, 4)
    save_plan(mixed, tmp_path / "mixed.yaml", model="network", batch=8)
    again = resolve_plan(parallel(strategy=str(tmp_path / "mixed.yaml")), graph, 8, 4)
    assert again == mixed and not again.ways("conv1") and again.ways("fc")


@pytest.mark.parametrize(
    ("file", "procs", "message"),
    [
        ({"procs": 4, "grid": [2, 2]}, 2, "made for 4 processes, but this run has 2; make a plan for 2"),
        ({"procs": 4, "grid": [2, 2], "batch": 9}, 4, "made for batch 9, but this run has batch 8"),
        (
            {"procs": 4, "grid": [2, 2], "ops": {"cnv1": {"N": 4}}},
            4,
            "'cnv1', which network does not have; did you mean 'conv1'?",
        ),
        ({"procs": 4, "grid": [2, 2]}, 4, "gives no layer of network a grid"),
    ],
)
def test_plan_files_of_something_else(graph, file, procs, message):
    with pytest.raises(PlanError) as e:
        plan_from_file(check(PlanFile, file, "test"), graph, 8, procs, "p.yaml")
    assert str(e.value).startswith("p.yaml: ")
    assert message in str(e.value)
