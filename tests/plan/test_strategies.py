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


def test_few_samples_leave_linear_layers_their_filters() -> None:
    assert strategy_plan("spatial", network(), Grid((2, 2)), 2)["fc"] == {"F": (1, 0)}


def test_given_grids_win() -> None:
    plan = strategy_plan("data", network(), Grid((2, 2)), 8, {"conv2": {"F": (0,)}})
    assert plan["conv2"] == {"F": (0,)} and plan["conv1"] == {"N": (1, 0)}
