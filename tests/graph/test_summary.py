"""The summary table against published counts."""

from __future__ import annotations

import pytest

from lbpar.graph.builder import GraphBuilder
from lbpar.graph.summary import summary
from lbpar.models.registry import build_model

# Multiply-adds of convolutions and linear layers in units of 10**9, as torchvision publishes them.
PUBLISHED = {
    "alexnet": 0.71,
    "vgg16": 15.47,
    "resnet18": 1.81,
    "resnet50": 4.09,
    "resnet152": 11.51,
    "wide_resnet50_2": 11.40,
    "inception_v3": 5.71,
    "densenet121": 2.83,
}


def test_rows_of_a_small_network() -> None:
    g = GraphBuilder((8, 6, 3))
    x = g.relu(g.norm(g.conv(g.input, 4, 3, pad=1, stride=2, name="a"), name="b"), name="c")
    rows = summary(g.build(g.linear(g.flatten(x, name="d"), 5, name="e")), batch=2)
    assert [tuple(r.values())[:4] for r in rows] == [
        ("a", "conv", (2, 4, 3, 4), 4 * 27 + 4),
        ("b", "norm", (2, 4, 3, 4), 8),
        ("c", "relu", (2, 4, 3, 4), 0),
        ("d", "flatten", (2, 48), 0),
        ("e", "linear", (2, 5), 245),
    ]
    assert rows[0]["flops"] == 2 * (2 * 4 * 3 * 4) * 27
    assert rows[4]["flops"] == 2 * 2 * 48 * 5


@pytest.mark.parametrize("name", PUBLISHED)
def test_flops_are_the_published_ones(name: str) -> None:
    graph = build_model(name)
    rows = summary(graph)
    assert sum(r["parameters"] for r in rows) == graph.parameter_count
    macs = sum(r["flops"] for r in rows if r["op"] in ("conv", "linear")) / 2e9
    assert macs == pytest.approx(PUBLISHED[name], abs=0.0051)
