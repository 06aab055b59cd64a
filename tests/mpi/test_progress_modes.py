"""However messages progress, training is the same."""

from __future__ import annotations

import pytest

from lbpar import api
from lbpar.train.setup import build_graph, build_plan
from lbpar.train.trainer import Trainer
from tests.util.mpi import collective_assert

RUN = {
    "model": {
        "input": [8, 8, 2],
        "layers": [
            {"op": "conv", "filters": 6, "kernel": 3, "pad": 1, "name": "c1"},
            {"op": "norm"},
            {"op": "relu"},
            {"op": "conv", "filters": 4, "kernel": 3, "pad": 1, "name": "c2"},
            {"op": "relu"},
            {"op": "global_avg_pool"},
            {"op": "linear", "features": 3},
        ],
    },
    "data": {"train": "synthetic", "samples": 24},
    "train": {"batch": 8, "epochs": 2},
    "engine": {"name": "numpy", "dtype": "float64"},
}


@pytest.mark.mpi
@pytest.mark.parametrize("strategy", ["data", "spatial", "filter"])
def test_progress_changes_no_result(strategy: str) -> None:
    from lbpar.transport.launch import connect

    losses = {}
    for progress in ("block", "test", "thread"):
        config = api.load_run(RUN, [f"engine.progress={progress}", f"parallel.strategy={strategy}"])
        transport = connect()
        graph = build_graph(config)
        trainer = Trainer(config, graph, build_plan(config, graph, transport.size), transport)
        losses[progress] = [record["loss"] for record in trainer.train()]
        with collective_assert(transport):
            assert losses[progress] == pytest.approx(losses["block"], rel=1e-12)  # sums may be made in another order
        transport.close()
