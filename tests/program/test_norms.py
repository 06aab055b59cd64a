"""Batches that leave a norm one value per channel are refused, by whoever asks."""

from __future__ import annotations

import pytest

from lbpar.errors import ConfigError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.layout.grid import Grid
from lbpar.program.norms import check_norms
from lbpar.program.plan import Plan


def network(pixels: int, stats: str = "global") -> Graph:
    g = GraphBuilder((pixels, pixels, 3))
    return g.build(g.norm(g.input, stats=stats, name="n"))


def test_values_per_channel_are_samples_times_pixels() -> None:
    check_norms(network(1), Plan(Grid()), 2)
    check_norms(network(2), Plan(Grid()), 1)
    with pytest.raises(ConfigError, match="n: a batch of 1 sample gives it one value per channel .* larger batches"):
        check_norms(network(1), Plan(Grid()), 1)
    with pytest.raises(ConfigError, match="the last batch of an epoch of 1 sample .* data.drop_last: true"):
        check_norms(network(1), Plan(Grid()), 1, last=True)


def test_statistics_of_a_process_are_of_its_own_block() -> None:
    four = Plan(Grid((4,)), {"n": {"N": (0,)}})
    check_norms(network(1), four, 4)  # merged over all processes
    check_norms(network(1, "local"), four, 8)
    with pytest.raises(
        ConfigError, match="n: a batch of 5 samples gives some process one value .* parallel.norm: global"
    ):
        check_norms(network(1, "local"), four, 5)
