"""Named strategies: the grids that each gives a small network on 2·2 processes."""

from __future__ import annotations

import pytest

from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.plan.strategies import strategy_plan


def network() -> Graph:
    g = GraphBuilder(input=(16, 16, 8))
    x = g.relu(g.conv(g.input, 16, 3, pad=1, name="conv1"), name="relu1")
    x = g.conv(x, 16, 3, pad=1, name="conv2")
    return g.build(g.linear(g.global_avg_pool(x, name="pool"), 16, name="fc")).with_loss(CrossEntropy())


@pytest.mark.parametrize(
    ("strategy", "layer", "grid"),
    [
        ("data", "conv1", {"N": (1, 0)}),
        ("data", "fc", {"N": (1, 0)}),
        ("spatial", "conv1", {"H": (1,), "W": (0,)}),
        ("spatial", "relu1", {"H": (1,), "W": (0,)}),
        ("spatial", "fc", {"N": (1, 0)}),
        ("slabs", "conv1", {"H": (1, 0)}),
        ("slabs", "relu1", {"H": (1, 0)}),
        ("slabs", "fc", {"N": (1, 0)}),
        ("filter", "conv2", {"F": (1, 0)}),
        ("filter", "relu1", {"C": (1, 0)}),
        ("channel", "conv2", {"C": (1, 0)}),
        ("owt", "conv1", {"N": (1, 0)}),
        ("owt", "fc", {"F": (1, 0)}),
    ],
)
def test_layers_with_weights_take_the_grid_and_others_follow(
    strategy: str, layer: str, grid: dict[str, tuple[int, ...]]
) -> None:
    assert strategy_plan(strategy, network(), Grid((2, 2)), 8)[layer] == grid


def test_stationary_w_swaps_channels_and_filters_from_layer_to_layer() -> None:
    plan = strategy_plan("stationary-w", network(), Grid((2, 2)), 8)
    assert plan["conv1"] == {"C": (1,), "F": (0,)} and plan["conv2"] == {"C": (0,), "F": (1,)}


def test_slabs_are_of_depth_whatever_is_larger_and_leave_too_thin_volumes_their_samples() -> None:
    g = GraphBuilder(input=(8, 32, 32, 1))
    x = g.conv(g.input, 4, 3, pad=1, name="conv1")
    x = g.conv(x, 4, 3, stride=4, pad=1, name="conv2")
    graph = g.build(g.linear(g.global_avg_pool(x), 2)).with_loss(CrossEntropy())
    plan = strategy_plan("slabs", graph, Grid((2, 2)), 8)
    assert plan["conv1"] == {"D": (1, 0)} and plan["conv2"] == {"N": (1, 0)}
    assert strategy_plan("spatial", graph, Grid((2, 2)), 8)["conv1"] == {"H": (1,), "W": (0,)}


@pytest.mark.parametrize("strategy", ["spatial", "slabs"])
def test_what_reads_the_data_is_cut_in_space_too(strategy: str) -> None:
    g = GraphBuilder(input=(32, 16, 16, 1))
    x = g.conv(g.max_pool(g.input, 2, name="half"), 4, 3, pad=1, name="conv1")
    x = g.concat([g.input, g.upsample(x, factor=2)], name="both")  # the data come first, and have no grid
    graph = g.build(g.linear(g.flatten(g.conv(x, 2, 3, pad=1)), 2)).with_loss(CrossEntropy())
    plan = strategy_plan(strategy, graph, Grid((2,)), 1)
    assert plan["half"] == plan["conv1"] == plan["both"] == {"D": (0,)}
    assert strategy_plan("data", graph, Grid((2,)), 2)["both"] == {"N": (0,)}
    g = GraphBuilder(input=(8, 8, 1))
    flat = strategy_plan(
        strategy, g.build(g.linear(g.flatten(g.input, name="flat"), 2)).with_loss(CrossEntropy()), Grid((2, 2)), 8
    )
    assert flat["flat"] == {"N": (1, 0)}


def test_few_samples_leave_linear_layers_their_filters() -> None:
    assert strategy_plan("spatial", network(), Grid((2, 2)), 2)["fc"] == {"F": (1, 0)}


def test_given_grids_win() -> None:
    plan = strategy_plan("data", network(), Grid((2, 2)), 8, {"conv2": {"F": (0,)}})
    assert plan["conv2"] == {"F": (0,)} and plan["conv1"] == {"N": (1, 0)}
