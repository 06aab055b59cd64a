"""Networks from a user's function: found in the current directory, and every way it can fail."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from lbpar import api
from lbpar.config.run_file import dump
from lbpar.errors import ConfigError, GraphError, LbparError
from lbpar.graph.graph import Graph
from lbpar.models.python_model import python_graph
from lbpar.plan.command import main as plan
from lbpar.plan.command import named_machine
from lbpar.train.command import main as train
from lbpar.verify.command import main as verify

SOURCE = """
from lbpar.graph.builder import GraphBuilder
from lbpar.models.python_model import model

LIMIT = 3

@model
def net(*, classes=10, input=(8, 8, 3), depth: int = 1):
    g = GraphBuilder(input, name="mine")
    x = g.input
    for _ in range(depth):
        x = g.relu(g.conv(x, 4, 3, pad=1))
    return g.build(g.linear(g.global_avg_pool(x), classes))

@model
def needs(size):
    return net(classes=size)

@model
def anything(**options):
    return net(**options)

@model
def nothing():
    pass

@model
def crashes():
    return 1 / 0

@model
def misfit():
    g = GraphBuilder((8, 8, 3))
    return g.build(g.linear(g.input, 2))

class Zoo:
    @staticmethod
    @model
    def net():
        return net(classes=5)

def unmarked():
    return net(classes=2)
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
        ("my_nets_.small", {}, ConfigError, "expected file.py:function or package.module:function"),
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
        ("my_nets_.small:unmarked", {}, ConfigError, "this function is not marked as a model, .*@model"),
        ("os:system", {"command": "touch harm"}, ConfigError, "os:system: this function is not marked as a model"),
        ("nowhere.py:net", {}, ConfigError, "there is no file nowhere.py beside the run file, in "),
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
    assert not Path("harm").exists()


def test_a_file_beside_the_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any function of it, from any current directory, with its neighbours, and even if a module is called the same."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "os.py").write_text(
        SOURCE + "\nfrom beside_ import CLASSES\ndef other():\n    return net(classes=CLASSES)\n"
    )
    (folder / "beside_.py").write_text("CLASSES = 3\n")
    assert python_graph("os.py:unmarked", folder).shapes(1)["linear1"] == (1, 2)
    assert python_graph("os.py:other", folder).shapes(1)["linear1"] == (1, 3)


def test_a_function_itself() -> None:
    def build(classes: int) -> Graph:
        return python_graph("my_nets_.small:net", classes=classes)

    config = api.load_run({"model": {"python": build, "classes": 4}, "train": {"batch": 2}})
    assert api.build_graph(config).shapes(1)["linear1"] == (1, 4)
    assert "<locals>.build" in dump(config)


RUN = """
model: {python: "os:system", command: "touch harm"}
train: {batch: 4, max_steps: 1}
run: {out: out}
"""


@pytest.mark.parametrize(
    "main",
    [
        train,
        verify,
        partial(plan, find=named_machine),
        lambda a: plan([*a, "--batch", "4", "--cost", "gholami", "--grid", "1x2"]),
    ],
)
def test_a_run_file_runs_code_only_if_that_is_allowed(main: Callable[[list[str]], object]) -> None:
    Path("run.yaml").write_text(RUN)
    args = ["--config", "run.yaml", *(["--procs", "2"] if main is not train else [])]
    with pytest.raises(
        ConfigError, match=r"run.yaml: model.python: got 'os:system', a Python function, .*--allow-code"
    ):
        main(args)
    with pytest.raises(ConfigError, match="os:system: this function is not marked"):
        main([*args, "--allow-code"])
    with pytest.raises(ConfigError, match="allow_code=True"):
        api.load_run("run.yaml")
    assert not Path("harm").exists() and not Path("out").exists()


def test_a_run_directory_keeps_the_file() -> None:
    Path("nets.py").write_text(SOURCE)
    run = {"model": {"python": "nets.py:net"}, "train": {"batch": 4, "max_steps": 1}, "data": {"samples": 4}}
    config = api.load_run({**run, "run": {"out": "out", "progress": "none"}}, allow_code=True)
    api.train(config, write=True).close()
    assert Path("out/nets.py").read_text() == SOURCE
    assert api.build_graph(api.load_run("out/run.yaml", allow_code=True)) == api.build_graph(config)
