"""Inline layer lists against the same network built by hand."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from lbpar.config.layers import LAYERS
from lbpar.config.model import InlineModel
from lbpar.config.report import check
from lbpar.errors import ConfigError, GraphError
from lbpar.graph.builder import OPS, GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.models.inline import inline_graph


def build(input: list[int], *layers: dict[str, Any]) -> Graph:
    return inline_graph(check(InlineModel, {"input": input, "layers": list(layers)}, "run.yaml"))


def test_every_op_and_field() -> None:
    got = build(
        [8, 8, 4],
        {"name": "a", "op": "conv", "filters": 8, "kernel": [3, 5], "stride": [1, 2], "pad": [[0, 2], 2], "groups": 2},
        {"op": "norm", "eps": 1e-3, "momentum": 0.2, "affine": False, "stats": "sample"},
        {"op": "relu"},
        {"op": "conv", "filters": 8, "kernel": 3, "pad": 2, "dilation": 2, "bias": False},
        {"name": "act", "op": "leaky_relu", "slope": 0.2},
        {"name": "gate", "op": "sigmoid", "from": "relu1"},
        {"op": "multiply", "from": ["act", "gate"]},
        {"op": "add", "from": ["multiply1", "norm1"]},
        {"name": "both", "op": "concat", "from": ["add1", "a"]},
        {"op": "max_pool", "kernel": 3, "stride": 2, "pad": 1, "dilation": 1, "ceil_mode": True},
        {"op": "upsample", "factor": [1, 2]},
        {"op": "avg_pool", "kernel": 2, "stride": 1, "pad": 1, "ceil_mode": False, "count_include_pad": False},
        {"op": "conv_transpose", "filters": 6, "kernel": 2, "stride": 2, "output_pad": 1},
        {"name": "flat", "op": "flatten"},
        {"op": "dropout", "rate": 0.1},
        {"name": "mean", "op": "global_avg_pool", "from": "conv_transpose1"},
        {"op": "concat", "from": ["dropout1", "mean"]},
        {"op": "linear", "features": 3, "bias": False},
    )
    g = GraphBuilder((8, 8, 4))
    a = g.conv(g.input, 8, (3, 5), (1, 2), ((0, 2), 2), groups=2, name="a")
    n = g.norm(a, 1e-3, 0.2, False, "sample", name="norm1")
    r = g.relu(n, name="relu1")
    x = g.leaky_relu(g.conv(r, 8, 3, pad=2, dilation=2, bias=False, name="conv2"), 0.2, name="act")
    x = g.multiply([x, g.sigmoid(r, name="gate")], name="multiply1")
    x = g.concat([g.add([x, n], name="add1"), a], name="both")
    x = g.upsample(g.max_pool(x, 3, 2, 1, ceil_mode=True, name="max_pool1"), (1, 2), name="upsample1")
    x = g.avg_pool(x, 2, 1, 1, count_include_pad=False, name="avg_pool1")
    t = g.conv_transpose(x, 6, 2, 2, output_pad=1, name="conv_transpose1")
    x = g.dropout(g.flatten(t, name="flat"), 0.1, name="dropout1")
    x = g.concat([x, g.global_avg_pool(t, name="mean")], name="concat2")
    assert got == g.build(g.linear(x, 3, False, name="linear1"))


def test_every_op_of_the_run_file_has_a_builder_method() -> None:
    assert set(LAYERS.sections) == set(OPS)
    for kind, layer in LAYERS.sections.items():
        assert OPS[kind].options is layer and OPS[kind].kind == kind
        given = inspect.signature(getattr(GraphBuilder, kind)).parameters
        assert list(given) == ["self", "xs" if layer.joins else "x", *layer.own(), "name", "share"]
        assert all(n in (getattr(GraphBuilder, kind).__doc__ or "") for n in layer.own())


def test_an_option_is_checked_alike_in_a_run_file_and_in_the_builder() -> None:
    """As it was not for `slope: 0`."""
    graph = build([4, 4, 2], {"op": "leaky_relu", "slope": 0}, {"op": "norm", "momentum": 1}, {"op": "flatten"})
    g = GraphBuilder((4, 4, 2))
    assert g.build(g.flatten(g.norm(g.leaky_relu(g.input, 0.0), momentum=1.0))) == graph
    with pytest.raises(TypeError, match=r"leaky_relu\(\) takes 1 options but 2 were given"):
        g.leaky_relu(g.input, 0.1, 0.2)
    with pytest.raises(GraphError, match="a: slop: unknown field .*did you mean 'slope'"):
        g.leaky_relu(g.input, slop=0.1, name="a")
    with pytest.raises(GraphError, match="leaky: op: got 'leaky'; did you mean 'leaky_relu'"):
        g.layer("leaky", g.input)


def test_a_layer_that_does_not_fit_is_named() -> None:
    with pytest.raises(GraphError, match=r"model.layers\[1\]: fc: linear: got an input of shape"):
        build([8, 8, 3], {"op": "relu"}, {"name": "fc", "op": "linear", "features": 2})


def test_a_layer_that_nothing_reads_is_named() -> None:
    with pytest.raises(GraphError, match=r"model.layers\[0\] \(lost\): no layer reads"):
        build([8], {"name": "lost", "op": "relu"}, {"op": "linear", "features": 2, "from": "input"})


def test_wrong_layers_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'conv'"):
        build([8, 8, 3], {"op": "conf", "filters": 2, "kernel": 1})
    with pytest.raises(ConfigError, match="did you mean 'relu1'"):
        build([8, 8, 3], {"op": "relu"}, {"op": "relu", "from": "relu_1"})


def test_layers_share_by_name() -> None:
    conv = {"op": "conv", "filters": 3, "kernel": 1}
    graph = build([8, 8, 3], conv, {**conv, "share": "conv1"}, {**conv, "share": "conv1", "stride": 2})
    assert [n.share for n in graph.ops] == [None, "conv1", "conv1"] and set(graph.params()) == {
        "conv1.weight",
        "conv1.bias",
    }
    with pytest.raises(
        GraphError, match=r"model.layers\[1\]: conv2: share: 'conv' is not an earlier node. did you mean 'conv1'"
    ):
        build([8, 8, 3], conv, {**conv, "share": "conv"})
    with pytest.raises(
        GraphError, match=r"model.layers\[2\]: conv3: share: got 'conv2', which has the parameters of 'conv1'"
    ):
        build([8, 8, 3], conv, {**conv, "share": "conv1"}, {**conv, "share": "conv2"})
