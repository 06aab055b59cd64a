"""Statistics of all norms of a network at once: what changes, what does not, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lbpar.config.run_file import parse_run
from lbpar.errors import ConfigError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.norm_stats import norms, with_norm_stats
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.models.load import load_graph
from lbpar.models.registry import build_model

INLINE = """{input: [4, 4, 1], layers: [{op: conv, filters: 2, kernel: 3}, {op: norm, eps: 0.01, stats: sample}, {op: norm},
 {op: global_avg_pool}]}"""


def loaded(model: str, parallel: str) -> Graph:
    config = parse_run(f"model: {model}\ntrain: {{batch: 2}}\nparallel: {parallel}", allow_code=True)
    return load_graph(config.model, config.parallel.norm)


def stats(graph: Graph) -> list[str]:
    return [n.op.stats for n in norms(graph)]  # type: ignore[attr-defined]


def test_every_norm_and_nothing_else_changes() -> None:
    graph = build_model("resnet18", input=(32, 32, 3)).with_loss(CrossEntropy())
    local = with_norm_stats(graph, "local")
    assert stats(graph) == ["global"] * 20 and stats(local) == ["local"] * 20
    assert [n for n in local.nodes if n not in norms(local)] == [n for n in graph.nodes if n not in norms(graph)]
    assert (local.params(), local.output, local.shapes(3)) == (graph.params(), graph.output, graph.shapes(3))
    assert local != graph and with_norm_stats(local, "global") == graph and with_norm_stats(graph, None) is graph


@pytest.mark.parametrize("choice", ["global", "sample", "local"])
def test_the_run_file_wins_over_the_layers(choice: str) -> None:
    graph = loaded(INLINE, f"{{norm: {choice}}}")
    assert stats(graph) == [choice, choice]
    assert norms(graph)[0].op.eps == 0.01  # type: ignore[attr-defined]


def test_without_the_field_the_network_decides() -> None:
    assert stats(loaded(INLINE, "{}")) == ["sample", "global"]
    assert stats(loaded("{name: resnet18}", "{strategy: data}")) == ["global"] * 20


def test_networks_by_name_from_python_and_from_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stats(loaded("{name: densenet121}", "{norm: local}")) == ["local"] * 121
    (tmp_path / "net_for_norm_test.py").write_text(
        "from lbpar.graph.builder import GraphBuilder\n"
        "from lbpar.models.python_model import model\n"
        "@model\n"
        "def net():\n"
        "    g = GraphBuilder((4, 4, 3))\n"
        "    return g.build(g.norm(g.input))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert stats(loaded('{python: "net_for_norm_test:net"}', "{norm: sample}")) == ["sample"]
    pytest.importorskip("onnx")
    from tests.models.onnx_files import Net

    net = Net(("n", 3, 6, 5))
    net.save(net.norm("x", 3), tmp_path).rename("net.onnx")
    assert stats(loaded("{onnx: net.onnx}", "{norm: local}")) == ["local"]


def test_a_network_without_norms_and_a_wrong_word_are_refused() -> None:
    with pytest.raises(ConfigError, match="parallel.norm: got 'global', but lenet has no norm; leave the field out"):
        loaded("{name: lenet}", "{norm: global}")
    g = GraphBuilder((3,))
    assert norms(g.build(g.relu(g.input))) == ()
    with pytest.raises(ConfigError, match="parallel.norm: got 'locl', did you mean 'local'"):
        loaded("{name: resnet18}", "{norm: locl}")
