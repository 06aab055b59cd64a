"""Networks from a user's function: found in the current directory, and every way it can fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lbpar.errors import ConfigError, GraphError, LbparError
from lbpar.graph.graph import Graph
from lbpar.graph.python_model import python_graph

SOURCE = """
from lbpar.graph.builder import GraphBuilder

LIMIT = 3

def net(*, classes=10, input=(8, 8, 3), depth: int = 1):
    g = GraphBuilder(input, name="mine")
    x = g.input
    for _ in range(depth):
        x = g.relu(g.conv(x, 4, 3, pad=1))
    return g.build(g.linear(g.global_avg_pool(x), classes))

def needs(size):
    return net(classes=size)

def anything(**options):
    return net(**options)

def nothing():
    pass

def crashes():
    return 1 / 0

def misfit():
    g = GraphBuilder((8, 8, 3))
    return g.build(g.linear(g.input, 2))

class Zoo:
    @staticmethod
    def net():
        return net(classes=5)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    (tmp_path / "my_nets_").mkdir()
    (tmp_path / "my_nets_" / "small.py").write_text(SOURCE)
    (tmp_path / "my_nets_" / "broken.py").write_text("import nowhere_to_be_found_\n")
    (tmp_path / "my_nets_" / "raises.py").write_text("x = 1\nraise RuntimeError('boom')\n")
    (tmp_path / "my_nets_" / "syntax.py").write_text("def f(:\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_function_in_the_current_directory() -> None:
    graph = python_graph("my_nets_.small:net", classes=7, input=(4, 4, 1), depth=2)
    assert isinstance(graph, Graph) and graph.name == "mine"
    assert graph.shapes(2)[graph.output] == (2, 7)
    assert [n.op.kind for n in graph.ops].count("conv") == 2
    assert python_graph("my_nets_.small:Zoo.net").shapes(1)["linear1"] == (1, 5)
    assert python_graph("my_nets_.small:anything", depth=3).parameter_count > graph.parameter_count


@pytest.mark.parametrize(
    ("path", "options", "error", "message"),
    [
        ("my_nets_.small", {}, ConfigError, "expected package.module:function"),
        ("my_netz_:net", {}, ConfigError, "there is no module my_netz_; it is looked for in the current directory"),
        ("my_nets_.smal:net", {}, ConfigError, "there is no module my_nets_.smal;"),
        (
            "my_nets_.broken:net",
            {},
            ConfigError,
            r"importing my_nets_.broken failed .*nowhere_to_be_found_.*broken.py:1",
        ),
        ("my_nets_.raises:net", {}, ConfigError, r"RuntimeError: boom \(.*raises.py:2\)"),
        ("my_nets_.syntax:net", {}, ConfigError, "SyntaxError.*line 1"),
        ("my_nets_.small:nett", {}, ConfigError, r"there is no nett in my_nets_.small; did you mean 'net'\?"),
        ("my_nets_.small:LIMIT", {}, ConfigError, "LIMIT is of type int, expected a function"),
        (
            "my_nets_.small:net",
            {"clases": 3},
            ConfigError,
            r"unknown option 'clases'; did you mean 'classes'\? Known: ",
        ),
        ("my_nets_.small:nothing", {"classes": 3}, ConfigError, "takes no options"),
        ("my_nets_.small:needs", {}, ConfigError, "the option 'size' is missing"),
        ("my_nets_.small:nothing", {}, GraphError, "returned NoneType, expected a Graph"),
        ("my_nets_.small:crashes", {}, GraphError, r"ZeroDivisionError: division by zero \(.*small.py:\d+\)"),
        ("my_nets_.small:misfit", {}, GraphError, "my_nets_.small:misfit: linear1: linear: got an input of shape"),
    ],
)
def test_failures_are_explained(path: str, options: dict[str, int], error: type[LbparError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        python_graph(path, **options)
    assert str(caught.value).startswith("model.python: ")
    assert str(caught.value).endswith(".")
