"""The final table: words for grids, and bytes that are the ones really sent."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.program.words import grid_words, layer_words, program_rows, tally
from lbpar.train.setup import build_graph, build_plan
from lbpar.train.trainer import Trainer
from lbpar.transport.virtual import VirtualWorld
from tests.util.training import PLANS, run_file


@pytest.mark.parametrize("kind", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", ["data 3", "spatial 4", "stationary-w 4", "mixed 6"])
def test_the_bytes_of_a_step_are_those_sent(name, kind):
    procs, changes = PLANS[name]
    config = run_file(
        [*changes, "train.max_steps=1", "data.test=null", f"engine={{name: numpy, dtype: {kind}, threads: 1}}"]
    )
    graph = build_graph(config)
    plan = build_plan(config, graph, procs)
    world = VirtualWorld(plan.grid)

    def job(transport):
        trainer = Trainer(config, graph, plan, transport)
        record = trainer.train_epoch()
        program = trainer.worker.program(8)
        types = np.dtype(trainer.engine.dtype), trainer.engine.activations
        told = sum(row["bytes/step"] for row in program_rows(program, transport.rank, *types))
        return told, sum(s.get("bytes", 0) for s in record["steps"].values())

    told, sent = zip(*world.run(job), strict=True)
    assert sum(sent) > 0
    assert told == sent


def test_words():
    config = run_file(PLANS["mixed 6"][1])
    plan = build_plan(config, build_graph(config), 6)
    assert grid_words(plan["conv1"], plan.grid) == "width 2 × filters 3"
    assert grid_words(plan["pool"], plan.grid) == "channels 6"
    config = run_file(["parallel.strategy=data", "parallel.stages=2", "parallel.micro_batches=2"])
    plan = build_plan(config, build_graph(config), 4)
    assert [layer_words(plan, n) for n in ("conv1", "fc")] == ["stage 0: samples 2", "stage 1: samples 2"]
    assert layer_words(plan, "fc", {}) == "stage 1: not split, 2 copies"
    config = run_file()
    assert grid_words({}, build_plan(config, build_graph(config), 1).grid) == "not split"


def test_a_tally_names_each_once_in_order():
    assert tally(["halo(2)", "allreduce(4)", "halo(2)"]) == "2× halo(2), allreduce(4)"
    assert tally([]) == ""
