"""Networks without layers, or without parameters, plan, train, evaluate and predict like others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lbpar import api
from lbpar.cost.machine import find_machine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.ops.losses import LOSSES
from lbpar.plan.choose import choose_plan
from lbpar.plan.explain import explain
from lbpar.transport.base import Transport
from lbpar.transport.virtual import VirtualWorld

Build = Callable[[GraphBuilder], str]

NETWORKS: dict[str, tuple[Build, Callable[[np.ndarray], np.ndarray]]] = {
    "nothing": (lambda g: g.input, lambda x: x),
    "relu": (lambda g: g.relu(g.input), lambda x: np.maximum(x, 0)),
    "dropout": (lambda g: g.dropout(g.input, 0.5), lambda x: x),
    "flatten": (lambda g: g.flatten(g.input), lambda x: x.reshape(len(x), -1)),
    "add": (lambda g: g.add([g.input, g.input]), lambda x: 2 * x),
}


def config(out: Path, loss: str, optimizer: str = "sgd") -> api.RunConfig:
    return api.load_run(
        {
            "model": {"input": [4, 3, 2], "layers": [{"op": "relu"}]},
            "data": {"train": "synthetic", "test": "synthetic", "samples": 6},
            "train": {
                "batch": 4,
                "epochs": 2,
                "loss": loss,
                "optimizer": {"name": optimizer, "lr": 0.1},
                "clip_norm": 1.0,
            },
            "parallel": {"strategy": "data"},
            "engine": {"name": "numpy", "dtype": "float64", "threads": 1},
            "run": {"out": str(out), "progress": "none"},
        }
    )


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
@pytest.mark.parametrize("network", NETWORKS)
def test_everything_works(tmp_path: Path, network: str, loss: str) -> None:
    build, expected = NETWORKS[network]
    g = GraphBuilder((4, 3, 2))
    graph, run = g.build(build(g)).with_loss(LOSSES[loss]()), config(tmp_path / "run", loss)
    x = np.random.default_rng(1).standard_normal((5, 4, 3, 2))
    with api.train(run, graph, write=True) as trained:
        np.testing.assert_array_equal(trained.predict(x), expected(x))
        assert trained.weights() == {} and trained.records[-1]["loss"] > 0
        assert api.evaluate(run, graph=graph, checkpoint="best") == trained.evaluate()
    assert api.verify(run, graph, procs=4, random_plans=2).equal()
    plan = api.make_plan(run, graph, procs=2)
    assert len(api.explain(graph, plan, 4)) == len(graph.ops)
    choice = choose_plan(graph, 4, 4, find_machine("laptop"))
    assert explain(choice, None)["procs"] == 4

    def rank(transport: Transport) -> np.ndarray:
        return api.train(run, graph, plan, transport=transport).predict(x)

    for got in VirtualWorld(plan.grid).run(rank):
        np.testing.assert_array_equal(got, expected(x))


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "lars", "lamb"])
def test_optimizers_without_parameters(tmp_path: Path, optimizer: str) -> None:
    g = GraphBuilder((4, 3, 2))
    graph = g.build(g.relu(g.input)).with_loss(LOSSES["mse"]())
    with api.train(config(tmp_path, "mse", optimizer), graph) as trained:
        assert trained.records[0]["loss"] == pytest.approx(trained.records[1]["loss"])
