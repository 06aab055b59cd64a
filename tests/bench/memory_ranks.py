"""Peak resident memory of a whole training run beside the prediction, split in depth, with activations kept or computed again.

    mpirun -n 2 python tests/bench/memory_ranks.py --size 128,128,128 [--width 0.25] [--dtype bfloat16] [--recompute 0.65]

A 3-D U-Net on three volumes of noise, one a step, with cross-entropy, SGD with momentum and two batches read ahead. Measured is the largest of all ranks by the
operating system (VmHWM), less what was resident when all was imported; with ``--recompute`` the plan needs no more than that part of what it would by the
prediction. Start another process for each figure.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lbpar.config.run_file import parse_run
from lbpar.cost.machine import Machine, find_machine
from lbpar.engine.registry import get_engine
from lbpar.plan.lean import fitted
from lbpar.plan.priced import Settings
from lbpar.train.setup import build_graph, build_plan, join
from lbpar.train.trainer import Trainer
from lbpar.transport.launch import connect
from tests.bench.memory_cpu import MIB, resident

RUN = """
model: {{name: unet3d, input: [{size}, 1], classes: 3, width: {width}}}
data: {{train: synthetic, samples: 3}}
train: {{batch: 1, epochs: 1, optimizer: {{name: sgd, lr: 0.01, momentum: 0.9}}}}
engine: {{name: onednn, threads: 1, dtype: {dtype}}}
machine: laptop
parallel: {{strategy: spatial}}
"""


def this_machine(dtype: str) -> Machine:
    """``laptop``, with what this processor does with volumes."""
    file = find_machine("laptop").file
    copies = get_engine("onednn", dtype, 1).volume_copies
    return Machine(file.model_copy(update={"compute": file.compute.model_copy(update={"volume_copies": copies})}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="96,96,96")
    parser.add_argument("--width", type=float, default=0.25)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--recompute", type=float, help="part of the predicted memory to come down to")
    args = parser.parse_args()
    config = parse_run(RUN.format(**vars(args)))
    transport = connect()
    graph = build_graph(config)
    settings = Settings(graph, 1, this_machine(args.dtype), args.dtype, "momentum")
    priced = settings.priced("spatial", build_plan(config, graph, transport.size))
    if args.recompute:
        priced = fitted(settings, "spatial", priced.plan, int(args.recompute * priced.memory.peak))
    plan, predicted = priced.plan, priced.memory.peak
    again, dearer = len(plan.recompute), priced.seconds / (priced.kept or priced).seconds
    del settings, priced
    base, started = resident("VmRSS"), time.perf_counter()
    graph, plan, transport = join(config, graph, plan, transport, own=True)
    trainer = Trainer.alike(config, graph, plan, transport)
    for record in trainer.train():
        loss = record["loss"]
    peaks = transport.gather(resident("VmHWM") - base)
    if peaks is not None:
        peak, spent = max(peaks), (time.perf_counter() - started) / 3
        print(
            f"{args.size} {args.dtype} {transport.size} ranks: measured {peak / MIB:.0f} MiB, predicted {predicted / MIB:.0f} MiB "
            f"({100 * (predicted / peak - 1):+.0f} %), {again} layers again (predicted x {dearer:.2f}), {spent:.1f} s a step, loss {loss:.7f}",
            flush=True,
        )
    transport.close()


if __name__ == "__main__":
    main()
