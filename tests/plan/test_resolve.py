"""Plans from run files and plan files, and what is said of those that cannot be."""

from __future__ import annotations

import pytest

from lbpar.config.parallel import ParallelConfig
from lbpar.config.plan_file import PlanFile
from lbpar.config.report import check
from lbpar.errors import LbparError, PlanError
from lbpar.graph.builder import GraphBuilder
from lbpar.layout.grid import Grid
from lbpar.plan.assign import assign
from lbpar.plan.resolve import plan_from_file, resolve_plan, save_plan


@pytest.fixture(scope="module")
def graph():
    g = GraphBuilder(input=(8, 8, 4))
    x = g.relu(g.conv(g.input, 8, 3, pad=1, name="conv1"), name="relu1")
    return g.build(g.linear(g.global_avg_pool(x, name="mean"), 6, name="fc"))


def parallel(**fields):
    return check(ParallelConfig, fields, "test")


def test_samples_and_space_take_the_slowest_axes():
    grid = Grid((2, 2, 3))
    assert assign("a", {"N": 3, "F": 2, "H": 2}, grid) == {"N": (2,), "H": (1,), "F": (0,)}
    assert assign("a", {"N": 6}, grid) == {"N": (2, 1)}
    assert assign("a", {"F": [2, 0], "N": 2}, grid) == {"F": (2, 0), "N": (1,)}
    assert assign("a", {"C": 1}, grid) == {"C": ()}


@pytest.mark.parametrize(
    ("wanted", "procs", "message"),
    [
        ({"N": 2}, 1, "at: N 2 is 2 ways, which do not divide the 1 process of this job. Start a multiple of 2, or"),
        ({"N": 2, "F": 4}, 4, "at: N 2 x F 4 = 8 ways, which do not divide the 4 processes of this job"),
        ({"H": 3}, 4, "at: H 3 is 3 ways, which do not divide the 4 processes"),
        ({"N": 0}, 4, "at: got 0 ways of N, expected at least 1"),
        ({"N": [0, 2]}, 4, "at.N: there is no grid axis 2; 4 processes have 2 axes, numbered from 0"),
        ({"N": [0], "H": [0, 1]}, 4, "at: axis 0 splits both N and H; give each axis to one loop"),
    ],
)
def test_ways_that_cannot_be(wanted, procs, message):
    with pytest.raises(PlanError) as e:
        assign("at", wanted, Grid.of(procs))
    assert message in str(e.value)


def test_ways_that_the_axes_of_a_plan_cannot_make():
    with pytest.raises(
        PlanError, match=r"N: got 2 ways, expected a product of the sizes of the grid axes that are left \(4\)"
    ):
        assign("at", {"N": 2}, Grid((4,)))


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
