"""Images per second of one process: lbpar's oneDNN engine beside PyTorch, in turn, same network, batch, threads, optimizer.

    python tests/bench/training_cpu.py [--threads 2] [--tries 3] [--rounds 5] [--clock wall|cpu] [--dtype float32|bfloat16] [NAME ...]

PyTorch runs in three forms: channels-last, NCHW, and channels-last through torch.compile (which needs a C++ compiler; its compilation is
not timed). After a step to warm up, each makes a few steps in turn with the others, and the one with the fastest step is kept. A round is
one step of it and one of lbpar; the table shows medians over rounds and the ratio of the medians. With ``--clock cpu`` seconds are those that the process computed, which
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
parser.add_argument("--tries", type=int, default=3)
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
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.models.registry import build_model
from lbpar.program.plan import Plan
from lbpar.runtime.optim.rules import SGD
from lbpar.runtime.worker import Worker
from lbpar.selftest.torch_net import TorchNet
from lbpar.transport.single import SingleTransport

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
    def __init__(self, case: str, dtype: str = "float32", plan: Plan | None = None) -> None:
        super().__init__(case)
        engine = get_engine("onednn", dtype, args.threads)
        self.worker = Worker(self.graph, plan or Plan(Grid()), engine, SingleTransport())
        self.executor = self.worker.executor(self.batch)
        sgd = SGD(RATE, momentum=0.9)
        sgd.engine = engine
        kinds = self.worker.params
        sgd.init_state(
            {n: a for n, a in self.worker.state.items() if kinds[n].kind != "statistic"}
        )  # as trainers do, first
        self.executor.on_update = lambda p, g: sgd.step(p, g, RATE)
        feeds = self.executor.program.feeds
        self.feeds = {b: self.t if s == TARGET else self.x for b, s in feeds.items()}

    def step(self) -> float:
        return self.worker.run(self.feeds, self.batch).loss


class Torch:
    def __init__(self, ours: Described, case: str, last: bool, compiled: bool = False) -> None:
        rank = len(ours.graph.shapes(1)["input"]) - 2
        memory = {2: torch.channels_last, 3: torch.channels_last_3d}[rank] if last else torch.contiguous_format
        self.net: Any = TorchNet(ours.graph).to(memory_format=memory)
        if compiled:
            self.net = torch.compile(self.net)
        self.x = torch.from_numpy(ours.x).movedim(-1, 1).contiguous(memory_format=memory)
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


def in_turn(count: int, *sides: Any) -> list[list[float]]:
    """Seconds of so many steps of each, one after the other in every round."""
    rounds = [[timed(side.step) for side in sides] for _ in range(count)]
    return [list(times) for times in zip(*rounds, strict=True)]


def fastest(ours: Described, case: str) -> tuple[str, Torch, dict[str, float]]:
    """The form of PyTorch with the fastest step, and the images per second of the fastest step of each form."""
    forms = {
        "channels-last": Torch(ours, case, last=True),
        "NCHW": Torch(ours, case, last=False),
        "channels-last compiled": Torch(ours, case, last=True, compiled=True),
    }
    for name, net in list(forms.items()):
        try:
            net.step()
        except torch._dynamo.exc.TorchDynamoException as error:
            print(f"{case}: PyTorch {name} is left out: {str(error).splitlines()[0]}", file=sys.stderr)
            del forms[name]
    best = dict(zip(forms, map(min, in_turn(args.tries, *forms.values())), strict=True))
    name = min(best, key=best.__getitem__)
    return name, forms[name], {k: ours.batch / seconds for k, seconds in best.items()}


def compare(case: str) -> dict[str, Any]:
    ours = Lbpar(case)
    name, theirs, tried = fastest(ours, case)
    ours.step()
    return row(case, f"PyTorch {name}", "lbpar", ours.batch, *in_turn(args.rounds, theirs, ours)) | {"tried": tried}


def compare_types(case: str) -> dict[str, Any]:
    plain, ours = Lbpar(case), Lbpar(case, args.dtype)
    plain.step(), ours.step()
    return row(case, "lbpar float32", f"lbpar {args.dtype}", ours.batch, *in_turn(args.rounds, plain, ours))


def row(case: str, a: str, b: str, batch: int, *times: list[float]) -> dict[str, Any]:
    first, second = map(median, times)
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
