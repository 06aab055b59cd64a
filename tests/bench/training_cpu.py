"""Images per second of one process: lbpar's oneDNN engine beside PyTorch, in turn, same network, batch, threads, optimizer.

    python tests/bench/training_cpu.py [--threads 2] [--rounds 5] [--clock wall|cpu] [--dtype float32|bfloat16] [NAME ...]

A round is one step of PyTorch (channels-last and, in the first round, NCHW; the faster is kept) and one of lbpar. The table shows
medians over rounds and the ratio of the medians. With ``--clock cpu`` seconds are those that the process computed, which
other work on the machine disturbs less; use it with one thread only, since threads that wait for each other count too.
With ``--dtype bfloat16`` the other side is our own float32.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("names", nargs="*")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
parser.add_argument("--json", metavar="FILE")
args = parser.parse_args()
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = str(args.threads)

import numpy as np
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2]))
from lbpar.engine.registry import get_engine
from lbpar.graph.graph import TARGET
from lbpar.graph.models.registry import build_model
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.plan import Plan
from lbpar.runtime.optim.sgd import SGD
from lbpar.runtime.worker import Worker
from lbpar.transport.single import SingleTransport
from tests.bench.torch_net import TorchNet

CASES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "resnet50": ("resnet50", {}, 16, "cross_entropy"),
    "resnet18": ("resnet18", {}, 16, "cross_entropy"),
    "densenet121": ("densenet121", {}, 8, "cross_entropy"),
    "vgg16": ("vgg16", {}, 8, "cross_entropy"),
    "unet3d": ("unet3d", {"input": (64, 64, 64, 1), "classes": 3}, 1, "cross_entropy"),
    "cosmoflow": ("cosmoflow", {"input": (64, 64, 64, 4)}, 4, "mse"),
    "resnet18-32": ("resnet18", {"input": (32, 32, 3), "classes": 10}, 64, "cross_entropy"),
}
RATE = 1e-6
# So small that the network does not fit its few random samples: gradients that vanish become denormal numbers, which
# processors multiply many times more slowly.


class Described:
    """The network of a case and random samples for it."""

    def __init__(self, case: str) -> None:
        name, options, self.batch, loss = CASES[case]
        self.graph = build_model(name, **options).with_loss(LOSSES[loss]())
        self.x, self.t = samples(self.graph, self.batch, np.random.default_rng(0))


class Lbpar(Described):
    def __init__(self, case: str, dtype: str = "float32") -> None:
        super().__init__(case)
        engine = get_engine("onednn", dtype, args.threads)
        self.worker = Worker(self.graph, Plan(Grid()), engine, SingleTransport())
        self.executor = self.worker.executor(self.batch)
        sgd = SGD(RATE, momentum=0.9)
        sgd.engine = engine
        self.executor.on_update = lambda p, g: sgd.step(p, g, RATE)
        feeds = self.executor.program.feeds
        self.feeds = {b: self.t if s == TARGET else self.x for b, s in feeds.items()}

    def step(self) -> float:
        return self.worker.run(self.feeds, self.batch).loss


class Torch:
    def __init__(self, ours: Described, case: str, last: bool) -> None:
        self.net = TorchNet(ours.graph)
        rank = len(ours.graph.shapes(1)["input"]) - 2
        self.memory = {2: torch.channels_last, 3: torch.channels_last_3d}[rank] if last else torch.contiguous_format
        self.net = self.net.to(memory_format=self.memory)
        self.x = torch.from_numpy(ours.x).movedim(-1, 1).contiguous(memory_format=self.memory)
        self.t = torch.from_numpy(ours.t)
        self.loss = functional.mse_loss if CASES[case][3] == "mse" else functional.cross_entropy
        self.optimizer = torch.optim.SGD(self.net.parameters(), RATE, momentum=0.9)

    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.net(self.x), self.t)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def samples(graph: Any, batch: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    shapes = graph.shapes(batch)
    x = rng.standard_normal(shapes["input"], dtype=np.float32)
    if graph[TARGET].op.dtype == "int64":
        return x, rng.integers(0, shapes[graph.output][-1], shapes[TARGET])
    return x, rng.random(shapes[TARGET], dtype=np.float32)


def timed(step: Any) -> float:
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    start = clock()
    step()
    return clock() - start


def alternate(theirs: Any, ours: Any) -> tuple[float, float]:
    """Median seconds of a step of each, one after the other in every round."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(args.rounds):
        times[0].append(timed(theirs.step))
        times[1].append(timed(ours.step))
    return median(times[0]), median(times[1])


def compare(case: str) -> dict[str, Any]:
    ours = Lbpar(case)
    orders = {"channels-last": Torch(ours, case, True), "NCHW": Torch(ours, case, False)}
    for t in orders.values():
        t.step()
    first = {name: timed(t.step) for name, t in orders.items()}
    best = min(first, key=lambda k: first[k])
    theirs = orders[best]
    orders.clear()
    ours.step()
    return row(case, f"PyTorch {best}", "lbpar", ours.batch, *alternate(theirs, ours))


def compare_types(case: str) -> dict[str, Any]:
    plain, ours = Lbpar(case), Lbpar(case, args.dtype)
    plain.step(), ours.step()
    return row(case, "lbpar float32", f"lbpar {args.dtype}", ours.batch, *alternate(plain, ours))


def row(case: str, a: str, b: str, batch: int, first: float, second: float) -> dict[str, Any]:
    ratio = first / second
    print(
        f"{case:14} batch {batch:3}  {a} {batch / first:7.2f}  {b} {batch / second:7.2f} images/s  ratio {ratio:.2f}",
        flush=True,
    )
    return {"network": case, "batch": batch, a: batch / first, b: batch / second, "ratio": ratio}


if __name__ == "__main__":
    torch.set_num_threads(args.threads)
    run = compare if args.dtype == "float32" else compare_types
    rows = [run(case) for case in args.names or CASES]
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
