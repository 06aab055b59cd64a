"""OptCNN: folding to two nodes, the strategy for VGG-16, volumes, and edge volumes by counting elements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lbpar.errors import ConfigError
from lbpar.graph.builder import GraphBuilder
from lbpar.papers import optcnn, published
from lbpar.papers.optcnn_models import MODELS, from_graph, optcnn_graph
from lbpar.papers.reduction import fold
from lbpar.papers.searches import optcnn_search


@pytest.mark.parametrize("name", sorted(MODELS))
def test_networks_fold_to_two_nodes(name):
    graph = optcnn_graph(name)
    remaining, gone = fold(list(graph.layers), [e[:2] for e in graph.edges])
    assert len(remaining) == 2 and remaining[-1] == "softmax"
    assert len(gone) == len(graph.layers) - 2


def test_vgg16_strategy_on_four_devices():
    graph, tables, found = optcnn_search("vgg16", 4)
    for name in graph.layers:
        expected = published.OPTCNN_VGG16[name.partition("_")[0]]
        assert tables.degrees[name][found.choice[name]] == expected, name


def test_layer_counts():
    assert len(optcnn_graph("alexnet").layers) == 11 + 1  # and the loss
    assert len(optcnn_graph("vgg16").layers) == 21 + 1


@pytest.mark.parametrize("name", sorted(published.OPTCNN_DATA_VOLUME))
def test_data_parallel_volumes(name):
    graph = optcnn_graph(name)
    for procs, gib in published.OPTCNN_DATA_VOLUME[name].items():
        ours = optcnn.total_bytes(graph.layers.values(), procs) / 2**30
        assert ours == pytest.approx(gib, rel=0.02 if gib < 9 else 0.035)
    tables = optcnn.build_tables(graph, 64, 2) if name == "vgg16" else None
    if tables is not None:  # the strategy's volume is the closed form: cutting along samples moves no activation
        choice = tables.choose(optcnn.uniform(tables, "n"))
        assert tables.bytes.total(choice) == pytest.approx(optcnn.total_bytes(graph.layers.values(), 2))


def test_optimum_beats_the_named_strategies():
    for name in ("alexnet", "vgg16"):
        graph, tables, found = optcnn_search(name, 4)
        for strategy in (
            optcnn.uniform(tables, "n"),
            optcnn.uniform(tables, "cn"),
            optcnn.one_weird_trick(graph, tables),
        ):
            assert tables.seconds.total(tables.choose(strategy)) > found.total


def owned(layer, batch, degrees):
    """Elements of the output on each device, as sets."""
    cuts = [np.array_split(np.arange(e), d) for e, d in zip((batch, *layer.output), degrees, strict=True)]
    return [set(itertools.product(*(c.tolist() for c in block))) for block in itertools.product(*cuts)]


def wanted(layer, number, elements):
    """Input elements that the output elements of one device read, by the definition of the layer."""
    h, w, c = layer.inputs[number]
    offset = sum(s[2] for s in layer.inputs[:number])
    out = set()
    for n, i, j, k in elements:
        if layer.kind in ("fc", "softmax"):
            out |= set(itertools.product([n], range(h), range(w), range(c)))
        elif layer.kind == "concat":
            out |= {(n, i, j, k - offset)} if offset <= k < offset + c else set()
        else:
            rows = [i * layer.stride - layer.pad[0] + r for r in range(layer.kernel[0])]
            columns = [j * layer.stride - layer.pad[1] + s for s in range(layer.kernel[1])]
            channels = range(c) if layer.kind == "conv" else [k]
            rows, columns = [r for r in rows if 0 <= r < h], [s for s in columns if 0 <= s < w]
            out |= set(itertools.product([n], rows, columns, channels))
    return out


def test_edge_volumes_count_the_elements_that_are_missing():
    g = GraphBuilder((8, 8, 3))
    a = g.conv(g.input, 4, 3, 1, 1)
    b, p = g.conv(a, 2, 3, 2, 1), g.max_pool(a, 3, 2, 1)
    graph = from_graph(g.build(g.linear(g.flatten(g.concat([b, p])), 4)))
    procs, batch = 4, 2
    tables = optcnn.build_tables(graph, batch, procs)
    checked = 0
    for producer, consumer, number in graph.edges:
        u, v = graph.layers[producer], graph.layers[consumer]
        for i, du in enumerate(tables.degrees[producer]):
            have = owned(u, batch, du) + [set()] * procs
            for j, dv in list(enumerate(tables.degrees[consumer]))[::2]:
                need = [wanted(v, number, e) for e in owned(v, batch, dv)]
                missing = sum(len(w - have[d]) for d, w in enumerate(need))
                assert tables.bytes.edges[producer, consumer][i, j] == 2 * 4 * missing, (producer, consumer, du, dv)
                checked += 1
    assert checked > 200


def test_blocks_are_equal_and_devices_may_stay_idle():
    graph = optcnn_graph("vgg16")
    degrees = optcnn.configurations(graph.layers["conv5_1"], 128, 4)
    assert (1, 4, 1, 1) not in degrees and (1, 2, 2, 1) in degrees and (1, 1, 1, 1) in degrees
    assert (1, 2, 2, 1) in optcnn.configurations(graph.layers["pool5"], 128, 4)
    assert (3, 1, 1, 1) not in degrees


def test_bad_arguments_are_named():
    with pytest.raises(ConfigError, match="alexnet, inception-v3, resnet50, vgg16"):
        optcnn_graph("lenet")
    with pytest.raises(ConfigError, match="batch 0 on 4"):
        optcnn.build_tables(optcnn_graph("alexnet"), 0, 4)
    _, tables, _ = optcnn_search("alexnet", 2)
    with pytest.raises(ConfigError, match=r"fc6 cannot be cut by \(n, h, w, c\) = \(1, 2, 1, 1\)"):
        tables.choose({"fc6": (1, 2, 1, 1)})
