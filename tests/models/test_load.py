"""The four ways to describe a network in a run file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lbpar.config.run_file import parse_run
from lbpar.errors import ConfigError, GraphError
from lbpar.graph.graph import Graph
from lbpar.models.load import load_graph
from lbpar.models.registry import build_model

REST = "train: {batch: 4, epochs: 1, loss: cross_entropy, optimizer: {name: sgd, lr: 0.1}}"


def load(model: str) -> Graph:
    return load_graph(parse_run(f"model: {model}\n{REST}", allow_code=True).model)


def test_by_name() -> None:
    got = load("{name: resnet18, classes: 10, input: [32, 32, 3], stem: cifar, width: 0.5}")
    assert got == build_model("resnet18", classes=10, input=(32, 32, 3), stem="cifar", width=0.5)
    with pytest.raises(ConfigError, match="did you mean 'width'"):
        load("{name: resnet18, widht: 0.5}")


def test_inline() -> None:
    graph = load(
        "{input: [4, 4, 1], layers: [{op: conv, filters: 2, kernel: 3}, {op: flatten}, {op: linear, features: 3}]}"
    )
    assert graph.shapes(5)[graph.output] == (5, 3)


def test_from_a_python_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "nets_for_load_test.py").write_text(
        "from lbpar.graph.builder import GraphBuilder\n"
        "from lbpar.models.python_model import model\n"
        "@model\n"
        "def net(classes, input):\n"
        "    g = GraphBuilder(input)\n"
        "    return g.build(g.linear(g.flatten(g.input), classes))\n"
    )
    graph = load('{python: "nets_for_load_test:net", classes: 6, input: [2, 2, 3]}')
    assert graph.parameter_count == 6 * 12 + 6


def test_onnx_file_that_is_missing() -> None:
    pytest.importorskip("onnx")
    with pytest.raises(GraphError, match="nowhere.onnx: No such file"):
        load("{onnx: nowhere.onnx}")
