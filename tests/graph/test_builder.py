"""What the graph builder takes, and what it says of what it does not take."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.errors import GraphError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.summary import summary


@pytest.fixture
def g():
    return GraphBuilder(input=(8, 8, 4))


@pytest.mark.parametrize("shape", [(), (0, 8, 1), (8, 8.5, 1), (2, 2, 2, 2, 2), "abc", (True, 8, 1)])
def test_shapes_of_samples_that_cannot_be(shape):
    with pytest.raises(GraphError, match="input: got"):
        GraphBuilder(input=shape)


@pytest.mark.parametrize(
    ("op", "args", "message"),
    [
        ("conv", {"filters": 0, "kernel": 3}, "n: filters: got 0, expected at least 1"),
        ("conv", {"filters": 2.0, "kernel": 3}, "n: filters: got 2.0"),
        ("conv", {"filters": True, "kernel": 3}, "n: filters: got True"),
        ("conv", {"filters": 4, "kernel": 0}, "n: kernel: got 0"),
        (
            "conv",
            {"filters": 4, "kernel": [3, 3, 3]},
            r"n: kernel: got \[3, 3, 3\], expected one entry for all spatial dimensions, or 2",
        ),
        ("conv", {"filters": 4, "kernel": "33"}, "n: kernel: got '33'"),
        ("conv", {"filters": 4, "kernel": 3, "stride": 0}, "n: stride: got 0"),
        ("conv", {"filters": 4, "kernel": 3, "dilation": [1, 0]}, "n: dilation: got .1, 0."),
        ("conv", {"filters": 4, "kernel": 3, "pad": -1}, "n: pad: got -1, expected a whole number of at least 0"),
        ("conv", {"filters": 4, "kernel": 3, "pad": [1]}, r"n: pad: got \[1\]"),
        ("conv", {"filters": 4, "kernel": 3, "pad": [[1, 1, 1], 0]}, r"n: pad: got \[\[1, 1, 1\], 0\]"),
        ("conv", {"filters": 4, "kernel": 3, "groups": 0}, "n: groups: got 0"),
        ("conv", {"filters": 4, "kernel": 3, "groups": 3}, "n: .*groups=3 must divide both"),
        ("conv", {"filters": 4, "kernel": 3, "init": "glort"}, "n: init: got 'glort', did you mean 'glorot'?"),
        ("conv", {"filters": 4, "kernel": 9}, "n: .*kernel 9 .* is larger"),
        (
            "conv_transpose",
            {"filters": 4, "kernel": 3, "output_pad": 1},
            r"n: output_pad: got \[1, 1\], expected less than",
        ),
        ("conv_transpose", {"filters": 4, "kernel": 3, "output_pad": -1}, "n: output_pad: got -1"),
        ("max_pool", {"kernel": 3, "stride": 0}, "n: stride: got 0"),
        ("avg_pool", {"kernel": 0}, "n: kernel: got 0"),
        ("upsample", {"factor": 0}, "n: factor: got 0"),
        ("norm", {"stats": "globl"}, "n: stats: got 'globl', did you mean 'global'?"),
        ("norm", {"eps": 0.0}, "n: eps: got 0.0"),
        ("norm", {"eps": float("nan")}, "n: eps: got nan"),
        ("norm", {"momentum": 1.5}, "n: momentum: got 1.5, expected at most 1"),
        ("leaky_relu", {"slope": -1.0}, "n: slope: got -1.0"),
        ("dropout", {"rate": 1.0}, "n: rate: got 1.0"),
        ("linear", {"features": 0}, "n: features: got 0"),
        ("linear", {"features": 3}, "n: .*put a flatten or global_avg_pool before it"),
    ],
)
def test_fields_that_cannot_be(g, op, args, message):
    with pytest.raises(GraphError, match=message):
        getattr(g, op)(g.input, **args, name="n")
    with pytest.raises(GraphError):  # also where the node has no name yet
        getattr(g, op)(g.input, **args)


def test_nodes_that_are_not_there(g):
    x = g.conv(g.input, 4, 3, name="conv")
    for call in (
        lambda: g.relu("cnv"),
        lambda: g.conv("cnv", 4, 3),
        lambda: g.max_pool("cnv", 2),
        lambda: g.upsample("cnv"),
        lambda: g.add([x, "cnv"]),
        lambda: g.shape("cnv"),
        lambda: g.build("cnv"),
    ):
        with pytest.raises(GraphError, match="'cnv' is not an earlier node. did you mean 'conv'?"):
            call()
    with pytest.raises(GraphError, match="3 is not an earlier node"):
        g.relu(3)
    with pytest.raises(GraphError, match="add: got 'conv', expected a list of nodes"):
        g.add(x)
    with pytest.raises(GraphError, match="conv: two nodes have this name"):
        g.relu(x, name="conv")
    with pytest.raises(GraphError, match="its input 'mean' has shape .* expected spatial dimensions"):
        g.max_pool(g.global_avg_pool(x, name="mean"), 2)
    for empty in (g.add, g.multiply, g.concat):
        with pytest.raises(GraphError, match="got no input"):
            empty([])


def test_a_failed_call_adds_nothing(g):
    with pytest.raises(GraphError):
        g.conv(g.input, 4, 9, name="conv")
    g.conv(g.input, 4, 3, name="conv")
    assert [n.name for n in g.build("conv").ops] == ["conv"]


def test_numpy_numbers_are_numbers():
    g = GraphBuilder(input=np.array([8, 8, 4]))
    x = g.conv(
        g.input, np.int64(6), np.int32(3), stride=np.array([1, 2]), pad=np.array([[1, 1], [0, 1]]), groups=np.int8(2)
    )
    assert g.shape(x) == (1, 8, 4, 6)
    x = g.upsample(x, np.int64(2))
    graph = g.build(g.linear(g.flatten(x), np.int64(5)))
    assert graph.shapes(2)[graph.output] == (2, 5)
    assert all(type(e) is int for shape in graph.shapes(2).values() for e in shape)


def test_numbered_names_step_aside(g):
    x = g.relu(g.input, name="relu2")
    assert g.relu(x) == "relu3"
    assert g.relu(x) == "relu4"


def test_nodes_that_the_output_does_not_need_are_dropped(g):
    x = g.conv(g.input, 4, 3, name="used")
    g.relu(x, name="unused")
    graph = g.build(x)
    assert [n.name for n in graph.nodes] == ["input", "used"]


def test_equal_graphs_are_equal_and_hash_alike():
    def make(filters):
        g = GraphBuilder(input=(8, 8, 4))
        return g.build(g.conv(g.input, filters, 3, name="conv"))

    a, b, c = make(4), make(4), make(5)
    a.shapes(3)  # tables that one of them has already made do not count
    assert a == b
    assert hash(a) == hash(b)
    assert a != c
    assert len({a, b, c}) == 2


def test_shared_parameters_are_counted_and_listed_once() -> None:
    g = GraphBuilder(input=(6, 6, 3))
    x = g.norm(g.conv(g.input, 3, 3, pad=1, name="a"), name="n")
    x = g.norm(g.conv(x, 3, 3, stride=2, name="b", share="a"), name="m", share="n")
    graph = g.build(g.conv_transpose(x, 3, 3, name="c", share="a"))
    assert set(graph.params()) == {"a.weight", "a.bias", "n.weight", "n.bias", "n.running_mean", "n.running_var"}
    assert graph.parameter_count == 3 * 27 + 3 + 6 == sum(row["parameters"] for row in summary(graph))
    assert {o: [n.name for n in users] for o, users in graph.shared.items()} == {"a": ["a", "b", "c"], "n": ["n", "m"]}


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            {"filters": 4, "share": "a"},
            r"b: share: 'a' has weight \[3, 3, 3, 3\], bias \[3\], but this layer needs weight \[4, 3, 3, 3\]",
        ),
        (
            {"filters": 3, "bias": False, "share": "a"},
            r"'a' has weight .*, but this layer needs weight \[3, 3, 3, 3\]; ",
        ),
        ({"filters": 3, "share": "aa"}, r"b: share: 'aa' is not an earlier node. did you mean 'a'\?"),
        ({"filters": 3, "share": "c"}, "b: share: got 'c', which has the parameters of 'a' itself; name 'a'"),
        ({"filters": 3, "share": "b"}, "b: share: got its own name, expected an earlier layer"),
        ({"filters": 3, "share": "r"}, "b: share: 'r' has no parameters, but this layer needs weight"),
        ({"filters": 3, "share": 5}, "share: got 5|share: 5 is not an earlier node"),
    ],
)
def test_layers_that_cannot_share_are_refused(layer: dict[str, object], message: str) -> None:
    g = GraphBuilder(input=(6, 6, 3))
    x = g.relu(g.conv(g.input, 3, 3, pad=1, name="a"), name="r")
    x = g.conv(x, 3, 3, pad=1, name="c", share="a")
    with pytest.raises(GraphError, match=message):
        g.layer("conv", x, name="b", **{"kernel": 3, **layer})  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="s: share: got 'a', but this layer has no parameters; leave the field out"):
        g.relu(x, name="s", share="a")


def test_the_first_of_the_layers_that_share_must_be_needed() -> None:
    g = GraphBuilder(input=(6, 6, 3))
    g.conv(g.input, 3, 3, name="a")
    y = g.conv(g.input, 3, 3, name="b", share="a")
    with pytest.raises(GraphError, match="b: share: 'a', whose parameters it has, is not needed for the output"):
        g.build(y)
