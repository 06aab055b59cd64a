"""The memory that a plan is said to need is what training takes: measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lbpar.engine.registry import get_engine
from lbpar.errors import EngineError

pytest.importorskip("lbpar.engine.onednn.engine")

CODE = """
import json, sys
from lbpar.config.run_file import parse_run
from lbpar.cost.memory import memory
from lbpar.train.setup import build_graph, build_plan, connect_to
from lbpar.train.trainer import Trainer
import lbpar.engine.native.passes, lbpar.engine.onednn.engine

def resident(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))

config = parse_run(sys.argv[1])
base = resident("VmRSS")
graph = build_graph(config)
plan = build_plan(config, graph, 1)
trainer = Trainer(config, graph, plan, connect_to(plan.grid))
list(trainer.train())
program = trainer.worker.executor(config.train.batch).program
said = memory(program, config.engine.dtype, "momentum", config.data.prefetch, copies=trainer.worker.engine.volume_copies).peak
print(json.dumps([said, resident("VmHWM") - base]))
"""
UNET = """
model: {name: unet3d, width: 0.125, input: [64, 72, 64, 1], classes: 3}
data: {train: synthetic, samples: 6}
train: {batch: 1, epochs: 1, loss: dice, optimizer: {name: sgd, lr: 0.001, momentum: 0.9}}
engine: {name: onednn, threads: 1}
"""
AGAIN = UNET + "parallel: {recompute: 6}\n"
BFLOAT16 = UNET.replace("threads: 1", "threads: 1, dtype: bfloat16")
CONV = """
model: {input: [128, 128, 128, 1], layers: [{op: conv, filters: 3, kernel: 3, pad: 1}]}
data: {train: synthetic, samples: 6, prefetch: 0}
train: {batch: 1, epochs: 1, loss: dice, optimizer: {name: sgd, lr: 0.001, momentum: 0.9}}
engine: {name: onednn, threads: 1}
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux' /proc")
@pytest.mark.parametrize("instructions", ["DEFAULT", "AVX2"])
@pytest.mark.parametrize("text", [UNET, AGAIN, CONV, BFLOAT16], ids=["unet3d", "computed again", "conv", "bfloat16"])
def test_training_takes_the_memory_that_was_said(text: str, instructions: str) -> None:
    if text == BFLOAT16 and instructions == "AVX2":
        pytest.skip("AVX2 has no instructions for it")
    if text == BFLOAT16:
        try:
            get_engine("onednn", "bfloat16", 1)
        except EngineError as error:
            pytest.skip(str(error))
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": instructions}
    command = [sys.executable, "-c", CODE, text]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said, taken = json.loads(done.stdout.splitlines()[-1])
    most = max(1.12 * taken, taken + (20 << 20))  # libraries count as 56 MiB, and may be 40
    assert 0.98 * taken <= said <= most, f"said {said >> 20} MiB, taken {taken >> 20} MiB"
